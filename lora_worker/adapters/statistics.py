"""What the pool counts: hits, loads by tier and their seconds, evictions, and how long rows waited for their adapters.

Everything here is one number or one of a bounded number of them, so that a metrics endpoint can export it as it is.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

# Adapters whose waits are told apart; those that waited longest ago go into one sum.
WAITS_KEPT = 100
WAITS_SHOWN = 8


@dataclass
class Durations:
    """How often something happened, and how long it took."""

    count: int = 0
    seconds: float = 0.0
    max_seconds: float = 0.0

    def add(self, seconds: float) -> None:
        self.merge(Durations(1, seconds, seconds))

    def merge(self, other: Durations) -> None:
        self.count += other.count
        self.seconds += other.seconds
        self.max_seconds = max(self.max_seconds, other.max_seconds)

    def as_dict(self) -> dict[str, float]:
        return {
            "count": self.count,
            "seconds": round(self.seconds, 4),
            "max_seconds": round(self.max_seconds, 4),
        }


@dataclass
class PoolCounters:
    """What happened since the start.

    `hits` are rows that found their adapter resident; `copies` are loads from host memory into a slot, `reads` loads
    from files into host memory.
    """

    hits: int = 0
    evictions: int = 0
    cache_evictions: int = 0
    copies: Durations = field(default_factory=Durations)
    reads: Durations = field(default_factory=Durations)


class AdapterWaits:
    """The seconds between the claim of rows and their start, by adapter, for a bounded number of adapters."""

    def __init__(self) -> None:
        self._waits: OrderedDict[str, Durations] = OrderedDict()
        self._others = Durations()

    def add(self, name: str, seconds: float) -> None:
        self._waits.setdefault(name, Durations()).add(seconds)
        self._waits.move_to_end(name)
        if len(self._waits) > WAITS_KEPT:
            self._others.merge(self._waits.popitem(last=False)[1])

    def as_dict(self) -> dict[str, Any]:
        """The sum over all adapters, and those that waited longest."""
        total = Durations()
        for waits in (*self._waits.values(), self._others):
            total.merge(waits)
        longest = sorted(self._waits.items(), key=lambda item: -item[1].max_seconds)[:WAITS_SHOWN]
        return {"all": total.as_dict(), "longest": {name: waits.as_dict() for name, waits in longest}}
