"""From logits to tokens, each row by its own parameters.

A row's draw depends on its own logits, parameters and seed alone, so it draws the same tokens alone and in any batch.
The order is transformers': temperature, then top_k, then top_p (the fewest most likely tokens that together reach it).
"""

from __future__ import annotations

from collections.abc import Sequence as Rows
from typing import NamedTuple

import torch

from lora_worker.engine.sequence import SamplingParams

# top_p is first tried among so many most likely tokens, since sorting a whole vocabulary is slow.
TOP_P_CANDIDATES = 1024


class Sampled(NamedTuple):
    """`tokens` [rows], and which rows had logits that are not finite and so have no token."""

    tokens: list[int]
    is_broken: list[bool]


class Sampler:
    """Draws tokens; keeps one random generator a sampled row, by request id, until `forget`."""

    def __init__(self) -> None:
        self._generators: dict[str, torch.Generator] = {}

    def sample(self, logits: torch.Tensor, request_ids: Rows[str], params: Rows[SamplingParams]) -> Sampled:
        """logits [rows, V] in float32 or float64."""
        best, tokens = logits.max(dim=-1)
        broken = (~torch.isfinite(best)).tolist()
        drawn = [i for i, p in enumerate(params) if p.temperature > 0 and not broken[i]]
        tokens_list: list[int] = tokens.tolist()
        if drawn:
            chosen = [params[i] for i in drawn]
            places = torch.tensor([self._uniform(request_ids[i], params[i].seed) for i in drawn])
            temperatures = torch.tensor([p.temperature for p in chosen], dtype=torch.float64, device=logits.device)
            # From the greatest down, so that a tiny temperature makes no infinity but a greedy row.
            subset = (logits[drawn] - best[drawn, None]).double() / temperatures[:, None]
            for i, token in zip(drawn, draw(subset, chosen, places).tolist(), strict=True):
                tokens_list[i] = token
        return Sampled(tokens_list, broken)

    def forget(self, request_id: str) -> None:
        self._generators.pop(request_id, None)

    def _uniform(self, request_id: str, seed: int) -> float:
        generator = self._generators.get(request_id)
        if generator is None:
            generator = self._generators[request_id] = torch.Generator().manual_seed(seed)
        return torch.rand((), generator=generator, dtype=torch.float64).item()


def draw(scaled: torch.Tensor, params: Rows[SamplingParams], places: torch.Tensor) -> torch.Tensor:
    """Inverse-CDF draw: the first token at which the row's cumulative probability passes its place in [0, 1).

    scaled [rows, V] are logits over temperature and places [rows], both in float64. Returns token ids [rows].
    """
    places = places.to(scaled.device)
    tokens = torch.empty(len(params), dtype=torch.long, device=scaled.device)
    plain = [i for i, p in enumerate(params) if not p.top_k and p.top_p >= 1]
    if plain:
        tokens[plain] = _pick(torch.softmax(scaled[plain], dim=-1), places[plain])
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
    kept = probabilities * (before < params.top_p)
    return ids[_pick(kept[None], place)[0]]


def _pick(weights: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """weights [rows, V], not negative; places [rows]. A token of weight 0 is never picked."""
    cumulative = weights.cumsum(dim=-1)
    targets = places[:, None] * cumulative[:, -1:]
    picked = torch.searchsorted(cumulative, targets, right=True)[:, 0]
    last = weights.shape[1] - 1 - (weights.flip(-1) > 0).int().argmax(dim=-1)
    return torch.minimum(picked, last)
