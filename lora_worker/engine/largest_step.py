"""A step that takes as much memory as any, run once at the start to measure it."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from lora_worker.engine.model_runner import ModelRunner
from lora_worker.engine.sampler import Sampler
from lora_worker.engine.scheduler import Chunk
from lora_worker.engine.sequence import SamplingParams, Sequence
from lora_worker.kernels.pages import PAGE_RANKS
from lora_worker.lora.layer import LoraLayer, LoraLinear, LoraPair, Place
from lora_worker.messages import MAX_LOGPROBS

# Every row asks for what makes copies of its logits.
PARAMS = SamplingParams(temperature=1.0, top_p=1.0, top_k=0, seed=0, min_p=0.1, presence_penalty=1.0)


class LargestStep(NamedTuple):
    """The limits: `rows` at a time, each of up to `row_tokens`, with so many prompt tokens a step, in `slots` slots.

    Prompts fill the step up from the end of the longest row, and every other row decodes. Their adapters are two where
    there are slots for two, one of all prompts and one of the rest, so that padding to the longer is at its most.
    """

    rows: int
    row_tokens: int
    prefill_tokens: int
    slots: int

    def chunks(self, block_size: int) -> list[Chunk]:
        """All rows lie in the cache's first block, over and over: what a row reads has the same size as elsewhere."""
        found, left = [], self.prefill_tokens
        for _ in range(self.rows):
            length = max(1, min(left, self.row_tokens))
            tokens = self.row_tokens if left else 1
            row = Sequence("largest-step", [0] * tokens, PARAMS, 1, lambda _: None, top_logprobs=MAX_LOGPROBS)
            row.slot, row.pages = self.places[0 if left else -1]
            row.blocks = [1] * -(-tokens // block_size)
            found.append(Chunk(row, tokens - length, length))
            left = max(0, left - length)
        return found

    @property
    def places(self) -> list[Place]:
        return [Place(slot, (slot,)) for slot in range(min(self.slots, 2))]


@torch.inference_mode()
def run_largest_step(step: LargestStep, layers: Collection[LoraLayer], runner: ModelRunner) -> None:
    """Run it in an empty pool, which it leaves empty; the cache needs one block, whose content is lost."""
    with _adapters(step.places, layers):
        chunks = step.chunks(runner.block_size)
        Sampler().sample(runner.run(chunks, new_blocks=[]), [chunk.sequence for chunk in chunks])


@contextmanager
def _adapters(places: list[Place], layers: Collection[LoraLayer]) -> Iterator[None]:
    """Adapters of zeros on every linear layer that has memory."""
    linear = [layer for layer in layers if isinstance(layer, LoraLinear) and layer.is_allocated]
    try:
        for layer in linear:
            a = layer.weight.new_zeros(PAGE_RANKS, layer.in_features)
            b = layer.weight.new_zeros(PAGE_RANKS, layer.out_features)
            for place in places:
                layer.put(place, LoraPair(a, b))
        yield
    finally:
        for layer in linear:
            for place in places:
                layer.put(place, None)
