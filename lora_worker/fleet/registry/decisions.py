"""What a change makes of the registry's entries; plain functions, since a change that meets another decides again."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

from lora_worker.adapters.reference import AdapterReference
from lora_worker.adapters.registry import other_content
from lora_worker.errors import AdapterConflictError
from lora_worker.fleet.registry.store import Decision, Entries


def load(entries: Entries, reference: AdapterReference, *, replace_content: bool) -> Decision:
    """The same content again succeeds; other content under a registered name needs `replace_content`."""
    name = reference.name
    if name not in entries:
        return {name: reference}
    known = entries[name]
    if known.digest != reference.digest and not replace_content:
        raise other_content(known, reference)
    by_settings = known.by_settings and known.digest == reference.digest
    wanted = replace(reference, pinned=known.pinned or reference.pinned, by_settings=by_settings)
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


class Restored(NamedTuple):
    """What `restore` decides, and sentences: by name on files that differ, and on settings that a task overruled."""

    decision: Decision
    refused: dict[str, str]
    passed_over: list[str]


def restore(entries: Entries, references: Iterable[AdapterReference], *, replace_content: bool) -> Restored:
    """Register what a worker has, beside what is registered.

    What a task has registered comes before what settings name; of two settings the first, but for `replace_content`.
    """
    restored = Restored({}, {}, [])
    for reference in references:
        name, known = reference.name, entries.get(reference.name)
        if known is None:
            restored.decision[name] = reference
        elif known.digest == reference.digest:
            if reference.pinned and not known.pinned:
                restored.decision[name] = replace(known, pinned=True)
        elif known.by_settings and (replace_content or not reference.by_settings):
            restored.decision[name] = replace(reference, pinned=known.pinned or reference.pinned)
        elif reference.by_settings and not known.by_settings:
            restored.passed_over.append(
                f"The adapter {name!r} is served as a task has loaded it, from {known.source} (digest "
                f"{known.digest[:12]}), and not from {reference.source} (digest {reference.digest[:12]}), which this "
                f"worker's settings name; unload it to have that registered at the next start."
            )
        else:
            restored.refused[name] = (
                f"the files of the adapter {name!r} in {reference.source} on this worker are not those that are "
                f"registered (digest {reference.digest[:12]}, registered {known.digest[:12]}); make them the same, or "
                f"load the adapter with replace=True"
            )
    return restored
