"""When a row ends."""

from __future__ import annotations

from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from lora_worker.engine.sequence import PREFIX_TOKENS, Sequence
from lora_worker.engine.token_text import REPLACEMENT, GrowingText, TokenTexts, common_length
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
        self._texts = TokenTexts(tokenizer) if tokenizer is not None and tokenizer.is_fast else None
        self._watched: dict[Sequence, _WatchedText] = {}

    def check(self, sequence: Sequence) -> End | None:
        """Whether the token just added ends the row."""
        token = sequence.tokens[-1]
        if token in sequence.stop_token_ids:
            return End("stop")
        if sequence.stop_strings:
            text = self._watched.get(sequence)
            if text is None:
                assert self._texts is not None, "stop strings were accepted without a fast tokenizer"
                text = self._watched[sequence] = _WatchedText(self._texts, sequence.prompt)
            stopped = text.add(token, sequence.stop_strings)
            if stopped is not None and sequence.output_count > sequence.min_tokens:
                return End("stop", stopped)
        return End("length") if sequence.output_count >= sequence.max_tokens else None

    def forget(self, sequence: Sequence) -> None:
        self._watched.pop(sequence, None)


class _WatchedText:
    """A row's text, searched only where a stop string could newly end."""

    def __init__(self, texts: TokenTexts, prompt: list[int]) -> None:
        # After the prompt's last tokens, as the whole answer is decoded too.
        self._text = GrowingText(texts, prompt[-PREFIX_TOKENS:])
        self._searched = ""

    def add(self, token: int, stop_strings: list[str]) -> str | None:
        """The text before the earliest stop string, of those that the token completed."""
        settled = len(self._text.settled)
        self._text.add(token)
        # What may become a character yet is not looked at.
        text = self._text.whole.rstrip(REPLACEMENT)
        known = settled + common_length(self._searched[settled:], text[settled:])
        if not self._searched.startswith(text):  # else it has only been taken back until its next byte comes
            self._searched = text
        places = (text.find(s, max(0, known - len(s) + 1)) for s in stop_strings)
        found = [place for place in places if place >= 0]
        return text[: min(found)] if found else None
