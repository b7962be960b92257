"""Which of the registered adapters a worker pins."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from lora_worker.adapters.reference import AdapterReference
from lora_worker.errors import AdapterConflictError


def pinned_here(
    references: Iterable[AdapterReference], own: Collection[str], *, slots: int
) -> tuple[set[str], set[str]]:
    """The names that this worker pins, and those that it should and can't, since one slot must stay unpinned.

    Args:
        references: all that are registered; `pinned` is the fleet's.
        own: names that the worker's own settings pin; they come first.
    """
    wanted = sorted(
        (reference for reference in references if reference.pinned or reference.name in own),
        key=lambda reference: (reference.name not in own, reference.name),
    )
    digests: set[str] = set()
    pinned: set[str] = set()
    left_out: set[str] = set()
    for reference in wanted:
        fits = len(digests | {reference.digest}) < slots
        (pinned if fits else left_out).add(reference.name)
        if fits:
            digests.add(reference.digest)
    return pinned, left_out


def check_pin(
    name: str, references: Iterable[AdapterReference], own: Collection[str], *, slots: int, worker: str
) -> None:
    """Raise AdapterConflictError where a pin would leave a worker no slot unpinned."""
    _, left_out = pinned_here(references, own, slots=slots)
    if left_out:
        raise AdapterConflictError(
            f"pinning {name!r} would pin {slots} of {slots} slots of {worker}, and one must stay unpinned; "
            f"unpin another adapter or raise max_loras_per_batch"
        )
