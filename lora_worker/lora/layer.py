"""The layers: base plus the delta of each token's slot."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from torch import nn

from lora_worker.kernels.memory import zeros
from lora_worker.kernels.torch_lora import LoraBatch, add_bias, add_lora


class LoraPair(NamedTuple):
    """One module's weights: `a` [R, H], and `b` [R, O] and `bias` [O], transposed and with the scaling already in them.

    Of an embedding, H is the vocabulary. `bias` is None where the adapter adds none.
    """

    a: torch.Tensor
    b: torch.Tensor
    bias: torch.Tensor | None = None

    @property
    def nbytes(self) -> int:
        return self.a.nbytes + self.b.nbytes + (0 if self.bias is None else self.bias.nbytes)


@dataclass
class LoraStep:
    """What all layers of one model look at during a forward pass; None where no token has an adapter.

    `batch` is over the step's tokens, `output_batch` over those of them whose logits are asked for.
    """

    batch: LoraBatch | None = None
    output_batch: LoraBatch | None = None


class LoraLayer(nn.Module, ABC):
    """A module of the base model and, beside it, the pool's weights for it, one adapter a slot.

    A slot is zero where its adapter lacks this module or has a smaller rank. The base module is used unchanged.
    """

    a: torch.Tensor
    b: torch.Tensor

    def __init__(self, base: nn.Module, step: LoraStep, *, allocates_late: bool) -> None:
        super().__init__()
        self.base = base
        # As wide as the vocabulary and seldom targeted: such a layer takes memory when an adapter first needs it.
        self.allocates_late = allocates_late
        self.is_allocated = False
        self._step = step

    @property
    def weight(self) -> torch.Tensor:
        # Some models ask a projection for its weight's dtype, and tie an output layer to an embedding.
        weight = self.base.weight
        assert isinstance(weight, torch.Tensor)
        return weight

    @abstractmethod
    def allocate(self, slots: int, rank: int) -> int:
        """Make room for `slots` adapters of up to `rank`; returns the bytes taken."""

    @abstractmethod
    def put(self, slot: int, pair: LoraPair) -> None:
        """Copy an adapter's weights into a clear slot."""

    def clear(self, slot: int) -> None:
        self.a[slot].zero_()
        self.b[slot].zero_()


class LoraLinear(LoraLayer):
    """A linear module, fused or transposed weights and all: `a` [S, R, H], `b` [S, R, O], `bias` [S, O]."""

    bias_delta: torch.Tensor

    def __init__(
        self, base: nn.Module, *, in_features: int, out_features: int, step: LoraStep, is_output: bool
    ) -> None:
        super().__init__(base, step, allocates_late=is_output)
        self.in_features = in_features
        self.out_features = out_features
        self._is_output = is_output

    def allocate(self, slots: int, rank: int) -> int:
        self.a = zeros(slots, rank, self.in_features, like=self.weight)
        self.b = zeros(slots, rank, self.out_features, like=self.weight)
        self.bias_delta = zeros(slots, self.out_features, like=self.weight)
        self.is_allocated = True
        return self.a.nbytes + self.b.nbytes + self.bias_delta.nbytes

    def clear(self, slot: int) -> None:
        super().clear(slot)
        self.bias_delta[slot].zero_()

    def put(self, slot: int, pair: LoraPair) -> None:
        rank = pair.a.shape[0]
        self.a[slot, :rank].copy_(pair.a)
        self.b[slot, :rank].copy_(pair.b)
        if pair.bias is not None:
            self.bias_delta[slot].copy_(pair.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.base(x)
        batch = self._step.output_batch if self._is_output else self._step.batch
        if batch is not None and self.is_allocated:
            flat = out.view(-1, self.out_features)
            add_lora(flat, x.reshape(-1, self.in_features), self.a, self.b, batch)
            add_bias(flat, self.bias_delta, batch)
        return out


class LoraEmbedding(LoraLayer):
    """The input embedding: `a` [S, V, R], `b` [S, R, H]."""

    def __init__(self, base: nn.Embedding, step: LoraStep) -> None:
        super().__init__(base, step, allocates_late=True)
        self.num_embeddings = base.num_embeddings
        self.embedding_dim = base.embedding_dim

    def allocate(self, slots: int, rank: int) -> int:
        self.a = zeros(slots, self.num_embeddings, rank, like=self.weight)
        self.b = zeros(slots, rank, self.embedding_dim, like=self.weight)
        self.is_allocated = True
        return self.a.nbytes + self.b.nbytes

    def put(self, slot: int, pair: LoraPair) -> None:
        rank = pair.a.shape[0]
        self.a[slot, :, :rank].copy_(pair.a.t())
        self.b[slot, :rank].copy_(pair.b)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.base(ids)
        batch = self._step.batch
        if batch is not None and self.is_allocated:
            flat_out, flat_ids = out.view(-1, self.embedding_dim), ids.reshape(-1)
            for slot, start, end in batch.segments:
                shrunk = F.embedding(flat_ids[start:end], self.a[slot])[:, : batch.rank]
                flat_out[start:end].addmm_(shrunk, self.b[slot, : batch.rank])
        return out
