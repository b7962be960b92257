"""Which unstarted rows a worker gives to peers that have nothing to do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

# A row that could not start for so long, though rows were free, waits for a slot, and is better off elsewhere.
STALE_SECONDS = 1.0


class Candidate(NamedTuple):
    """An unstarted row: its task id, adapter, priority, and how long it has waited here."""

    task_id: str
    adapter: str | None
    priority: int
    waited_seconds: float


def choose(
    candidates: Sequence[Candidate],
    free_rows: int,
    peers: Mapping[str, int],
    resident: Mapping[str, Collection[str]],
) -> dict[str, list[str]]:
    """Task ids by the peer that gets them, at most half of what this worker can spare.

    What the worker's own free rows are about to start is not spared. The most urgent go first; among equals those whose
    adapter the peer has in a slot, and then those of which there are most, so that a peer has few adapters to load.

    Args:
        peers: ids of idle peers, and how many rows each could take.
        resident: the adapters that each peer has in its slots.
    """
    stale = sum(candidate.waited_seconds > STALE_SECONDS for candidate in candidates)
    count = (max(len(candidates) - free_rows, stale) + 1) // 2
    counts = Counter(candidate.adapter for candidate in candidates)
    left = list(candidates)
    chosen: dict[str, list[str]] = {}
    for peer, room in peers.items():
        here = resident.get(peer, ())
        left.sort(key=lambda c: (c.priority, c.adapter not in here, -counts[c.adapter], str(c.adapter)))
        taken = left[: min(room, count)]
        if taken:
            chosen[peer] = [candidate.task_id for candidate in taken]
        left, count = left[len(taken) :], count - len(taken)
    return chosen
