"""Which of the registered adapters a worker pins."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from lora_worker.adapters.reference import AdapterReference
from lora_worker.adapters.room import PinRoom
from lora_worker.errors import AdapterConflictError


def pinned_here(
    references: Iterable[AdapterReference], own: Collection[str], room: PinRoom
) -> tuple[set[str], set[str]]:
    """The names that this worker pins, and those that it should and can't, since its pool must not be pinned whole.

    Args:
        references: all that are registered; `pinned` is the fleet's.
        own: names that the worker's own settings pin; they come first.
    """
    wanted = sorted(
        (reference for reference in references if reference.pinned or reference.name in own),
        key=lambda reference: (reference.name not in own, reference.name),
    )
    ranks: dict[str, int] = {}
    pinned: set[str] = set()
    left_out: set[str] = set()
    for reference in wanted:
        more = ranks | {reference.digest: reference.rank}
        if room.lacks(more.values()) is None:
            pinned.add(reference.name)
            ranks = more
        else:
            left_out.add(reference.name)
    return pinned, left_out


def check_pin(
    name: str, references: Iterable[AdapterReference], own: Collection[str], room: PinRoom, *, worker: str
) -> None:
    """Raise AdapterConflictError where a worker can't pin all that is to be pinned, `name` among it."""
    ranks = {r.digest: r.rank for r in references if r.pinned or r.name in own}
    reason = room.lacks(ranks.values())
    if reason is not None:
        raise AdapterConflictError(f"on {worker}, pinning {name!r} {reason}")
