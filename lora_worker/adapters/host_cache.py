"""Adapters in host memory, bounded by count and by bytes."""

from __future__ import annotations

from collections.abc import Callable, Collection

from lora_worker.adapters.eviction import EvictionPolicy
from lora_worker.adapters.host_adapter import HostAdapter
from lora_worker.adapters.statistics import PoolCounters

# Says of a digest that it is not to be evicted.
Spares = Callable[[str], bool]


class HostCache:
    """Digest to weights. Owned by the engine thread, so it holds no lock.

    Pinned adapters are never evicted, and what was put last stays until the next one comes, whatever its size: it is
    about to be used.
    """

    def __init__(
        self, policy: EvictionPolicy, counters: PoolCounters, *, max_adapters: int, max_bytes: int, is_pinned: Spares
    ) -> None:
        self._policy = policy
        self._counters = counters
        self._adapters: dict[str, HostAdapter] = {}
        self._max_adapters = max_adapters
        self._max_bytes = max_bytes
        self._is_pinned = is_pinned
        self.nbytes = 0

    def __contains__(self, digest: str) -> bool:
        return digest in self._adapters

    def __len__(self) -> int:
        return len(self._adapters)

    def get(self, digest: str) -> HostAdapter | None:
        adapter = self._adapters.get(digest)
        if adapter is not None:
            self._policy.used(digest)
        return adapter

    def holds_any(self, spares: Spares) -> bool:
        """Whether `spares` names anything that is here."""
        return any(map(spares, self._adapters))

    def has_room(self, sizes: Collection[int], spares: Spares) -> bool:
        """Whether adapters of so many bytes each would fit with all that `spares` names staying."""
        count, total = len(self._adapters) + len(sizes), self.nbytes + sum(sizes)
        for digest in self._policy:
            if count <= self._max_adapters and total <= self._max_bytes:
                return True
            if not self._is_pinned(digest) and not spares(digest):
                count -= 1
                total -= self._adapters[digest].nbytes
        return count <= self._max_adapters and total <= self._max_bytes

    def put(self, adapter: HostAdapter, spares: Spares) -> None:
        """Keep the adapter, evicting others as the policy says until it fits; those that `spares` names go last."""
        if adapter.digest in self._adapters:
            self._policy.used(adapter.digest)
            return
        self._adapters[adapter.digest] = adapter
        self._policy.added(adapter.digest)
        self.nbytes += adapter.nbytes
        while len(self._adapters) > self._max_adapters or self.nbytes > self._max_bytes:
            victim = self._victim(adapter.digest, spares)
            if victim is None:
                return
            self.drop(victim)
            self._counters.cache_evictions += 1

    def drop(self, digest: str) -> None:
        """Free the adapter's memory at once, if it is here."""
        adapter = self._adapters.pop(digest, None)
        if adapter is not None:
            self._policy.removed(digest)
            self.nbytes -= adapter.nbytes

    def check_integrity(self) -> None:
        assert set(self._policy) == set(self._adapters), "host cache: policy and contents disagree"
        total = sum(adapter.nbytes for adapter in self._adapters.values())
        assert total == self.nbytes, f"host cache: {self.nbytes} bytes counted, {total} held"

    def _victim(self, newest: str, spares: Spares) -> str | None:
        found = None
        for digest in self._policy:
            if digest == newest or self._is_pinned(digest):
                continue
            if not spares(digest):
                return digest
            found = found or digest
        return found
