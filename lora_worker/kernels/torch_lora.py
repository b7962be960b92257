"""The LoRA delta in plain torch: every device, and the reference for any other kernel.

Letters of shapes: T tokens, H in, O out, R rank, S slots, N slots in use in this step, L tokens a slot, padded.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

# Padding every slot's tokens to the longest may at most double the work; beyond that slots are taken one by one.
MAX_PADDING = 2


class Segment(NamedTuple):
    """The tokens [start, end) of a step, all of one slot."""

    slot: int
    start: int
    end: int

    @property
    def length(self) -> int:
        return self.end - self.start


class LoraBatch(NamedTuple):
    """Which tokens of a step belong to which slot, made once a step and used by every module.

    Tokens are ordered by slot, base tokens first. `rank` is the greatest of the slots in use, so narrow adapters don't
    pay for the pool's width. Where the slots can share one batched product, `padded` [N * L] holds the token of each
    padded place and `placed` [T of adapters] the place of each token; both are None where the slots hold the same
    number of tokens. `slots` [N] is None where the slots in use are neighbours. `bias_slots` [T of adapters] is each
    token's slot, None where no adapter in use has a bias.
    """

    segments: list[Segment]
    rank: int
    batched: bool
    slots: torch.Tensor | None
    padded: torch.Tensor | None
    placed: torch.Tensor | None
    bias_slots: torch.Tensor | None

    @property
    def start(self) -> int:
        return self.segments[0].start


def make_lora_batch(segments: list[Segment], *, rank: int, has_bias: bool, device: torch.device) -> LoraBatch | None:
    """Plan a step; None where no token has an adapter. `segments` are in the order of tokens and slots alike."""
    if not segments:
        return None
    longest = max(segment.length for segment in segments)
    tokens = segments[-1].end - segments[0].start
    batched = len(segments) > 1 and longest * len(segments) <= MAX_PADDING * tokens
    slots = padded = placed = bias_slots = None
    if has_bias:
        bias_slots = torch.tensor([segment.slot for segment in segments for _ in range(segment.length)], device=device)
    if batched and segments[-1].slot - segments[0].slot + 1 != len(segments):
        slots = torch.tensor([segment.slot for segment in segments], device=device)
    if batched and longest * len(segments) != tokens:
        # A padded place repeats its slot's last token; its product is never read.
        padded = torch.tensor(
            [min(s.start + i, s.end - 1) for s in segments for i in range(longest)],
            device=device,
        )
        placed = torch.tensor(
            [n * longest + i for n, s in enumerate(segments) for i in range(s.length)],
            device=device,
        )
    return LoraBatch(segments, rank, batched, slots, padded, placed, bias_slots)


def add_lora(out: torch.Tensor, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, batch: LoraBatch) -> None:
    """Add each token's delta in place: out[t] += (x[t] @ a[slot(t)].T) @ b[slot(t)].

    Args:
        out: [T, O], the base's output. x: [T, H]. a: [S, R, H]. b: [S, R, O], scaling included.
        batch: the step's tokens by slot.
    """
    if not batch.batched:
        for slot, start, end in batch.segments:
            shrunk = x[start:end] @ a[slot, : batch.rank].t()
            out[start:end].addmm_(shrunk, b[slot, : batch.rank])
        return
    count, first = len(batch.segments), batch.segments[0].slot
    if batch.slots is None:
        a_used, b_used = a[first : first + count, : batch.rank], b[first : first + count, : batch.rank]
    else:
        a_used, b_used = a[batch.slots, : batch.rank], b[batch.slots, : batch.rank]
    if batch.padded is None or batch.placed is None:
        shrunk = torch.bmm(x[batch.start :].view(count, -1, x.shape[1]), a_used.transpose(1, 2))
        out[batch.start :].view(count, -1, out.shape[1]).baddbmm_(shrunk, b_used)
        return
    gathered = x.index_select(0, batch.padded).view(count, -1, x.shape[1])
    delta = torch.bmm(torch.bmm(gathered, a_used.transpose(1, 2)), b_used)
    out[batch.start :] += delta.view(-1, out.shape[1]).index_select(0, batch.placed)


def add_bias(out: torch.Tensor, bias: torch.Tensor, batch: LoraBatch) -> None:
    """Add each token's bias in place: out[t] += bias[slot(t)]; `bias` [S, O]."""
    if batch.bias_slots is not None:
        out[batch.start :] += bias.index_select(0, batch.bias_slots)
