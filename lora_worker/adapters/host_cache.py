"""Adapters in host memory, bounded by count and by bytes."""

from __future__ import annotations

from collections.abc import Callable

from lora_worker.adapters.eviction import EvictionPolicy
from lora_worker.adapters.plan import HostAdapter


class HostCache:
    """Digest to weights. Owned by the engine thread, so it holds no lock.

    Pinned adapters are never evicted, and what was put last stays until the next one comes, whatever its size: it is
    about to be used.
    """

    def __init__(self, policy: EvictionPolicy, *, max_adapters: int, max_bytes: int) -> None:
        self._policy = policy
        self._adapters: dict[str, HostAdapter] = {}
        self._max_adapters = max_adapters
        self._max_bytes = max_bytes
        self.nbytes = 0
        self.evictions = 0

    def __contains__(self, digest: str) -> bool:
        return digest in self._adapters

    def __len__(self) -> int:
        return len(self._adapters)

    def get(self, digest: str) -> HostAdapter | None:
        adapter = self._adapters.get(digest)
        if adapter is not None:
            self._policy.used(digest)
        return adapter

    def put(self, adapter: HostAdapter, is_pinned: Callable[[str], bool]) -> None:
        """Keep the adapter, evicting others as the policy says until it fits."""
        if adapter.digest in self._adapters:
            self._policy.used(adapter.digest)
            return
        self._adapters[adapter.digest] = adapter
        self._policy.added(adapter.digest)
        self.nbytes += adapter.nbytes
        while len(self._adapters) > self._max_adapters or self.nbytes > self._max_bytes:
            victim = self._policy.victim(lambda digest: digest == adapter.digest or is_pinned(digest))
            if victim is None:
                return
            self.drop(victim)
            self.evictions += 1

    def drop(self, digest: str) -> None:
        """Free the adapter's memory at once, if it is here."""
        adapter = self._adapters.pop(digest, None)
        if adapter is not None:
            self._policy.removed(digest)
            self.nbytes -= adapter.nbytes

    def check_integrity(self) -> None:
        assert len(self._policy) == len(self._adapters), "host cache: policy and contents disagree"
        total = sum(adapter.nbytes for adapter in self._adapters.values())
        assert total == self.nbytes, f"host cache: {self.nbytes} bytes counted, {total} held"
