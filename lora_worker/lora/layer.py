"""The layer: base plus the delta of each token's slot."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from lora_worker.kernels.memory import zeros
from lora_worker.kernels.torch_lora import LoraBatch, add_lora


@dataclass
class LoraStep:
    """What all layers of one model look at during a forward pass; None where no token has an adapter."""

    batch: LoraBatch | None = None


class LoraLinear(nn.Module):
    """A linear module of the base model and, beside it, the pool's weights for it.

    `a` [S, R, H] and `b` [S, R, O] hold one adapter a slot, zeros where the slot's adapter lacks this module or has a
    smaller rank. The base module is used unchanged, bias, fused or transposed weights and all.
    """

    a: torch.Tensor
    b: torch.Tensor

    def __init__(self, base: nn.Module, *, in_features: int, out_features: int, step: LoraStep) -> None:
        super().__init__()
        self.base = base
        self.in_features = in_features
        self.out_features = out_features
        self._step = step

    @property
    def weight(self) -> torch.Tensor:
        # Some models ask a projection for its weight's dtype.
        weight = self.base.weight
        assert isinstance(weight, torch.Tensor)
        return weight

    def allocate(self, slots: int, rank: int) -> int:
        """Make room for `slots` adapters of up to `rank`; returns the bytes taken."""
        self.a = zeros(slots, rank, self.in_features, like=self.weight)
        self.b = zeros(slots, rank, self.out_features, like=self.weight)
        return self.a.nbytes + self.b.nbytes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.base(x)
        batch = self._step.batch
        if batch is not None:
            add_lora(out.view(-1, self.out_features), x.reshape(-1, self.in_features), self.a, self.b, batch)
        return out
