"""The LoRA delta in plain torch: every device, and the reference for any other kernel.

Letters of shapes: T tokens, H in, O out, R rank, P rows of all pages, S slots, N adapters in use in this step, L tokens
an adapter, padded.
"""

from __future__ import annotations

from itertools import groupby
from typing import NamedTuple

import torch

from lora_worker.kernels.pages import PAGE_RANKS, run_of

# Padding every adapter's tokens to the longest may at most double the work; beyond that they are taken one by one.
MAX_PADDING = 2

# Rows of a pool: neighbours, which are read where they lie, or any others, which are gathered.
Rows = slice | torch.Tensor


class Segment(NamedTuple):
    """The tokens [start, end) of a step, all of the adapter in `slot`, whose weights lie in `pages`."""

    slot: int
    pages: tuple[int, ...]
    start: int
    end: int

    @property
    def length(self) -> int:
        return self.end - self.start


class Part(NamedTuple):
    """Tokens [start, end) of so many adapters that share a product, padded to equally many tokens each.

    `rows` are the adapters' rows in the pool, [adapters * R]. `padded` [adapters * L] holds the token of each padded
    place, and `placed` [end - start] the place of each token; both are None where the adapters have equally many.
    """

    start: int
    end: int
    adapters: int
    rows: Rows
    padded: torch.Tensor | None = None
    placed: torch.Tensor | None = None


class LoraBatch(NamedTuple):
    """Which tokens of a step belong to which adapter, made once a step and used by every module.

    Tokens are ordered by how many pages their adapter takes and then by its pages, base tokens first, so that narrow
    adapters don't pay for a wide one beside them. `bias_slots` [T of adapters] is each token's slot, None where no
    adapter in use has a bias.
    """

    segments: list[Segment]
    parts: list[Part]
    slots: frozenset[int]
    bias_slots: torch.Tensor | None

    @property
    def start(self) -> int:
        return self.segments[0].start

    @property
    def end(self) -> int:
        """The step's tokens."""
        return self.segments[-1].end


def make_lora_batch(segments: list[Segment], *, has_bias: bool, device: torch.device) -> LoraBatch | None:
    """Plan a step; None where no token has an adapter. `segments` are ordered as LoraBatch says."""
    if not segments:
        return None
    parts: list[Part] = []
    for _, alike in groupby(segments, key=lambda segment: len(segment.pages)):
        parts += _parts(list(alike), device)
    bias_slots = None
    if has_bias:
        bias_slots = torch.tensor([segment.slot for segment in segments for _ in range(segment.length)], device=device)
    return LoraBatch(segments, parts, frozenset(segment.slot for segment in segments), bias_slots)


def add_lora(out: torch.Tensor, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, batch: LoraBatch) -> None:
    """Add each token's delta in place: out[t] += (x[t] @ a[rows(t)].T) @ b[rows(t)].

    Args:
        out: [T, O], the base's output. x: [T, H]. a: [P, H]. b: [P, O], scaling included.
        batch: the step's tokens by adapter.
    """
    for start, end, count, rows, padded, placed in batch.parts:
        if count == 1:
            out[start:end].addmm_(x[start:end] @ a[rows].t(), b[rows])
            continue
        a_used, b_used = a[rows].view(count, -1, a.shape[1]), b[rows].view(count, -1, b.shape[1])
        if padded is None or placed is None:
            shrunk = torch.bmm(x[start:end].view(count, -1, x.shape[1]), a_used.transpose(1, 2))
            out[start:end].view(count, -1, out.shape[1]).baddbmm_(shrunk, b_used)
            continue
        gathered = x.index_select(0, padded).view(count, -1, x.shape[1])
        delta = torch.bmm(torch.bmm(gathered, a_used.transpose(1, 2)), b_used)
        out[start:end] += delta.view(-1, out.shape[1]).index_select(0, placed)


def add_bias(out: torch.Tensor, bias: torch.Tensor, batch: LoraBatch) -> None:
    """Add each token's bias in place: out[t] += bias[slot(t)]; `bias` [S, O]."""
    if batch.bias_slots is not None:
        out[batch.start :] += bias.index_select(0, batch.bias_slots)


def rows_of(pages: tuple[int, ...], device: torch.device) -> Rows:
    """The rows of pages in their order."""
    run = run_of(pages)
    if run is not None:
        return run
    return torch.tensor([page * PAGE_RANKS + i for page in pages for i in range(PAGE_RANKS)], device=device)


def _parts(segments: list[Segment], device: torch.device) -> list[Part]:
    """The products of adapters that take equally many pages."""
    longest = max(segment.length for segment in segments)
    start, end = segments[0].start, segments[-1].end
    if longest * len(segments) > MAX_PADDING * (end - start):
        return [Part(s.start, s.end, 1, rows_of(s.pages, device)) for s in segments]
    rows = rows_of(tuple(page for segment in segments for page in segment.pages), device)
    if longest * len(segments) == end - start:
        return [Part(start, end, len(segments), rows)]
    # A padded place repeats its adapter's last token; its product is never read.
    padded = [min(s.start + i, s.end - 1) for s in segments for i in range(longest)]
    placed = [n * longest + i for n, s in enumerate(segments) for i in range(s.length)]
    return [
        Part(
            start,
            end,
            len(segments),
            rows,
            torch.tensor(padded, device=device),
            torch.tensor(placed, device=device),
        )
    ]
