"""Between the wire and the engine: a body becomes rows."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from lora_worker.engine.chat import ChatTemplate
from lora_worker.engine.responses import FinishedRows
from lora_worker.engine.sequence import Finished, SamplingParams, Sequence
from lora_worker.errors import InvalidRequestError, PromptTooLongError
from lora_worker.messages import GenerateRequest, parse_generate


class RequestOptions(NamedTuple):
    """What a request carries beside its body: see `Sequence`. `on_finished` gets the ends of its rows, all at once."""

    request_id: str
    on_finished: Callable[[list[Finished]], None]
    priority: int = 0
    time_limit_seconds: float | None = None
    may_start: Callable[[], bool] | None = None
    on_started: Callable[[], None] | None = None
    arrived_at: float = 0.0


class RequestReader:
    """Checks and tokenizes bodies. Used by one thread at a time; never by the engine's, since tokenizing is slow."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase | None,
        *,
        base_name: str,
        vocabulary: int,
        eos_ids: frozenset[int],
        max_model_len: int,
        check_adapter: Callable[[str], object],
    ) -> None:
        self._tokenizer = tokenizer
        self._template = ChatTemplate(tokenizer) if tokenizer is not None else None
        self._base_name = base_name
        self._vocabulary = vocabulary
        self._eos_ids = frozenset(token for token in eos_ids if token < vocabulary)
        self._max_model_len = max_model_len
        self._check_adapter = check_adapter

    def read(self, body: Mapping[str, Any], options: RequestOptions) -> Sequence:
        """The first row of a request, with its siblings.

        Raises InvalidRequestError, PromptTooLongError or UnknownAdapterError with one sentence.
        """
        request = parse_generate(body)
        adapter = None if request.model in (None, self._base_name) else request.model
        if adapter is not None:
            self._check_adapter(adapter)
        self._check_tokenizer(request)
        prompt = self._prompt_ids(request)
        params = self._params(request)
        ends = FinishedRows(request.n)

        def on_finished(end: Finished) -> None:
            if (all_ends := ends.add(end)) is not None:
                options.on_finished(all_ends)

        rows = [
            Sequence(
                request_id=options.request_id,
                prompt=prompt,
                params=params._replace(seed=choice_seed(params.seed, index)),
                max_tokens=self._max_tokens(request, len(prompt)),
                on_finished=on_finished,
                adapter_name=adapter,
                is_chat=request.is_chat,
                stop_strings=request.stop_strings,
                stop_token_ids=self._stop_token_ids(request),
                min_tokens=request.min_tokens,
                top_logprobs=request.alternatives,
                index=index,
                priority=options.priority,
                time_limit_seconds=options.time_limit_seconds,
                may_start=options.may_start,
                on_started=options.on_started,
                arrived_at=options.arrived_at,
            )
            for index in range(request.n)
        ]
        for row in rows:
            row.siblings = [other for other in rows if other is not row]
        return rows[0]

    def _check_tokenizer(self, request: GenerateRequest) -> None:
        if getattr(self._tokenizer, "is_fast", False):
            return
        if request.stop_strings:
            raise InvalidRequestError("the served model has no fast tokenizer, so stop strings can't be watched for")
        if request.alternatives is not None:
            raise InvalidRequestError("the served model has no fast tokenizer, so logprobs can't name their tokens")

    def _params(self, request: GenerateRequest) -> SamplingParams:
        self._check_ids("logit_bias", list(request.logit_bias))
        return SamplingParams(
            request.temperature,
            request.top_p,
            request.top_k,
            secrets.randbits(63) if request.seed is None else request.seed,
            request.min_p,
            request.presence_penalty,
            request.frequency_penalty,
            request.repetition_penalty,
            tuple(request.logit_bias.items()),
        )

    def _stop_token_ids(self, request: GenerateRequest) -> frozenset[int]:
        self._check_ids("stop_token_ids", request.stop_token_ids)
        found = frozenset(request.stop_token_ids) | (frozenset() if request.ignore_eos else self._eos_ids)
        if request.min_tokens and len(found) >= self._vocabulary:
            raise InvalidRequestError("min_tokens leaves no token to draw, since all tokens are in stop_token_ids")
        return found

    def _prompt_ids(self, request: GenerateRequest) -> list[int]:
        if isinstance(request.prompt, list):
            ids = request.prompt
        elif self._tokenizer is None or self._template is None:
            raise InvalidRequestError("the served model has no tokenizer; give the prompt as a list of token ids")
        elif request.prompt is not None:
            ids = self._tokenizer.encode(request.prompt)
        else:
            ids = self._template.ids(request)
        if not ids:
            raise InvalidRequestError("the prompt has no tokens; give at least one")
        self._check_ids("the prompt", ids)
        return ids

    def _check_ids(self, where: str, ids: list[int]) -> None:
        if ids and max(ids) >= self._vocabulary:
            raise InvalidRequestError(
                f"{where} holds the token id {max(ids)}, but the model has {self._vocabulary} tokens, from 0"
            )

    def _max_tokens(self, request: GenerateRequest, prompt_tokens: int) -> int:
        left = self._max_model_len - prompt_tokens
        asked = request.token_limit
        if left < 1:
            raise PromptTooLongError(
                f"the prompt has {prompt_tokens} tokens, but the model takes {self._max_model_len} for prompt and "
                f"answer together (max_model_len); shorten the prompt to at most {self._max_model_len - 1}"
            )
        if asked is not None and asked > left:
            raise PromptTooLongError(
                f"the prompt has {prompt_tokens} tokens and max_tokens is {asked}, but the model takes "
                f"{self._max_model_len} together (max_model_len); lower max_tokens to at most {left}"
            )
        if request.min_tokens > left:
            raise PromptTooLongError(
                f"the prompt has {prompt_tokens} tokens and min_tokens is {request.min_tokens}, but the model takes "
                f"{self._max_model_len} together (max_model_len); lower min_tokens to at most {left}"
            )
        return left if asked is None else asked


def choice_seed(seed: int, index: int) -> int:
    """The seed of a request's choice: its own for the first, and for each other one a number without kin.

    Were it seed + index, requests with the seeds 1 and 2 would share choices.
    """
    if not index:
        return seed
    return int.from_bytes(hashlib.blake2b(f"{seed} {index}".encode(), digest_size=8).digest()) >> 1
