"""Large zeroed tensors."""

from __future__ import annotations

import math
import mmap

import torch


def zeros(*shape: int, like: torch.Tensor) -> torch.Tensor:
    """Zeros of the dtype and on the device of `like`. On the CPU a page takes memory only once it is written.

    torch.zeros writes them all: a cache for thousands of tokens would fill gigabytes before the first one comes.
    """
    if like.device.type != "cpu":
        return torch.zeros(shape, dtype=like.dtype, device=like.device)
    nbytes = math.prod(shape) * like.element_size()
    return torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8).view(like.dtype).view(shape)
