"""The layers: base plus the delta of each token's slot."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from torch import nn

from lora_worker.errors import UnsupportedModelError
from lora_worker.kernels.memory import zeros
from lora_worker.kernels.pages import PAGE_RANKS, run_of
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


class Place(NamedTuple):
    """Where an adapter lies in the pool: its slot, and the pages that hold its weights."""

    slot: int
    pages: tuple[int, ...]


class LoraLayer(nn.Module, ABC):
    """A module of the base model and, beside it, the pool's weights for it.

    Weights lie in pages of PAGE_RANKS ranks, the same pages of every module. Where an adapter lacks this module or has
    a smaller rank, its pages are zero. The base module is used unchanged.
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
        self._slots: set[int] = set()  # whose adapters have this module
        self._written: set[int] = set()  # pages that may hold something but zeros

    @property
    def weight(self) -> torch.Tensor:
        # Some models ask a projection for its weight's dtype, and tie an output layer to an embedding.
        weight = self.base.weight
        assert isinstance(weight, torch.Tensor)
        return weight

    def put(self, place: Place, pair: LoraPair | None) -> None:
        """Copy an adapter's weights into its place; None where the adapter leaves this module as it is."""
        slot, pages = place
        if pair is None:
            if slot in self._slots:
                self._slots.remove(slot)
                self._zero_bias(slot)
            for page in self._written.intersection(pages):
                self._zero(page)
            self._written.difference_update(pages)
            return
        self._slots.add(slot)
        self._written.update(pages)
        self._copy(place, pair)

    @abstractmethod
    def allocate(self, slots: int, pages: int) -> int:
        """Make room for `pages` pages of `slots` adapters; returns the bytes taken, none where it raises."""

    @property
    @abstractmethod
    def page_bytes(self) -> int:
        """The bytes of one page."""

    @abstractmethod
    def _zero(self, page: int) -> None: ...

    @abstractmethod
    def _zero_bias(self, slot: int) -> None: ...

    @abstractmethod
    def _copy(self, place: Place, pair: LoraPair) -> None:
        """Fill the place's pages whole, with zeros beyond the pair's rank."""

    def _is_in(self, batch: LoraBatch, tokens: int) -> bool:
        """Whether any of the step's adapters has this module, which has been given so many tokens."""
        if self._slots.isdisjoint(batch.slots):
            return False
        # A model may send some of its tokens here, or in several parts; by their places they'd be taken for others'.
        if tokens != batch.end:
            raise UnsupportedModelError(
                f"the model gives {type(self.base).__name__} of {list(self.weight.shape)} {tokens} of a step's "
                f"{batch.end} tokens, so it isn't known which adapter each is for; leave it out of lora_target_modules"
            )
        return True


class LoraLinear(LoraLayer):
    """A linear module, fused or transposed weights and all: `a` [P, H], `b` [P, O], `bias` [S, O]."""

    bias_delta: torch.Tensor

    def __init__(
        self, base: nn.Module, *, in_features: int, out_features: int, step: LoraStep, is_output: bool
    ) -> None:
        super().__init__(base, step, allocates_late=is_output)
        self.in_features = in_features
        self.out_features = out_features
        self._is_output = is_output

    def allocate(self, slots: int, pages: int) -> int:
        a = zeros(pages * PAGE_RANKS, self.in_features, like=self.weight)
        b = zeros(pages * PAGE_RANKS, self.out_features, like=self.weight)
        self.bias_delta = zeros(slots, self.out_features, like=self.weight)
        self.a, self.b, self.is_allocated = a, b, True
        return self.a.nbytes + self.b.nbytes + self.bias_delta.nbytes

    @property
    def page_bytes(self) -> int:
        return PAGE_RANKS * (self.in_features + self.out_features) * self.weight.element_size()

    def _zero(self, page: int) -> None:
        rows = slice(page * PAGE_RANKS, (page + 1) * PAGE_RANKS)
        self.a[rows].zero_()
        self.b[rows].zero_()

    def _zero_bias(self, slot: int) -> None:
        self.bias_delta[slot].zero_()

    def _copy(self, place: Place, pair: LoraPair) -> None:
        _fill(self.a, place.pages, pair.a)
        _fill(self.b, place.pages, pair.b)
        if pair.bias is None:
            self._zero_bias(place.slot)
        else:
            self.bias_delta[place.slot].copy_(pair.bias, non_blocking=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.base(x)
        batch = self._step.output_batch if self._is_output else self._step.batch
        if batch is not None and self._is_in(batch, out.shape[:-1].numel()):
            flat = out.view(-1, self.out_features)
            add_lora(flat, x.reshape(-1, self.in_features), self.a, self.b, batch)
            add_bias(flat, self.bias_delta, batch)
        return out


class LoraEmbedding(LoraLayer):
    """The input embedding: `a` [pages, V, PAGE_RANKS], `b` [P, H]."""

    def __init__(self, base: nn.Embedding, step: LoraStep) -> None:
        super().__init__(base, step, allocates_late=True)
        self.num_embeddings = base.num_embeddings
        self.embedding_dim = base.embedding_dim

    def allocate(self, slots: int, pages: int) -> int:  # noqa: ARG002 - an embedding has no bias, so none a slot
        a = zeros(pages, self.num_embeddings, PAGE_RANKS, like=self.weight)
        self.b = zeros(pages * PAGE_RANKS, self.embedding_dim, like=self.weight)
        self.a, self.is_allocated = a, True
        return self.a.nbytes + self.b.nbytes

    @property
    def page_bytes(self) -> int:
        return PAGE_RANKS * (self.num_embeddings + self.embedding_dim) * self.weight.element_size()

    def _zero(self, page: int) -> None:
        self.a[page].zero_()
        self.b[page * PAGE_RANKS : (page + 1) * PAGE_RANKS].zero_()

    def _zero_bias(self, slot: int) -> None:
        """Nothing: an embedding's adapter has no bias."""

    def _copy(self, place: Place, pair: LoraPair) -> None:
        for i, page in enumerate(place.pages):
            part = pair.a[i * PAGE_RANKS : (i + 1) * PAGE_RANKS]
            self.a[page, :, : part.shape[0]].copy_(part.t(), non_blocking=True)
            self.a[page, :, part.shape[0] :].zero_()
        _fill(self.b, place.pages, pair.b)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.base(ids)
        batch = self._step.batch
        if batch is not None and self._is_in(batch, ids.numel()):
            flat_out, flat_ids = out.view(-1, self.embedding_dim), ids.reshape(-1)
            for _, pages, start, end in batch.segments:
                for page in pages:
                    shrunk = F.embedding(flat_ids[start:end], self.a[page])
                    flat_out[start:end].addmm_(shrunk, self.b[page * PAGE_RANKS : (page + 1) * PAGE_RANKS])
        return out


def _fill(storage: torch.Tensor, pages: tuple[int, ...], values: torch.Tensor) -> None:
    """Write `values` [R, X] into the pages' rows of `storage` [P, X], and zeros into what is left of the pages."""
    rows = run_of(pages)
    if rows is None:
        for i, page in enumerate(pages):
            _fill(storage, (page,), values[i * PAGE_RANKS : (i + 1) * PAGE_RANKS])
        return
    room = storage[rows]
    room[: values.shape[0]].copy_(values, non_blocking=True)
    room[values.shape[0] :].zero_()
