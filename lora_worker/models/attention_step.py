"""One step as the attention sees it: where each token's keys go, and what each token looks at."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch


class AttentionRow(NamedTuple):
    """The tokens [start, start + count) of one sequence, which follow each other in the step."""

    start: int
    count: int
    blocks: Sequence[int]


class AttentionGroup(NamedTuple):
    """Rows with the same number of new tokens C and a like number of blocks, computed together.

    `tokens` [N * C] are places in the step; None where the group is the whole step in order. `table` [N * B] holds the
    rows' blocks, padded with block 0. `positions` [N, C] are the new tokens' places in their sequences.
    """

    rows: int
    tokens: torch.Tensor | None
    table: torch.Tensor
    positions: torch.Tensor


class AttentionStep:
    """Made once a step and used by every attention layer."""

    def __init__(self, rows: Sequence[AttentionRow], *, block_size: int, device: torch.device) -> None:
        self.block_size = block_size
        self.cache_places = torch.tensor(
            [
                row.blocks[position // block_size] * block_size + position % block_size
                for row in rows
                for position in range(row.start, row.start + row.count)
            ],
            device=device,
        )
        self.groups = _group(rows, block_size, device)
        self._biases: dict[tuple[int, int, int | None, torch.dtype], torch.Tensor] = {}

    def bias(self, index: int, heads_together: int, window: int | None, dtype: torch.dtype) -> torch.Tensor:
        """[N, 1, G * C, L]: 0 where a new token may look, -inf elsewhere, for a group whose G query heads share a key.

        `window`: a token sees at most so many tokens, itself included (Mistral's and Gemma's sliding window).
        """
        key = (index, heads_together, window, dtype)
        if key not in self._biases:
            group = self.groups[index]
            length = group.table.numel() // group.rows * self.block_size
            keys = torch.arange(length, device=group.table.device)
            positions = group.positions.repeat(1, heads_together)[:, None, :, None]
            seen = keys <= positions
            if window is not None:
                seen &= keys > positions - window
            bias = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
            self._biases[key] = bias.masked_fill_(~seen, float("-inf"))
        return self._biases[key]


def _group(rows: Sequence[AttentionRow], block_size: int, device: torch.device) -> list[AttentionGroup]:
    """Rows of one new token go together by the power of two above their block count, so padding at most doubles."""
    places: dict[tuple[int, int, int], list[tuple[int, AttentionRow]]] = {}
    place = 0
    for index, row in enumerate(rows):
        used = -(-(row.start + row.count) // block_size)
        key = (1, used.bit_length(), 0) if row.count == 1 else (row.count, used, index)
        places.setdefault(key, []).append((place, row))
        place += row.count
    groups = []
    for members in places.values():
        longest = max(-(-(row.start + row.count) // block_size) for _, row in members)
        table = [block for _, row in members for block in _padded(row.blocks, longest)]
        tokens = [first + i for first, row in members for i in range(row.count)]
        positions = [list(range(row.start, row.start + row.count)) for _, row in members]
        whole = len(tokens) == place
        groups.append(
            AttentionGroup(
                len(members),
                None if whole else torch.tensor(tokens, device=device),
                torch.tensor(table, device=device),
                torch.tensor(positions, device=device),
            )
        )
    return groups


def _padded(blocks: Sequence[int], length: int) -> list[int]:
    return list(blocks[:length]) + [0] * (length - len(blocks))
