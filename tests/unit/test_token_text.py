"""Texts and bytes of single tokens, whatever kind of tokenizer they are of."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from lora_worker.engine.token_text import TokenTexts

TEXT = "a word, a 語 and a 😀"


def byte_level() -> PreTrainedTokenizerFast:
    """As GPT-2's, Llama 3's and Qwen's: every byte is a character of an alphabet. There are no merges."""
    vocabulary = {character: i for i, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")


def byte_fallback() -> PreTrainedTokenizerFast:
    """As Llama 2's and Gemma's: spaces are marked, and unknown characters fall back to tokens of one byte."""
    words = ["<unk>", "▁", "▁a", "a", "w", "o", "r", "d", ",", "n", "▁w"]
    vocabulary = {word: i for i, word in enumerate([*words, *(f"<0x{byte:02X}>" for byte in range(256))])}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("▁", "a"), ("▁", "w")], unk_token="<unk>", byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")


TOKENIZERS = [byte_level(), byte_fallback()]


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
def test_the_bytes_of_the_tokens_are_the_bytes_of_the_text(tokenizer: PreTrainedTokenizerFast) -> None:
    texts = TokenTexts(tokenizer)
    ids = tokenizer.encode(TEXT, add_special_tokens=False)
    assert b"".join(texts.bytes_of(token) for token in ids).decode() == TEXT
    assert len(ids) > len(TEXT)  # some characters are of several tokens


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
def test_a_token_of_no_whole_character_shows_its_bytes(tokenizer: PreTrainedTokenizerFast) -> None:
    texts = TokenTexts(tokenizer)
    first = tokenizer.encode("語", add_special_tokens=False)[-3]
    assert texts.text_of(first) == "bytes:\\xe8"
    assert texts.text_of(tokenizer.encode("a a", add_special_tokens=False)[-1]).strip() == "a"
    assert texts.text_of(tokenizer.encode("<|end|>", add_special_tokens=False)[0]) == "<|end|>"


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
def test_every_token_begins_where_its_character_begins(tokenizer: PreTrainedTokenizerFast) -> None:
    texts = TokenTexts(tokenizer)
    context, ids = (tokenizer.encode(text, add_special_tokens=False) for text in ("a", TEXT))
    seen = b""
    for token, offset in zip(ids, texts.offsets(context, ids), strict=True):
        assert offset == len(seen.decode(errors="ignore"))
        seen += texts.bytes_of(token)
