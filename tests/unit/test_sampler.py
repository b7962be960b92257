"""Sampling against transformers' own logits processors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from lora_worker.engine.sampler import Sampler, draw
from lora_worker.engine.sequence import SamplingParams, Sequence

CASES = [
    SamplingParams(1.0, 1.0, 0, 0),
    SamplingParams(0.5, 1.0, 0, 0),
    SamplingParams(1.3, 0.9, 0, 0),
    SamplingParams(0.7, 1.0, 5, 0),
    SamplingParams(0.9, 0.6, 20, 0),
    SamplingParams(1.0, 0.05, 0, 0),
    SamplingParams(1.0, 1.0, 1, 0),
    SamplingParams(1.0, 1.0, 0, 0, min_p=0.2),
    SamplingParams(0.8, 0.9, 0, 0, min_p=0.02),
    SamplingParams(1.5, 0.95, 30, 0, min_p=0.1),
    SamplingParams(1.0, 1.0, 0, 0, min_p=1.0),
]


def row(params: SamplingParams) -> Sequence:
    return Sequence("id", [1], params, 100, lambda _: None)


def oracle(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """transformers' probabilities [V], by its own processors in its own order."""
    none: Any = None  # these processors do not look at the tokens so far
    scores = TemperatureLogitsWarper(params.temperature)(none, logits[None])
    if params.top_k:
        scores = TopKLogitsWarper(params.top_k)(none, scores)
    if params.top_p < 1:
        scores = TopPLogitsWarper(params.top_p)(none, scores)
    if params.min_p:
        scores = MinPLogitsWarper(params.min_p)(none, scores)
    return torch.softmax(scores[0], dim=-1)


@pytest.mark.parametrize("vocabulary", [50, 3000])
@pytest.mark.parametrize("params", CASES)
def test_tokens_are_drawn_with_transformers_probabilities(params: SamplingParams, vocabulary: int) -> None:
    """Over evenly spaced places in [0, 1) each token comes as often as its probability says, up to one place."""
    generator = torch.Generator().manual_seed(vocabulary)
    logits = torch.randn(vocabulary, generator=generator, dtype=torch.float64) * (1 if vocabulary > 1024 else 3)
    count = 4000
    places = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    scaled = (logits / params.temperature).expand(count, -1)
    counts = torch.bincount(draw(scaled, [params] * count, places), minlength=vocabulary)
    expected = oracle(logits, params)
    assert (counts / count - expected).abs().max() <= 1.5 / count
    assert (counts[expected == 0] == 0).all()


def test_a_row_draws_the_same_alone_and_in_any_batch() -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(5, 4, 300, generator=generator, dtype=torch.float64)  # steps, rows, vocabulary
    cases = ((1.0, 0, 0.0), (0.9, 0, 0.0), (1.0, 9, 0.3), (0.7, 9, 0.0))
    rows = [row(SamplingParams(1.0, p, k, 7 + k, min_p=m)) for p, k, m in cases]
    again = [row(one.params) for one in rows]
    together, alone = Sampler(), Sampler()
    for step in logits:
        batch = together.sample(step, rows).tokens
        solo = [alone.sample(step[i : i + 1], [again[i]]).tokens[0] for i in range(4)]
        assert batch == solo


def test_a_tiny_temperature_is_greedy() -> None:
    logits = torch.tensor([[5.0, 30.0, -4.0], [1.0, 1.5, 29.0]])
    params = [SamplingParams(1e-40, 1.0, 0, 1), SamplingParams(1e-40, 0.9, 2, 1)]
    assert Sampler().sample(logits, [row(p) for p in params]).tokens == [1, 2]


def test_a_greedy_row_takes_the_best_and_a_broken_row_is_told() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0], [float("nan"), 0.0, 1.0], [float("inf"), 0.0, 1.0]])
    sampled = Sampler().sample(logits, [row(SamplingParams(0, 1, 0, 0)) for _ in range(3)])
    assert sampled.tokens[0] == 1
    assert sampled.is_broken == [False, True, True]


def test_what_is_drawn_does_not_depend_on_the_default_dtype() -> None:
    """Whoever builds a model in this process changes it for a moment, for all threads."""
    logits = torch.randn(64, 3000, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    params = [SamplingParams(1.0, 1.0, 0, seed) for seed in range(64)]
    places = [torch.rand((), generator=torch.Generator().manual_seed(p.seed), dtype=torch.float64) for p in params]
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.bfloat16)
        tokens = Sampler().sample(logits, [row(p) for p in params]).tokens
    finally:
        torch.set_default_dtype(before)
    assert tokens == draw(logits - logits.amax(dim=-1, keepdim=True), params, torch.stack(places)).tolist()
