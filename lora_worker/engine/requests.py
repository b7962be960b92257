"""Between the wire and the engine: a body becomes a sequence, and a finished sequence an OpenAI object."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from jinja2.exceptions import TemplateError
from transformers import PreTrainedTokenizerBase

from lora_worker.engine.sequence import PREFIX_TOKENS, Finished, SamplingParams, Sequence
from lora_worker.errors import InvalidRequestError, PromptTooLongError
from lora_worker.messages import GenerateRequest, parse_generate


class RowOptions(NamedTuple):
    """What a row carries beside its body: see `Sequence`."""

    request_id: str
    on_finished: Callable[[Finished], None]
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
        max_model_len: int,
        check_adapter: Callable[[str], object],
    ) -> None:
        self._tokenizer = tokenizer
        self._base_name = base_name
        self._vocabulary = vocabulary
        self._max_model_len = max_model_len
        self._check_adapter = check_adapter

    def read(self, body: Mapping[str, Any], options: RowOptions) -> Sequence:
        """Raises InvalidRequestError, PromptTooLongError or UnknownAdapterError with one sentence."""
        request = parse_generate(body)
        adapter = None if request.model in (None, self._base_name) else request.model
        if adapter is not None:
            self._check_adapter(adapter)
        if request.stop_strings and not getattr(self._tokenizer, "is_fast", False):
            raise InvalidRequestError("the served model has no fast tokenizer, so stop strings can't be watched for")
        prompt = self._prompt_ids(request)
        return Sequence(
            prompt=prompt,
            params=SamplingParams(
                request.temperature,
                request.top_p,
                request.top_k,
                secrets.randbits(63) if request.seed is None else request.seed,
            ),
            max_tokens=self._max_tokens(request, len(prompt)),
            adapter_name=adapter,
            is_chat=request.is_chat,
            stop_strings=request.stop_strings,
            ignore_eos=request.ignore_eos,
            **options._asdict(),
        )

    def _prompt_ids(self, request: GenerateRequest) -> list[int]:
        if isinstance(request.prompt, list):
            ids = request.prompt
            beyond = [token for token in ids if token >= self._vocabulary]
            if beyond:
                raise InvalidRequestError(
                    f"the prompt holds the token id {beyond[0]}, but the model has {self._vocabulary} tokens, from 0"
                )
        elif self._tokenizer is None:
            raise InvalidRequestError("the served model has no tokenizer; give the prompt as a list of token ids")
        elif request.prompt is not None:
            ids = self._tokenizer.encode(request.prompt)
        else:
            ids = self._chat_ids(request, self._tokenizer)
        if not ids:
            raise InvalidRequestError("the prompt has no tokens; give at least one")
        return ids

    def _chat_ids(self, request: GenerateRequest, tokenizer: PreTrainedTokenizerBase) -> list[int]:
        if not tokenizer.chat_template:
            raise InvalidRequestError("the served model has no chat template; give a prompt instead of messages")
        messages = [message.model_dump(exclude_unset=True) for message in request.messages or []]
        try:
            text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        except TemplateError as error:
            raise InvalidRequestError(f"the model's chat template refuses the messages: {error}") from None
        # The template writes the special tokens itself.
        ids: list[int] = tokenizer.encode(str(text), add_special_tokens=False)
        return ids

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
        return left if asked is None else asked


class ResponseWriter:
    """Makes the OpenAI object of a finished row. Any thread may use it."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None, *, base_name: str, worker_name: str) -> None:
        self._tokenizer = tokenizer
        self._base_name = base_name
        self._worker_name = worker_name

    def write(self, finished: Finished) -> dict[str, Any]:
        sequence = finished.sequence
        is_chat = sequence.is_chat
        text = self._text(finished)
        started = sequence.started_at or sequence.arrived_at
        choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": finished.reason}
        choice |= {"message": {"role": "assistant", "content": text}} if is_chat else {"text": text}
        return {
            "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{sequence.request_id}",
            "object": "chat.completion" if is_chat else "text_completion",
            "created": int(time.time()),
            "model": sequence.adapter_name or self._base_name,
            "choices": [choice],
            "usage": {
                "prompt_tokens": len(sequence.prompt),
                "completion_tokens": sequence.output_count,
                "total_tokens": len(sequence.tokens),
            },
            "lora_worker": {
                "adapter": sequence.adapter_name,
                "digest": sequence.adapter.digest if sequence.adapter else None,
                "worker": self._worker_name,
                "queued_seconds": round(sequence.queued_seconds, 4),
                "run_seconds": round(time.monotonic() - started, 4),
            },
        }

    def _text(self, finished: Finished) -> str:
        if finished.stopped_text is not None:
            return finished.stopped_text
        if self._tokenizer is None:
            return ""
        sequence = finished.sequence
        prefix = sequence.prompt[-PREFIX_TOKENS:]
        before = self._decode(prefix)
        together = self._decode(prefix + sequence.output)
        # A prompt that ends within a character changes its own decoding; the answer is then decoded alone.
        return together[len(before) :] if together.startswith(before) else self._decode(sequence.output)

    def _decode(self, ids: list[int]) -> str:
        assert self._tokenizer is not None
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))
