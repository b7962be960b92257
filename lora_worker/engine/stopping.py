"""When a row ends."""

from __future__ import annotations

from typing import NamedTuple

from tokenizers.decoders import DecodeStream
from transformers import PreTrainedTokenizerBase

from lora_worker.engine.sequence import PREFIX_TOKENS, Sequence
from lora_worker.messages import FinishReason


class End(NamedTuple):
    """Why a row ends, and its text up to a stop string where one was found."""

    reason: FinishReason
    stopped_text: str | None = None


class StopWatch:
    """Ends rows at the end-of-sequence tokens, at their token limit, and at their stop strings."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None, eos_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._eos_ids = eos_ids
        self._texts: dict[str, _GrowingText] = {}

    def check(self, sequence: Sequence) -> End | None:
        """Whether the token just added ends the row."""
        token = sequence.tokens[-1]
        if token in self._eos_ids and not sequence.ignore_eos:
            return End("stop")
        if sequence.stop_strings:
            text = self._texts.get(sequence.request_id)
            if text is None:
                text = self._texts[sequence.request_id] = _GrowingText(self._tokenizer, sequence.prompt)
            stopped = text.add(token, sequence.stop_strings)
            if stopped is not None:
                return End("stop", stopped)
        return End("length") if sequence.output_count >= sequence.max_tokens else None

    def forget(self, request_id: str) -> None:
        self._texts.pop(request_id, None)


class _GrowingText:
    """A row's text, decoded token by token, searched only where a stop string could newly end."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None, prompt: list[int]) -> None:
        assert tokenizer is not None, "stop strings were accepted without a tokenizer"
        self._tokenizer = tokenizer._tokenizer
        # After the prompt's last tokens, as the whole answer is decoded too.
        self._stream = DecodeStream(prompt[-PREFIX_TOKENS:], skip_special_tokens=True)
        self._text = ""

    def add(self, token: int, stop_strings: list[str]) -> str | None:
        """The text before the earliest stop string, if the token completed one."""
        piece = self._stream.step(self._tokenizer, token)
        if not piece:
            return None
        start = max(0, len(self._text) - max(len(s) for s in stop_strings) + 1)
        self._text += piece
        found = [place for s in stop_strings if (place := self._text.find(s, start)) >= 0]
        return self._text[: min(found)] if found else None
