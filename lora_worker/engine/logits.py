"""Logits processors: what changes a row's logits before anything is drawn from them.

The order is transformers': logit_bias, repetition_penalty, then presence_penalty and frequency_penalty, which
transformers doesn't have, and last the tokens that min_tokens holds back. Each touches a few tokens of a row, so the
tokens of all rows are changed together, and rows without such fields cost nothing.

Sources: `transformers.generation.logits_process` for the first, second and last; for the other two OpenAI's formula,
logit - count * frequency_penalty - (count > 0) * presence_penalty, with counts over the generated tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Rows

import torch

from lora_worker.engine.sequence import Sequence


class LogitsProcessors:
    """Changes logits in place; keeps a row's token counts until `forget`."""

    def __init__(self) -> None:
        self._counts: dict[Sequence, TokenCounts] = {}

    def process(self, logits: torch.Tensor, rows: Rows[Sequence]) -> list[int]:
        """logits [rows, V] of the rows' next tokens; returns the places of the rows that were changed."""
        places = [i for i, row in enumerate(rows) if row.needs_processors]
        if places:
            asking = [(i, rows[i]) for i in places]
            _add_biases(logits, [(i, row) for i, row in asking if row.params.logit_bias])
            self._penalize(logits, [(i, row) for i, row in asking if row.params.has_penalties])
            _hold_back(logits, [(i, row) for i, row in asking if row.output_count < row.min_tokens])
        return places

    def forget(self, row: Sequence) -> None:
        self._counts.pop(row, None)

    def _penalize(self, logits: torch.Tensor, rows: Rows[tuple[int, Sequence]]) -> None:
        if not rows:
            return
        counts = [self._up_to_date_counts(row) for _, row in rows]
        points = _points(((i, count.ids) for (i, _), count in zip(rows, counts, strict=True)), logits.device)
        lengths = torch.tensor([len(count.ids) for count in counts])

        def spread(values: list[float]) -> torch.Tensor:
            return torch.tensor(values, dtype=logits.dtype).repeat_interleave(lengths).to(logits.device)

        generated = torch.cat([count.generated for count in counts]).to(logits.device, logits.dtype)
        repetition = spread([row.params.repetition_penalty for _, row in rows])
        scores = logits[points]
        scores = torch.where(scores < 0, scores * repetition, scores / repetition)
        scores -= generated * spread([row.params.frequency_penalty for _, row in rows])
        scores -= (generated > 0) * spread([row.params.presence_penalty for _, row in rows])
        logits[points] = scores

    def _up_to_date_counts(self, row: Sequence) -> TokenCounts:
        counts = self._counts.get(row)
        if counts is None:
            counts = self._counts[row] = TokenCounts(row)
        counts.update(row)
        return counts


class TokenCounts:
    """The tokens of one row without repeats, and how often each was generated; room for as many as the row may have."""

    def __init__(self, row: Sequence) -> None:
        prompt = list(dict.fromkeys(row.prompt))
        self._ids = torch.zeros(len(prompt) + row.max_tokens, dtype=torch.long)
        self._generated = torch.zeros(len(self._ids), dtype=torch.float64)
        self._ids[: len(prompt)] = torch.tensor(prompt)
        self._places = {token: place for place, token in enumerate(prompt)}
        self._counted = len(row.prompt)

    def update(self, row: Sequence) -> None:
        """Count the tokens that the row has been given since."""
        for token in row.tokens[self._counted :]:
            place = self._places.setdefault(token, len(self._places))
            self._ids[place] = token
            self._generated[place] += 1
        self._counted = len(row.tokens)

    @property
    def ids(self) -> torch.Tensor:
        """Distinct tokens of prompt and answer, [distinct]."""
        return self._ids[: len(self._places)]

    @property
    def generated(self) -> torch.Tensor:
        """How often each of `ids` stands in the answer, [distinct]."""
        return self._generated[: len(self._places)]


def _add_biases(logits: torch.Tensor, rows: Rows[tuple[int, Sequence]]) -> None:
    if rows:
        points = _points(((i, [token for token, _ in row.params.logit_bias]) for i, row in rows), logits.device)
        biases = [bias for _, row in rows for _, bias in row.params.logit_bias]
        logits[points] += torch.tensor(biases, dtype=logits.dtype, device=logits.device)


def _hold_back(logits: torch.Tensor, rows: Rows[tuple[int, Sequence]]) -> None:
    if rows:
        logits[_points(((i, list(row.stop_token_ids)) for i, row in rows), logits.device)] = -torch.inf


def _points(
    tokens: Iterable[tuple[int, torch.Tensor | list[int]]], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """An index into logits [rows, V]: of each row, given by its place, some tokens."""
    parts = [(place, torch.as_tensor(ids, dtype=torch.long)) for place, ids in tokens]
    rows = torch.cat([torch.full_like(ids, place) for place, ids in parts])
    return rows.to(device), torch.cat([ids for _, ids in parts]).to(device)
