"""The rows of a request, finished, become one OpenAI object."""

from __future__ import annotations

import time
from typing import Any

from transformers import PreTrainedTokenizerBase

from lora_worker.engine.sequence import PREFIX_TOKENS, Finished, Sequence, TokenLogprobs
from lora_worker.engine.token_text import TokenTexts


class FinishedRows:
    """Gathers the ends of a request's rows; on the engine's thread alone."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._ends: list[Finished] = []

    def add(self, end: Finished) -> list[Finished] | None:
        """All ends in the order of the choices, once the last one is there."""
        self._ends.append(end)
        if len(self._ends) < self._count:
            return None
        return sorted(self._ends, key=lambda end: end.sequence.index)


class ResponseWriter:
    """Makes the OpenAI object of a request. Any thread may use it."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None, *, base_name: str, worker_name: str) -> None:
        self._tokenizer = tokenizer
        self._texts = TokenTexts(tokenizer) if tokenizer is not None and tokenizer.is_fast else None
        self._base_name = base_name
        self._worker_name = worker_name

    def write(self, ends: list[Finished]) -> dict[str, Any]:
        """`ends` are the rows of one request in the order of its choices, none of them with an error."""
        first = ends[0].sequence
        started = first.started_at or first.arrived_at
        generated = sum(end.sequence.output_count for end in ends)
        return {
            "id": f"{'chatcmpl' if first.is_chat else 'cmpl'}-{first.request_id}",
            "object": "chat.completion" if first.is_chat else "text_completion",
            "created": int(time.time()),
            "model": first.adapter_name or self._base_name,
            "choices": [self._choice(end) for end in ends],
            "usage": {
                "prompt_tokens": len(first.prompt),
                "completion_tokens": generated,
                "total_tokens": len(first.prompt) + generated,
            },
            "lora_worker": {
                "adapter": first.adapter_name,
                "digest": first.adapter.digest if first.adapter else None,
                "worker": self._worker_name,
                "queued_seconds": round(first.queued_seconds, 4),
                "run_seconds": round(time.monotonic() - started, 4),
            },
        }

    def _choice(self, end: Finished) -> dict[str, Any]:
        sequence = end.sequence
        text = self._text(end)
        logprobs = None
        if sequence.top_logprobs is not None:
            logprobs = self._chat_logprobs(sequence) if sequence.is_chat else self._logprobs(sequence, text)
        said = {"message": {"role": "assistant", "content": text}} if sequence.is_chat else {"text": text}
        return {"index": sequence.index, **said, "logprobs": logprobs, "finish_reason": end.reason}

    def _logprobs(self, sequence: Sequence, text: str) -> dict[str, Any]:
        """OpenAI's shape for completions: lists with one place a generated token, the one that ended the row too."""
        assert self._texts is not None
        offsets = self._texts.offsets(sequence.prompt[-PREFIX_TOKENS:], sequence.output)
        return {
            "tokens": [self._texts.text_of(token) for token in sequence.output],
            "token_logprobs": [entry.logprob for entry in sequence.logprobs],
            "top_logprobs": [
                self._alternatives(token, entry)
                for token, entry in zip(sequence.output, sequence.logprobs, strict=True)
            ],
            "text_offset": [min(offset, len(text)) for offset in offsets],
        }

    def _alternatives(self, token: int, entry: TokenLogprobs) -> dict[str, float]:
        """The likeliest tokens and the drawn one; of several with the same text, the likeliest."""
        assert self._texts is not None
        found: dict[str, float] = {}
        for alternative, logprob in [*entry.top, (token, entry.logprob)]:
            found.setdefault(self._texts.text_of(alternative), logprob)
        return found

    def _chat_logprobs(self, sequence: Sequence) -> dict[str, Any]:
        """OpenAI's shape for chats, with one entry a generated token, the one that ended the row too."""
        content = [
            {**self._entry(token, entry.logprob), "top_logprobs": [self._entry(*top) for top in entry.top]}
            for token, entry in zip(sequence.output, sequence.logprobs, strict=True)
        ]
        return {"content": content, "refusal": None}

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        assert self._texts is not None
        return {"token": self._texts.text_of(token), "logprob": logprob, "bytes": list(self._texts.bytes_of(token))}

    def _text(self, end: Finished) -> str:
        if end.stopped_text is not None:
            return end.stopped_text
        if self._tokenizer is None:
            return ""
        sequence = end.sequence
        # The token that ended the row is no part of its text.
        output = sequence.output[:-1] if end.reason == "stop" else sequence.output
        prefix = sequence.prompt[-PREFIX_TOKENS:]
        before = self._decode(prefix)
        together = self._decode(prefix + output)
        # A prompt that ends within a character changes its own decoding; the answer is then decoded alone.
        return together[len(before) :] if together.startswith(before) else self._decode(output)

    def _decode(self, ids: list[int]) -> str:
        assert self._tokenizer is not None
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))
