"""One step as the attention sees it: where each token's keys go, and what each token looks at."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch


class AttentionRow(NamedTuple):
    """The tokens [start, start + length) of one sequence, which follow each other in the step."""

    start: int
    length: int
    blocks: Sequence[int]


class AttentionGroup(NamedTuple):
    """Rows with the same number of new tokens C and a like number of blocks B, computed together.

    `tokens` [N * C] are places in the step; None where the group is the whole step in order. `table` [N, B] holds the
    rows' blocks, padded with block 0. `positions` [N, C] are the new tokens' places in their sequences.
    """

    tokens: torch.Tensor | None
    table: torch.Tensor
    positions: torch.Tensor

    @property
    def rows(self) -> int:
        return self.table.shape[0]


class AttentionStep:
    """Made once a step and used by every attention layer; what depends on a layer's shape is made at first use."""

    def __init__(self, rows: Sequence[AttentionRow], *, block_size: int, device: torch.device) -> None:
        self.block_size = block_size
        self.groups = _group(rows, block_size, device)
        places = [(row, position) for row in rows for position in range(row.start, row.start + row.length)]
        self._blocks = torch.tensor([row.blocks[position // block_size] for row, position in places], device=device)
        self._offsets = torch.tensor([position % block_size for _, position in places], device=device)
        self._write_places: dict[int, torch.Tensor] = {}
        self._read_places: dict[tuple[int, int], torch.Tensor] = {}
        self._biases: dict[tuple[int, int, int | None, torch.dtype], torch.Tensor] = {}

    def write_places(self, heads: int) -> torch.Tensor:
        """[T * heads]: where each new token's keys go, by head, in a cache of [blocks * heads * block size] places."""
        if heads not in self._write_places:
            head = torch.arange(heads, device=self._blocks.device)
            places = (self._blocks[:, None] * heads + head) * self.block_size + self._offsets[:, None]
            self._write_places[heads] = places.flatten()
        return self._write_places[heads]

    def read_places(self, index: int, heads: int) -> torch.Tensor:
        """[N * heads * B]: the blocks of a group's rows, by row and head, in a cache of [blocks * heads] places."""
        key = (index, heads)
        if key not in self._read_places:
            table = self.groups[index].table
            head = torch.arange(heads, device=table.device)
            self._read_places[key] = (table[:, None, :] * heads + head[None, :, None]).flatten()
        return self._read_places[key]

    def bias(self, index: int, heads_together: int, window: int | None, dtype: torch.dtype) -> torch.Tensor:
        """[N, 1, C * G, L]: 0 where a new token may look, -inf elsewhere, for a group whose G query heads share a key.

        `window`: a token sees at most so many tokens, itself included (Mistral's and Gemma's sliding window).
        """
        key = (index, heads_together, window, dtype)
        if key not in self._biases:
            group = self.groups[index]
            keys = torch.arange(group.table.shape[1] * self.block_size, device=group.table.device)
            positions = group.positions.repeat_interleave(heads_together, dim=1)[:, None, :, None]
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
        used = _blocks_used(row, block_size)
        key = (1, used.bit_length(), 0) if row.length == 1 else (row.length, used, index)
        places.setdefault(key, []).append((place, row))
        place += row.length
    groups = []
    for members in places.values():
        longest = max(_blocks_used(row, block_size) for _, row in members)
        table = [list(row.blocks[:longest]) + [0] * (longest - len(row.blocks)) for _, row in members]
        tokens = [first + i for first, row in members for i in range(row.length)]
        positions = [list(range(row.start, row.start + row.length)) for _, row in members]
        is_whole = len(tokens) == place
        groups.append(
            AttentionGroup(
                None if is_whole else torch.tensor(tokens, device=device),
                torch.tensor(table, device=device),
                torch.tensor(positions, device=device),
            )
        )
    return groups


def _blocks_used(row: AttentionRow, block_size: int) -> int:
    return -(-(row.start + row.length) // block_size)
