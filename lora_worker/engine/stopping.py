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
    """Ends rows at their stop tokens, at their stop strings, and at their token limit.

    Within a row's first `min_tokens` tokens no stop string counts, as in vLLM; stop tokens are not drawn there.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None) -> None:
        self._tokenizer = tokenizer
        self._texts: dict[Sequence, _GrowingText] = {}

    def check(self, sequence: Sequence) -> End | None:
        """Whether the token just added ends the row."""
        token = sequence.tokens[-1]
        if token in sequence.stop_token_ids:
            return End("stop")
        if sequence.stop_strings:
            text = self._texts.get(sequence)
            if text is None:
                text = self._texts[sequence] = _GrowingText(self._tokenizer, sequence.prompt)
            stopped = text.add(token, sequence.stop_strings)
            if stopped is not None and sequence.output_count > sequence.min_tokens:
                return End("stop", stopped)
        return End("length") if sequence.output_count >= sequence.max_tokens else None

    def forget(self, sequence: Sequence) -> None:
        self._texts.pop(sequence, None)


class _GrowingText:
    """A row's text, decoded token by token, searched only where a stop string could newly end."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None, prompt: list[int]) -> None:
        assert tokenizer is not None, "stop strings were accepted without a tokenizer"
        self._tokenizer = tokenizer._tokenizer
        # After the prompt's last tokens, as the whole answer is decoded too.
        self._stream = DecodeStream(prompt[-PREFIX_TOKENS:], skip_special_tokens=True)
        self._text = ""

    def add(self, token: int, stop_strings: list[str]) -> str | None:
        """The text before the earliest stop string, of those that the token completed."""
        piece = self._stream.step(self._tokenizer, token)
        if not piece:
            return None
        before = len(self._text)
        self._text += piece
        places = (self._text.find(s, max(0, before - len(s) + 1)) for s in stop_strings)
        found = [place for place in places if place >= 0]
        return self._text[: min(found)] if found else None
