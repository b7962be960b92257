"""The slots: which adapter's weights are on the device, and who holds them."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch

from lora_worker.adapters.eviction import EvictionPolicy
from lora_worker.adapters.host_adapter import HostAdapter
from lora_worker.adapters.pages import PageAllocator
from lora_worker.adapters.statistics import PoolCounters
from lora_worker.kernels.pages import pages_for
from lora_worker.lora.layer import LoraLayer, Place


@dataclass
class _Resident:
    place: Place
    nbytes: int
    copied: torch.cuda.Event | None
    held: int = 0
    last_used: float = field(default_factory=time.time)

    @property
    def is_ready(self) -> bool:
        if self.copied is not None and self.copied.query():
            self.copied = None
        return self.copied is None


class DevicePool:
    """Slots and pages over all LoRA layers. Owned by the engine thread.

    An adapter is held by every started row that uses it; a held or pinned adapter is never a victim. On CUDA an adapter
    is copied on a stream of its own, beside the steps that follow, and is ready when the copy has ended. The copy waits
    for what was launched before it: a step of prompts alone fetches nothing, so it may still run when a row of it is
    cancelled and its adapter's pages are given to another.
    """

    def __init__(
        self,
        layers: Mapping[str, LoraLayer],
        policy: EvictionPolicy,
        counters: PoolCounters,
        *,
        slots: int,
        pages: int,
        device: torch.device,
        is_pinned: Callable[[str], bool],
    ) -> None:
        self._layers = layers
        self._policy = policy
        self._residents: dict[str, _Resident] = {}
        self._allocator = PageAllocator(slots=slots, pages=pages)
        self._counters = counters
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._is_pinned = is_pinned
        self.nbytes = 0
        self._page_bytes = 0  # what one page takes over all layers that have memory
        for layer in layers.values():
            if not layer.allocates_late:
                self._allocate(layer)

    def __contains__(self, digest: str) -> bool:
        return digest in self._residents

    @property
    def slots(self) -> int:
        return self._allocator.slots

    def is_ready(self, digest: str) -> bool:
        """Whether the adapter is resident and its copy has ended."""
        return digest in self._residents and self._residents[digest].is_ready

    def wait_for_a_copy(self) -> bool:
        """Wait for the first of the copies under way to end; returns whether there was one."""
        copied = next((resident.copied for resident in self._residents.values() if not resident.is_ready), None)
        if copied is None:
            return False
        copied.synchronize()
        return True

    def place(self, digest: str) -> Place:
        return self._residents[digest].place

    def held(self, digest: str) -> int:
        return self._residents[digest].held if digest in self._residents else 0

    def last_used(self, digest: str) -> float | None:
        return self._residents[digest].last_used if digest in self._residents else None

    def residents(self) -> dict[int, str]:
        """Slot to digest of what is resident, in the order of the slots."""
        slots = {resident.place.slot: digest for digest, resident in self._residents.items()}
        return dict(sorted(slots.items()))

    def bytes_of(self, digest: str) -> tuple[int, int]:
        """The bytes of an adapter's weights in the pool, and those of its pages that hold none; 0 of what isn't here.

        Weights that lie outside of pages (biases) are not counted.
        """
        if digest not in self._residents:
            return 0, 0
        resident = self._residents[digest]
        taken = len(resident.place.pages) * self._page_bytes
        return min(resident.nbytes, taken), max(taken - resident.nbytes, 0)

    def room(self, spares: Callable[[str], bool], drained: Collection[str] = ()) -> int:
        """The pages another adapter could have if all that may leave did: what nobody holds and `spares` doesn't name.

        `drained` are taken for held by nobody.
        """
        leaving = [
            resident
            for digest, resident in self._residents.items()
            if not self._is_blocked(digest, drained) and not spares(digest)
        ]
        if not self._allocator.free_slots and not leaving:
            return 0
        return self._allocator.free_pages + sum(len(resident.place.pages) for resident in leaving)

    def load(self, adapter: HostAdapter, spares: Callable[[str], bool]) -> bool:
        """Copy an adapter into a slot, evicting others where need be, in the policy's order.

        Evicts nothing that `spares` names. Returns whether there was room; nothing is changed where there was none.
        Raises whatever torch does where memory lacks; slot and pages are free then.
        """
        assert adapter.digest not in self._residents, f"{adapter.digest} is resident already"
        count = pages_for(adapter.rank)
        victims = self._victims(count, spares)
        if victims is None:
            return False
        for layer in (self._layers[path] for path in adapter.pairs):
            if not layer.is_allocated:
                self._allocate(layer)
        for victim in victims:
            self.remove(victim)
            self._counters.evictions += 1
        started = time.monotonic()
        place = Place(*self._allocator.take(count))
        try:
            copied = self._copy(adapter, place)
        except BaseException:
            self._allocator.give_back(*place)
            raise
        self._residents[adapter.digest] = _Resident(place, adapter.nbytes, copied)
        self._policy.added(adapter.digest)
        self._counters.copies.add(time.monotonic() - started)
        return True

    def hold(self, digest: str) -> Place:
        """A row that uses the adapter starts."""
        resident = self._residents[digest]
        resident.held += 1
        resident.last_used = time.time()
        self._policy.used(digest)
        return resident.place

    def release(self, digest: str) -> None:
        """A row that used the adapter has ended, however it ended."""
        resident = self._residents[digest]
        assert resident.held > 0, f"{digest} was released more often than held"
        resident.held -= 1
        resident.last_used = time.time()
        self._policy.used(digest)

    def remove(self, digest: str) -> None:
        """Give the adapter's slot and pages back; nobody may hold it."""
        resident = self._residents[digest]
        assert resident.held == 0, f"{digest} is held by {resident.held} rows and can't leave"
        del self._residents[digest]
        self._policy.removed(digest)
        self._allocator.give_back(*resident.place)

    def check_integrity(self, held: Mapping[str, int]) -> None:
        """Compare with the rows that have started: `held` counts them by digest."""
        places = [resident.place for resident in self._residents.values()]
        self._allocator.check_integrity(
            [place.slot for place in places], [page for place in places for page in place.pages]
        )
        counted = {digest: r.held for digest, r in self._residents.items() if r.held}
        assert counted == dict(held), f"held counts drifted: pool {counted}, rows {dict(held)}"
        assert set(self._policy) == set(self._residents), "pool and policy disagree"

    def _victims(self, count: int, spares: Callable[[str], bool]) -> list[str] | None:
        """Who has to leave for `count` pages and a slot; None where that can't be had."""
        victims: list[str] = []
        slots, pages = self._allocator.free_slots, self._allocator.free_pages
        for digest in self._policy:
            if slots and pages >= count:
                break
            if not self._is_blocked(digest) and not spares(digest):
                victims.append(digest)
                slots += 1
                pages += len(self._residents[digest].place.pages)
        return victims if slots and pages >= count else None

    def _copy(self, adapter: HostAdapter, place: Place) -> torch.cuda.Event | None:
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with self._beside():
            for path, layer in self._layers.items():
                if layer.is_allocated:
                    layer.put(place, adapter.pairs.get(path))
            return self._stream.record_event() if self._stream is not None else None

    def _beside(self) -> AbstractContextManager[object]:
        """On CUDA, what is launched within goes to the copies' own stream."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def _allocate(self, layer: LoraLayer) -> None:
        self.nbytes += layer.allocate(self.slots, self._allocator.pages)
        self._page_bytes += layer.page_bytes

    def _is_blocked(self, digest: str, drained: Collection[str] = ()) -> bool:
        resident = self._residents[digest]
        is_held = resident.held > 0 and digest not in drained
        return self._is_pinned(digest) or is_held or not resident.is_ready
