"""Which entry leaves a full pool or cache: the least recently used, or the first that came."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterator

from lora_worker.errors import SettingsError


class EvictionPolicy(ABC):
    """Keys in the order in which they are to leave. Every update is O(1).

    The owner passes over what may not leave (held, pinned, wanted next) at the moment it looks, so a policy can't hold
    a stale opinion of that.
    """

    def __init__(self) -> None:
        self._order: OrderedDict[str, None] = OrderedDict()

    def __iter__(self) -> Iterator[str]:
        return iter(self._order)

    def added(self, key: str) -> None:
        assert key not in self._order, f"{key} was added twice"
        self._order[key] = None

    def removed(self, key: str) -> None:
        del self._order[key]

    @abstractmethod
    def used(self, key: str) -> None:
        """Note a use of the key."""


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
