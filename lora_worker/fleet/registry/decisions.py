"""What a change makes of the registry's entries; plain functions, since a change that meets another decides again."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from lora_worker.adapters.reference import AdapterReference
from lora_worker.errors import AdapterConflictError
from lora_worker.fleet.registry.store import Decision, Entries


def load(entries: Entries, reference: AdapterReference, *, replace_content: bool) -> Decision:
    """The same content again succeeds; other content under a registered name needs `replace_content`."""
    name = reference.name
    if name not in entries:
        return {name: reference}
    known = entries[name]
    if known.digest != reference.digest and not replace_content:
        raise AdapterConflictError(
            f"the adapter {name!r} is already loaded from {known.source} with other content "
            f"(digest {known.digest[:12]}, now {reference.digest[:12]}); unload it first, or load with replace=True"
        )
    wanted = replace(reference, pinned=known.pinned or reference.pinned)
    # A report tells how long its load took, so the same load again would look like a change.
    return {} if replace(wanted, report=known.report) == known else {name: wanted}


def unload(entries: Entries, name: str, *, force: bool, pinning: Iterable[str]) -> Decision:
    """`pinning` are workers whose settings pin the adapter."""
    if name not in entries:
        return {}
    where = ", ".join(pinning)
    if where and not force:
        raise AdapterConflictError(f"the adapter {name!r} is pinned by the settings of {where}; unload with force=True")
    if entries[name].pinned and not force:
        raise AdapterConflictError(f"the adapter {name!r} is pinned; unpin it first, or unload with force=True")
    return {name: None}


def set_pinned(entries: Entries, name: str, *, pinned: bool) -> Decision:
    if name not in entries or entries[name].pinned == pinned:
        return {}
    return {name: replace(entries[name], pinned=pinned)}


def restore(
    entries: Entries, references: Iterable[AdapterReference], *, replace_content: bool
) -> tuple[Decision, dict[str, str]]:
    """Register what a worker has, beside what is registered.

    Returns the decision, and a sentence for each name that is registered with other content and keeps it.
    """
    decision: Decision = {}
    refused = {}
    for reference in references:
        name = reference.name
        if name not in entries:
            decision[name] = reference
            continue
        known = entries[name]
        if known.digest == reference.digest:
            continue
        if replace_content:
            decision[name] = replace(reference, pinned=known.pinned)
            continue
        refused[name] = (
            f"the files of the adapter {name!r} in {reference.source} on this worker are not those that are registered "
            f"(digest {reference.digest[:12]}, registered {known.digest[:12]}); make them the same, or load the "
            f"adapter with replace=True"
        )
    return decision, refused
