"""What a single token stands for, as text and as bytes."""

from __future__ import annotations

import re
from functools import cached_property

from tokenizers.decoders import DecodeStream
from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

_BYTE_OF = {character: byte for byte, character in bytes_to_unicode().items()}
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


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
        """Where each token begins in the text of `tokens`, in characters, when they follow `context`."""
        stream = DecodeStream(context, skip_special_tokens=True)
        found, place = [], 0
        for token in tokens:
            found.append(place)
            place += len(stream.step(self._backend, token) or "")
        return found

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
    def _added(self) -> set[int]:
        return set(self._tokenizer.added_tokens_decoder)

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
