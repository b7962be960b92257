"""What tokens stand for, as text and as bytes."""

from __future__ import annotations

import re
from functools import cached_property
from itertools import accumulate

from tokenizers import AddedToken
from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

_BYTE_OF = {character: byte for byte, character in bytes_to_unicode().items()}
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
# What decoders write for bytes that are no whole character.
REPLACEMENT = "\ufffd"


class TokenTexts:
    """Texts of the tokens of a fast tokenizer, special ones too. Any thread may use it."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._backend = tokenizer._tokenizer
        self._known: dict[int, bytes] = {}

    def text_of(self, token: int) -> str:
        """The token's text; that of bytes which are no whole characters is `bytes:\\xe2\\x82`, as OpenAI writes it."""
        found = self.bytes_of(token)
        try:
            return found.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in found)

    def bytes_of(self, token: int) -> bytes:
        """The UTF-8 bytes that the token adds to a text."""
        found = self._known.get(token)
        if found is None:
            found = self._known[token] = self._find_bytes(token)
        return found

    def offsets(self, context: list[int], tokens: list[int]) -> list[int]:
        """Where each token begins in the text of `tokens`, in characters, when they follow `context`.

        A token that goes on with a character of the one before begins where that character does.
        """
        text = GrowingText(self, context)
        before = []
        for token in tokens:
            before.append((len(text.settled), text.open))
            text.add(token)
        whole = text.whole
        known = (start + common_length(part, whole[start : start + len(part)]) for start, part in before)
        # A run of bytes may be whole characters for a while, and none in the end.
        return list(accumulate(known, max))

    def decode(self, tokens: list[int]) -> str:
        """The text of the tokens, as an answer shows it: without the special ones."""
        return str(self._backend.decode(tokens, skip_special_tokens=True))

    def is_hidden(self, token: int) -> bool:
        """Whether the token leaves no trace in a text: a special one, or one that the tokenizer doesn't have."""
        added = self._added.get(token)
        return self._backend.id_to_token(token) is None if added is None else added.special

    def is_byte(self, token: int) -> bool:
        """Whether the token is a byte that a tokenizer with byte fallback has for what it has no token for."""
        return _BYTE_TOKEN.fullmatch(self._backend.id_to_token(token) or "") is not None

    def _find_bytes(self, token: int) -> bytes:
        piece = self._backend.id_to_token(token) or ""
        if token in self._added:
            return piece.encode()
        if self._is_byte_level:
            return b"".join(bytes([_BYTE_OF[c]]) if c in _BYTE_OF else c.encode() for c in piece)
        if byte := _BYTE_TOKEN.fullmatch(piece):
            return bytes([int(byte[1], 16)])
        # After another token, since at a text's beginning decoders drop a leading space.
        before, together = self._decode([self._anchor]), self._decode([self._anchor, token])
        return (together[len(before) :] if together.startswith(before) else self._decode([token])).encode()

    @cached_property
    def _added(self) -> dict[int, AddedToken]:
        found: dict[int, AddedToken] = self._tokenizer.added_tokens_decoder
        return found

    @cached_property
    def _is_byte_level(self) -> bool:
        decoder = self._backend.decoder
        return decoder is not None and b'"ByteLevel"' in decoder.__getstate__()

    @cached_property
    def _anchor(self) -> int:
        ids = self._tokenizer.encode("a", add_special_tokens=False)
        return ids[-1] if ids else 0

    def _decode(self, ids: list[int]) -> str:
        return str(self._backend.decode(ids, skip_special_tokens=False))


class GrowingText:
    """The text of tokens that come one by one and follow `context`: at any time, as if all were decoded together.

    A later token may change what stands there: it goes on with a character, or shows that a run of byte tokens is no
    text, all of which then becomes replacement characters. `settled` can't change any more; `open` is the rest, which
    is decoded anew with every token.
    """

    def __init__(self, texts: TokenTexts, context: list[int]) -> None:
        self.settled = ""
        self.open = ""
        self._texts = texts
        self._begin(context)

    @property
    def whole(self) -> str:
        return self.settled + self.open

    def add(self, token: int) -> None:
        if self._texts.is_hidden(token):
            return
        self._tokens.append(token)
        together = self._texts.decode(self._context + self._tokens)
        # A context that ends within a character changes its own decoding; the tokens are then decoded alone.
        follows = together.startswith(self._before)
        self.open = together[len(self._before) :] if follows else self._texts.decode(self._tokens)
        if self.open and not self.open.endswith(REPLACEMENT) and not self._texts.is_byte(token):
            self.settled, self.open = self.whole, ""
            self._begin([token])

    def _begin(self, context: list[int]) -> None:
        """From here on, after these tokens; at a text's beginning decoders would drop a leading space."""
        self._context = context
        self._before = self._texts.decode(context)
        self._tokens: list[int] = []


def common_length(one: str, other: str) -> int:
    """How many characters two texts begin with alike."""
    shorter = min(len(one), len(other))
    return next((i for i in range(shorter) if one[i] != other[i]), shorter)
