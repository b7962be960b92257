"""The slots: which adapter's weights are on the device, and who holds them."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from lora_worker.adapters.eviction import EvictionPolicy
from lora_worker.adapters.plan import HostAdapter
from lora_worker.lora.layer import LoraLayer


@dataclass
class PoolCounters:
    """What happened since the start: uses of a resident adapter, copies into a slot, adapters evicted for another."""

    hits: int = 0
    loads: int = 0
    evictions: int = 0


@dataclass
class _Resident:
    slot: int
    held: int = 0
    last_used: float = field(default_factory=time.time)


class DevicePool:
    """A fixed number of slots over all LoRA layers. Owned by the engine thread.

    An adapter is held by every running row that uses it; a held or pinned adapter is never a victim.
    """

    def __init__(self, layers: Mapping[str, LoraLayer], policy: EvictionPolicy, *, slots: int, max_rank: int) -> None:
        self._layers = layers
        self._policy = policy
        self._residents: dict[str, _Resident] = {}
        self._free = list(range(slots - 1, -1, -1))
        self.slots = slots
        self.pinned: set[str] = set()
        self.counters = PoolCounters()
        self._max_rank = max_rank
        self.nbytes = sum(layer.allocate(slots, max_rank) for layer in layers.values() if not layer.allocates_late)

    def __contains__(self, digest: str) -> bool:
        return digest in self._residents

    def slot(self, digest: str) -> int:
        return self._residents[digest].slot

    def held(self, digest: str) -> int:
        return self._residents[digest].held if digest in self._residents else 0

    def last_used(self, digest: str) -> float | None:
        return self._residents[digest].last_used if digest in self._residents else None

    def residents(self) -> dict[int, str]:
        """Slot to digest of what is resident, in the order of the slots."""
        return {resident.slot: digest for digest, resident in sorted(self._residents.items(), key=lambda i: i[1].slot)}

    def has_room(self) -> bool:
        """Whether another adapter could be loaded now."""
        return bool(self._free) or self._policy.victim(self._is_blocked) is not None

    def load(self, adapter: HostAdapter) -> None:
        """Copy an adapter into a free slot, evicting one first where none is free (`has_room` must hold)."""
        assert adapter.digest not in self._residents, f"{adapter.digest} is resident already"
        if not self._free:
            victim = self._policy.victim(self._is_blocked)
            assert victim is not None, "every slot is held or pinned"
            self.remove(victim)
            self.counters.evictions += 1
        slot = self._free.pop()
        for path, layer in self._layers.items():
            pair = adapter.pairs.get(path)
            if layer.is_allocated:
                layer.clear(slot)
            elif pair is not None:
                self.nbytes += layer.allocate(self.slots, self._max_rank)
            if pair is not None:
                layer.put(slot, pair)
        self._residents[adapter.digest] = _Resident(slot)
        self._policy.added(adapter.digest)
        self.counters.loads += 1

    def hold(self, digest: str) -> None:
        """A row that uses the adapter starts."""
        resident = self._residents[digest]
        resident.held += 1
        resident.last_used = time.time()
        self._policy.used(digest)

    def release(self, digest: str) -> None:
        """A row that used the adapter has ended, however it ended."""
        resident = self._residents[digest]
        assert resident.held > 0, f"{digest} was released more often than held"
        resident.held -= 1
        resident.last_used = time.time()
        self._policy.used(digest)

    def remove(self, digest: str) -> None:
        """Give the adapter's slot back; nobody may hold it."""
        resident = self._residents[digest]
        assert resident.held == 0, f"{digest} is held by {resident.held} rows and can't leave"
        del self._residents[digest]
        self._policy.removed(digest)
        self._free.append(resident.slot)

    def check_integrity(self, held: Mapping[str, int]) -> None:
        """Compare with the rows that run: `held` counts them by digest."""
        used = sorted([resident.slot for resident in self._residents.values()] + self._free)
        assert used == list(range(self.slots)), f"slots lost or shared: {used}"
        counted = {digest: r.held for digest, r in self._residents.items() if r.held}
        assert counted == dict(held), f"held counts drifted: pool {counted}, rows {dict(held)}"
        assert len(self._policy) == len(self._residents), "pool and policy disagree"
        assert all(digest in self._policy for digest in self._residents), "pool and policy disagree"

    def _is_blocked(self, digest: str) -> bool:
        return digest in self.pinned or self._residents[digest].held > 0
