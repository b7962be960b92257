"""Whatever runs on the device, happens here."""

from __future__ import annotations

from collections.abc import Sequence as Rows

import torch

from lora_worker.engine.scheduler import Chunk
from lora_worker.engine.sequence import BASE_SLOT, Sequence
from lora_worker.kernels.torch_lora import LoraBatch, Segment, make_lora_batch
from lora_worker.lora.layer import LoraStep
from lora_worker.models.attention_step import AttentionRow, AttentionStep
from lora_worker.models.loading import LoadedModel


class ModelRunner:
    """One forward pass a step over the chunks of all rows."""

    def __init__(self, loaded: LoadedModel, lora: LoraStep) -> None:
        self._model = loaded.model
        self._attention = loaded.attention
        self._device = loaded.model.device
        self._lora = lora

    @property
    def block_size(self) -> int:
        return self._attention.block_size

    @torch.inference_mode()
    def run(self, chunks: Rows[Chunk], *, new_blocks: list[int]) -> torch.Tensor:
        """Logits [sampling rows, V] of the chunks that sample, in their order; float32, or float64 of such a model.

        `chunks` are ordered by their adapters' pages, base first, as LoraBatch says; `new_blocks` have just
        been given to them.
        """
        if new_blocks:
            self._attention.clear(new_blocks)
        ids = [t for c in chunks for t in c.sequence.tokens[c.start : c.start + c.length]]
        positions = [p for c in chunks for p in range(c.start, c.start + c.length)]
        self._attention.step = AttentionStep(
            [AttentionRow(c.start, c.length, c.sequence.blocks) for c in chunks],
            block_size=self._attention.block_size,
            device=self._device,
        )
        self._lora.batch = self._lora_batch([(chunk.sequence, chunk.length) for chunk in chunks])
        self._lora.output_batch = self._lora_batch([(chunk.sequence, 1) for chunk in chunks if chunk.samples])
        try:
            logits: torch.Tensor = self._model(
                input_ids=torch.tensor([ids], device=self._device),
                position_ids=torch.tensor([positions], device=self._device),
                logits_to_keep=torch.tensor(_last_places(chunks), dtype=torch.long, device=self._device),
                use_cache=False,
            ).logits[0]
        finally:
            self._attention.step = self._lora.batch = self._lora.output_batch = None
        return logits if logits.dtype == torch.float64 else logits.float()

    def _lora_batch(self, rows: Rows[tuple[Sequence, int]]) -> LoraBatch | None:
        """Which tokens are of which slot, where each row has so many tokens."""
        segments: list[Segment] = []
        place = 0
        for sequence, length in rows:
            end = place + length
            if segments and segments[-1].slot == sequence.slot:
                segments[-1] = segments[-1]._replace(end=end)
            elif sequence.slot != BASE_SLOT:
                segments.append(Segment(sequence.slot, sequence.pages, place, end))
            place = end
        adapters = [sequence.adapter for sequence, _ in rows if sequence.adapter is not None]
        return make_lora_batch(
            segments,
            has_bias=any(adapter.has_bias for adapter in adapters),
            device=self._device,
        )


def _last_places(chunks: Rows[Chunk]) -> list[int]:
    """Where in the step the last token of each sampling chunk stands."""
    places, place = [], 0
    for chunk in chunks:
        place += chunk.length
        if chunk.samples:
            places.append(place - 1)
    return places
