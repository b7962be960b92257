"""Which entry leaves a full pool or cache: the least recently used, or the first that came."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable

from lora_worker.errors import SettingsError


class EvictionPolicy(ABC):
    """An order over keys. Every update is O(1); `victim` walks past blocked keys only.

    The owner says what is blocked (held or pinned) at the moment it asks, so a policy can't hold a stale opinion.
    """

    def __init__(self) -> None:
        self._order: OrderedDict[str, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._order)

    def __contains__(self, key: str) -> bool:
        return key in self._order

    def added(self, key: str) -> None:
        assert key not in self._order, f"{key} was added twice"
        self._order[key] = None

    def removed(self, key: str) -> None:
        del self._order[key]

    @abstractmethod
    def used(self, key: str) -> None:
        """Note a use of the key."""

    def victim(self, is_blocked: Callable[[str], bool]) -> str | None:
        """The key to evict next, or None where every key is blocked."""
        return next((key for key in self._order if not is_blocked(key)), None)


class LruPolicy(EvictionPolicy):
    """Evicts the key whose last use is longest ago."""

    def used(self, key: str) -> None:
        self._order.move_to_end(key)


class FifoPolicy(EvictionPolicy):
    """Evicts the key that was added first, whatever its use."""

    def used(self, key: str) -> None:
        assert key in self._order, f"{key} was used and is not there"


def make_policy(name: str) -> EvictionPolicy:
    """The policy of `lora_eviction_policy`."""
    policies = {"lru": LruPolicy, "fifo": FifoPolicy}
    if name not in policies:
        raise SettingsError(f"lora_eviction_policy has the wrong value {name!r}; it is 'lru' or 'fifo'")
    return policies[name]()
