"""From logits to tokens, each row by its own parameters.

A row's draw depends on its own logits, parameters and seed alone, so it draws the same tokens alone and in any batch.
The order is transformers': the processors of `logits`, then temperature, top_k, top_p (the fewest most likely tokens
that together reach it) and min_p (tokens at least so likely, relative to the most likely one).
"""

from __future__ import annotations

from collections.abc import Sequence as Rows
from typing import NamedTuple

import torch

from lora_worker.engine.logits import LogitsProcessors
from lora_worker.engine.logprobs import StepLogprobs
from lora_worker.engine.sequence import SamplingParams, Sequence, TokenLogprobs

# top_p is first tried among so many most likely tokens, since sorting a whole vocabulary is slow.
TOP_P_CANDIDATES = 1024


class Sampled(NamedTuple):
    """`tokens` [rows], which rows had logits that are not finite and so have no token, and log probabilities."""

    tokens: list[int]
    is_broken: list[bool]
    logprobs: list[TokenLogprobs | None]


class Sampler:
    """Draws tokens; keeps one random generator a sampled row until `forget`."""

    def __init__(self) -> None:
        self._processors = LogitsProcessors()
        self._generators: dict[Sequence, torch.Generator] = {}

    @torch.inference_mode()
    def sample(self, logits: torch.Tensor, rows: Rows[Sequence]) -> Sampled:
        """logits [rows, V] in float32 or float64; those of rows with processors are changed in place."""
        best, tokens = logits.max(dim=-1)
        broken = (~torch.isfinite(best)).tolist()
        logprobs = StepLogprobs(logits, rows)
        processed = self._processors.process(logits, rows)
        if processed:
            best[processed], tokens[processed] = logits[processed].max(dim=-1)
        drawn = [i for i, row in enumerate(rows) if row.params.temperature > 0 and not broken[i]]
        tokens_list: list[int] = tokens.tolist()
        if drawn:
            chosen = [rows[i].params for i in drawn]
            places = torch.tensor([self._uniform(rows[i]) for i in drawn], dtype=torch.float64)
            temperatures = torch.tensor([p.temperature for p in chosen], dtype=torch.float64, device=logits.device)
            # From the greatest down, so that a tiny temperature makes no infinity but a greedy row.
            subset = (logits[drawn] - best[drawn, None]).double() / temperatures[:, None]
            for i, token in zip(drawn, draw(subset, chosen, places).tolist(), strict=True):
                tokens_list[i] = token
        return Sampled(tokens_list, broken, logprobs.of(tokens_list))

    def forget(self, row: Sequence) -> None:
        self._generators.pop(row, None)
        self._processors.forget(row)

    def _uniform(self, row: Sequence) -> float:
        generator = self._generators.get(row)
        if generator is None:
            generator = self._generators[row] = torch.Generator().manual_seed(row.params.seed)
        return torch.rand((), generator=generator, dtype=torch.float64).item()


def draw(scaled: torch.Tensor, params: Rows[SamplingParams], places: torch.Tensor) -> torch.Tensor:
    """Inverse-CDF draw: the first token at which the row's cumulative probability passes its place in [0, 1).

    scaled [rows, V] are logits over temperature and places [rows], both in float64. Returns token ids [rows].
    """
    places = places.to(scaled.device)
    tokens = torch.empty(len(params), dtype=torch.long, device=scaled.device)
    plain = [i for i, p in enumerate(params) if not p.top_k and p.top_p >= 1]
    if plain:
        probabilities = torch.softmax(scaled[plain], dim=-1)
        if any(params[i].min_p for i in plain):
            least = torch.tensor([params[i].min_p for i in plain], dtype=torch.float64, device=scaled.device)
            probabilities *= probabilities >= least[:, None] * probabilities.amax(dim=-1, keepdim=True)
        tokens[plain] = _pick(probabilities, places[plain])
    for i, p in enumerate(params):
        if p.top_k or p.top_p < 1:
            tokens[i] = _draw_restricted(scaled[i], p, places[i : i + 1])
    return tokens


def _draw_restricted(scaled: torch.Tensor, params: SamplingParams, place: torch.Tensor) -> torch.Tensor:
    vocabulary = scaled.shape[0]
    count = min(params.top_k or vocabulary, vocabulary)
    if params.top_p < 1 and count > TOP_P_CANDIDATES:
        logits, ids = torch.topk(scaled, min(TOP_P_CANDIDATES, count))
        # Probabilities are over all the tokens that top_k leaves.
        whole = scaled if count == vocabulary else torch.topk(scaled, count).values
        probabilities = torch.exp(logits - torch.logsumexp(whole, dim=0))
        if probabilities.sum() < params.top_p:
            logits, ids = torch.topk(scaled, count)
            probabilities = torch.softmax(logits, dim=0)
    else:
        logits, ids = torch.topk(scaled, count)
        probabilities = torch.softmax(logits, dim=0)
    before = probabilities.cumsum(0) - probabilities
    kept = probabilities * (before < params.top_p) * (probabilities >= params.min_p * probabilities[0])
    return ids[_pick(kept[None], place)[0]]


def _pick(weights: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """weights [rows, V], not negative; places [rows]. A token of weight 0 is never picked."""
    cumulative = weights.cumsum(dim=-1)
    targets = places[:, None] * cumulative[:, -1:]
    picked = torch.searchsorted(cumulative, targets, right=True)[:, 0]
    beyond = picked == weights.shape[1]
    if beyond.any():  # a place so close to 1 that its target was rounded to the whole
        last = weights.shape[1] - 1 - (weights.flip(-1) > 0).int().argmax(dim=-1)
        picked = torch.where(beyond, last, picked)
    return picked
