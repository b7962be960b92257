"""An adapter's weights in host memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lora_worker.lora.layer import LoraPair


@dataclass(frozen=True)
class HostAdapter:
    """An adapter's weights in the dtype they are served in, keyed by module path."""

    digest: str
    pairs: dict[str, LoraPair]
    rank: int
    nbytes: int

    @property
    def has_bias(self) -> bool:
        return any(pair.bias is not None for pair in self.pairs.values())


class HostMemory:
    """One piece of memory for all the weights of an adapter, which are copied into it.

    They hang on no file and on no larger tensor, and memory that is page-locked is taken once: torch rounds every piece
    of it up to a power of two.
    """

    def __init__(self, numbers: int, dtype: torch.dtype, *, page_locked: bool) -> None:
        self._free = torch.empty(numbers, dtype=dtype, pin_memory=page_locked)

    def keep(self, values: torch.Tensor) -> torch.Tensor:
        """A copy of the values, cast and contiguous."""
        count = values.numel()
        taken, self._free = self._free[:count], self._free[count:]
        return taken.view(values.shape).copy_(values)
