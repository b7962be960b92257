"""Who is in the fleet, as one worker knows it: whose partitions are whose, and who pins what."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from lora_worker.fleet.keys import Keys
from lora_worker.fleet.routing import rank


class Member(NamedTuple):
    """A living worker; `resident`: the adapters that it last had in its slots."""

    worker_id: str
    is_draining: bool
    pinned: frozenset[str]
    resident: frozenset[str]


class Members(NamedTuple):
    """All living workers at one `version` of the fleet."""

    version: int
    members: tuple[Member, ...]

    @property
    def ids(self) -> frozenset[str]:
        return frozenset(member.worker_id for member in self.members)

    @property
    def takers(self) -> tuple[str, ...]:
        """The workers that partitions are shared out to."""
        return tuple(member.worker_id for member in self.members if not member.is_draining)

    @property
    def has_pins(self) -> bool:
        return any(member.pinned for member in self.members)

    def own_partitions(self, worker_id: str, keys: Keys) -> tuple[list[str], list[str]]:
        """The partitions for which a worker comes first, and the others, those first for which it comes soonest."""
        if worker_id not in self.takers:
            return [], list(keys.partitions)
        places = {queue: rank(queue, self.takers).index(worker_id) for queue in keys.partitions}
        ordered = sorted(keys.partitions, key=lambda queue: places[queue])
        own = sum(place == 0 for place in places.values())
        return ordered[:own], ordered[own:]

    def pinned_elsewhere(self, lora_name: str, worker_id: str) -> list[str]:
        """The workers that pin an adapter where this one doesn't; none where this one does, or nobody."""
        pinning = [m for m in self.members if lora_name in m.pinned and not m.is_draining]
        if any(member.worker_id == worker_id for member in pinning):
            return []
        return [member.worker_id for member in pinning]

    def pins_of(self, worker_id: str) -> frozenset[str]:
        return frozenset().union(*(member.pinned for member in self.members if member.worker_id == worker_id))

    def resident(self) -> dict[str, frozenset[str]]:
        """Which adapters each worker last had in its slots."""
        return {member.worker_id: member.resident for member in self.members}


def read_members(answer: list[Any]) -> Members:
    """What members.lua returns."""
    version, *found = answer
    return Members(version, tuple(_read(*fields) for fields in found))


def _read(worker_id: bytes, draining: bytes, pinned: bytes, resident: bytes) -> Member:
    return Member(worker_id.decode(), draining == b"1", _names(pinned), _names(resident))


def _names(found: bytes) -> frozenset[str]:
    return frozenset(json.loads(found or "[]"))
