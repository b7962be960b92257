"""Texts and bytes of tokens, whatever kind of tokenizer they are of."""

from __future__ import annotations

import random

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from lora_worker.engine.sequence import SamplingParams, Sequence
from lora_worker.engine.stopping import End, StopWatch
from lora_worker.engine.token_text import GrowingText, TokenTexts

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


def ids_of_pieces(tokenizer: PreTrainedTokenizerFast, pieces: list[str]) -> list[int]:
    return [tokenizer.get_vocab()[piece] for piece in pieces]


def random_tokens(tokenizer: PreTrainedTokenizerFast, chance: random.Random) -> list[int]:
    """Bytes that make characters, bytes that make none, words, a special token, and one that the tokenizer lacks."""
    some = tokenizer.encode("\n語 a 😀", add_special_tokens=False)
    return [chance.choice([*some, chance.randrange(len(tokenizer) + 1)]) for _ in range(chance.randrange(1, 40))]


def as_answered(tokenizer: PreTrainedTokenizerFast, context: list[int], tokens: list[int]) -> str:
    """transformers' decoding of all the tokens at once, after the context where that is whole characters."""
    before, together, alone = (
        str(tokenizer.decode(ids, skip_special_tokens=True)) for ids in (context, context + tokens, tokens)
    )
    return together[len(before) :] if together.startswith(before) else alone


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
@pytest.mark.parametrize("seed", range(100))
def test_a_growing_text_is_at_any_time_the_decoding_of_all_its_tokens(
    tokenizer: PreTrainedTokenizerFast, seed: int
) -> None:
    chance = random.Random(seed)
    context, tokens = random_tokens(tokenizer, chance)[-6:], random_tokens(tokenizer, chance)
    text = GrowingText(TokenTexts(tokenizer), context)
    for count, token in enumerate(tokens, 1):
        settled = text.settled
        text.add(token)
        assert text.whole == as_answered(tokenizer, context, tokens[:count])
        assert text.settled.startswith(settled)
    offsets = TokenTexts(tokenizer).offsets(context, tokens)
    assert offsets == sorted(offsets)
    assert offsets[-1] <= len(text.whole)


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
@pytest.mark.parametrize("seed", range(100))
def test_a_row_ends_at_the_first_token_whose_text_has_a_stop_string(
    tokenizer: PreTrainedTokenizerFast, seed: int
) -> None:
    chance = random.Random(seed)
    prompt, tokens = random_tokens(tokenizer, chance), random_tokens(tokenizer, chance)
    stops = chance.sample(["\n", "語", "a語", "d\n", "😀", " a", "never"], 2)
    sequence = Sequence("id", prompt, SamplingParams(0, 1, 0, 0), len(tokens) + 1, lambda _: None, stop_strings=stops)
    watch = StopWatch(tokenizer)
    for count, token in enumerate(tokens, 1):
        sequence.tokens.append(token)
        end = watch.check(sequence)
        text = as_answered(tokenizer, prompt[-6:], tokens[:count]).rstrip("\ufffd")
        found = [text.find(stop) for stop in stops if stop in text]
        assert end == (End("stop", text[: min(found)]) if found else None)
        if end is not None:
            break


def test_a_newline_before_bytes_that_are_no_text_ends_no_row_in_an_error() -> None:
    """With byte fallback the newline is a byte as well, and becomes a replacement character with the others."""
    tokenizer = byte_fallback()
    tokens = ids_of_pieces(tokenizer, ["▁w", "<0x0A>", "<0xF0>", "<0x9F>", "▁w"])
    texts = TokenTexts(tokenizer)
    assert texts.offsets(tokens[:1], tokens) == [0, 2, 2, 4, 5]


def test_a_stop_string_within_min_tokens_is_not_found_again_by_the_next_byte() -> None:
    tokenizer = byte_fallback()
    prompt, *tokens = ids_of_pieces(tokenizer, ["▁w", "<0x0A>", "<0xE8>", "<0xAA>", "<0x9E>", "a"])
    params = SamplingParams(0, 1, 0, 0)
    sequence = Sequence("id", [prompt], params, 9, lambda _: None, stop_strings=["\n"], min_tokens=1)
    watch = StopWatch(tokenizer)
    for token in tokens:
        sequence.tokens.append(token)
        assert watch.check(sequence) is None
