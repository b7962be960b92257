"""Logits processors against transformers' own."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    MinNewTokensLengthLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from lora_worker.engine.logits import LogitsProcessors
from lora_worker.engine.sequence import SamplingParams, Sequence

VOCABULARY = 40

tokens = st.integers(0, VOCABULARY - 1)
bounded = st.floats(-2, 2, allow_nan=False)
# transformers keeps biases in float32, which has these exactly.
eighths = st.integers(-800, 800).map(lambda n: n / 8)


@st.composite
def rows(draw: Any) -> Sequence:
    """A row with some of the fields, and some tokens generated already."""
    params = SamplingParams(
        0,
        1,
        0,
        0,
        presence_penalty=draw(st.just(0.0) | bounded),
        frequency_penalty=draw(st.just(0.0) | bounded),
        repetition_penalty=draw(st.just(1.0) | st.floats(0.1, 3)),
        logit_bias=tuple(draw(st.dictionaries(tokens, eighths, max_size=5)).items()),
    )
    prompt, output = draw(st.lists(tokens, min_size=1, max_size=12)), draw(st.lists(tokens, max_size=12))
    row = Sequence(
        "id",
        prompt,
        params,
        20,
        lambda _: None,
        stop_token_ids=draw(st.frozensets(tokens, max_size=3)),
        min_tokens=draw(st.integers(0, 12)),
    )
    row.tokens += output
    return row


def oracle(logits: torch.Tensor, row: Sequence) -> torch.Tensor:
    """logits [V] after transformers' processors in the order of its `generate`, and after OpenAI's formula."""
    params, ids, scores = row.params, torch.tensor([row.tokens]), logits[None]
    if params.logit_bias:
        scores = SequenceBiasLogitsProcessor([[[token], bias] for token, bias in params.logit_bias])(ids, scores)
    scores = RepetitionPenaltyLogitsProcessor(params.repetition_penalty)(ids, scores)
    counts = torch.bincount(torch.tensor(row.output, dtype=torch.long), minlength=VOCABULARY).double()
    scores = scores - counts * params.frequency_penalty - (counts > 0).double() * params.presence_penalty
    if row.stop_token_ids:
        held_back = MinNewTokensLengthLogitsProcessor(len(row.prompt), row.min_tokens, list(row.stop_token_ids))
        scores = held_back(ids, scores)
    found: torch.Tensor = scores[0]
    return found


@settings(max_examples=200, deadline=None)
@given(st.lists(rows(), min_size=1, max_size=5), st.integers(0, 1000))
def test_a_mix_of_rows_gets_transformers_logits_each(mix: list[Sequence], seed: int) -> None:
    logits = torch.randn(len(mix), VOCABULARY, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) * 5
    processed = logits.clone()
    places = LogitsProcessors().process(processed, mix)
    for i, row in enumerate(mix):
        torch.testing.assert_close(processed[i], oracle(logits[i], row), rtol=1e-12, atol=1e-12)
    untouched = [i for i in range(len(mix)) if i not in places]
    assert torch.equal(processed[untouched], logits[untouched])


@settings(max_examples=50, deadline=None)
@given(rows(), st.lists(tokens, min_size=1, max_size=8))
def test_a_row_that_grows_token_by_token_gets_the_same_logits(row: Sequence, more: list[int]) -> None:
    """Counts are kept from step to step; several tokens at once are what a row that was preempted comes back with."""
    processors = LogitsProcessors()
    logits = torch.linspace(-3, 3, VOCABULARY, dtype=torch.float64)
    for count in (0, 1, len(more)):
        row.tokens += more[:count]
        grown = logits[None].clone()
        processors.process(grown, [row])
        torch.testing.assert_close(grown[0], oracle(logits, row), rtol=1e-12, atol=1e-12)


def test_rows_without_such_fields_keep_their_logits_and_leave_no_counts() -> None:
    processors = LogitsProcessors()
    logits = torch.randn(2, VOCABULARY)
    before = logits.clone()
    plain = Sequence("id", [1], SamplingParams(0.7, 0.9, 5, 1), 10, lambda _: None, stop_token_ids=frozenset({3}))
    assert processors.process(logits, [plain, plain]) == []
    assert torch.equal(logits, before)
    assert processors._counts == {}
