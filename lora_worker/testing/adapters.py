"""The paced engine's adapters: folders without weights, and slots that cost time to fill."""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

from lora_worker.adapters.eviction import make_policy
from lora_worker.adapters.reference import AdapterReference, AdapterState, LoadReport
from lora_worker.adapters.registry import AdapterRegistry
from lora_worker.adapters.source import FILES, locate
from lora_worker.errors import InvalidAdapterError
from lora_worker.messages import AdapterOnWorker
from lora_worker.settings import Settings

BYTES_PER_RANK = 1024


def digest_of(folder: Path) -> str:
    """The content digest of an adapter's files."""
    digest = hashlib.sha256()
    for file in (folder / name for name in FILES):
        digest.update(file.read_bytes() if file.is_file() else b"")
    return digest.hexdigest()


def read_reference(name: str, folder: Path, *, pinned: bool) -> AdapterReference:
    """What the registry keeps of the adapter in a folder; raises InvalidAdapterError where it has no rank."""
    try:
        rank = int(json.loads((folder / FILES[0]).read_text())["r"])
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidAdapterError(f"{folder / FILES[0]} of the adapter {name!r} names no rank r: {error!r}") from None
    nbytes = BYTES_PER_RANK * rank
    report = LoadReport(name, str(folder), digest_of(folder), [rank], [1.0], 1, nbytes)
    return AdapterReference(
        name, str(folder), report.digest, rank, has_bias=False, nbytes=nbytes, pinned=pinned, report=report
    )


class PacedAdapters:
    """Registered names, and slots by digest; the engine's lock guards it."""

    def __init__(self, settings: Settings, load_seconds: float) -> None:
        self.registry = AdapterRegistry(settings.base_name)
        self.counts = {"hits": 0, "loads": 0, "evictions": 0}
        self._settings = settings
        self._load_seconds = load_seconds
        self._policy = make_policy(settings.lora_eviction_policy)
        self._ready_at: dict[str, float] = {}  # by digest, in the order of the slots' last loads
        self._unused: set[str] = set()  # loaded, and no row has started with it since
        self._held: Counter[str] = Counter()
        self._errors: dict[str, str] = {}  # by digest, until its files are right
        self._last_used: dict[str, float] = {}

    def register(self, reference: AdapterReference) -> None:
        before = self.registry.register(reference, replace_content=True)
        if before is not None:
            self._free_if_unused(before.digest)

    def unregister(self, name: str) -> None:
        removed = self.registry.remove(name)
        if removed is not None:
            self._free_if_unused(removed.digest)

    # What the scheduler asks: `lora_worker.engine.admission.Adapters`. An adapter takes one page.

    @property
    def slots(self) -> int:
        return self._settings.max_loras_per_batch

    def state(self, name: str) -> AdapterState:
        is_resident = self.registry.get(name).digest in self._ready_at
        return AdapterState.RESIDENT if is_resident else AdapterState.CACHED

    def residents(self) -> list[str]:
        return [name for digest in self._ready_at for name in sorted(self.registry.names_of(digest))]

    def pages(self, _: str) -> int:
        return 1

    def room(self, spared: Callable[[str], bool], drained: Collection[str] = ()) -> int:
        idle = self._evictable(spared, drained)
        return self.slots - len(self._ready_at) + len(list(idle))

    def names_of(self, digest: str) -> Collection[str]:
        return self.registry.names_of(digest)

    def fetch(self, name: str, *, is_urgent: bool) -> None:  # noqa: ARG002 - the protocol's signature
        raise AssertionError(f"{name} is never away")

    def is_pinned(self, name: str) -> bool:
        return self.registry.get(name).pinned

    def pinned_without_slot(self) -> list[str]:
        return []

    # ---------------------------------------------------------------------------------------------

    def prepare(self, reference: AdapterReference, spared: Callable[[str], bool]) -> float | None:
        """When the adapter is in a slot, on the monotonic clock; None where nothing may leave for it.

        InvalidAdapterError where the folder no longer holds what was registered.
        """
        digest = reference.digest
        if digest not in self._ready_at:
            if not self._make_room(spared):
                return None
            self._check_files(reference)
            self.counts["loads"] += 1
            self._policy.added(digest)
            self._ready_at[digest] = time.monotonic() + self._load_seconds
            self._unused.add(digest)
        return self._ready_at[digest]

    def hold(self, digest: str) -> None:
        """A row starts; a hit is one that needed no load of its own."""
        self.counts["hits"] += digest not in self._unused
        self._unused.discard(digest)
        self._held[digest] += 1
        self._policy.used(digest)
        self._last_used[digest] = time.time()

    def release(self, digest: str) -> None:
        self._held[digest] -= 1
        self._free_if_unused(digest)

    def here(self, digest: str) -> AdapterOnWorker:
        """As the real engine's."""
        is_resident = digest in self._ready_at
        return AdapterOnWorker(
            cached=is_resident,
            resident=is_resident,
            slot=list(self._ready_at).index(digest) if is_resident else None,
            held=self._held[digest],
            last_used=self._last_used.get(digest),
            error=self._errors.get(digest),
        )

    def info(self) -> dict[str, Any]:
        """As the real engine's, but for memory."""
        names = {reference.digest: reference.name for reference in self.registry}
        return {
            "policy": self._settings.lora_eviction_policy,
            "slots": {str(slot): names.get(digest, "(unloading)") for slot, digest in enumerate(self._ready_at)},
            "max_loras_per_batch": self._settings.max_loras_per_batch,
            "pinned": sorted(reference.name for reference in self.registry if reference.pinned),
            **self.counts,
        }

    def check_integrity(self, held: dict[str, int]) -> None:
        assert held == +self._held, f"held {dict(+self._held)}, but the rows hold {held}"
        assert set(held) <= set(self._ready_at), f"rows run without a slot: {set(held) - set(self._ready_at)}"
        assert len(self._ready_at) <= self.slots, f"{len(self._ready_at)} slots are taken"
        assert set(self._policy) == set(self._ready_at), "policy and slots disagree"

    # ---------------------------------------------------------------------------------------------

    def _check_files(self, reference: AdapterReference) -> None:
        digest = reference.digest
        self._errors.pop(digest, None)
        try:
            reference.check_digest(digest_of(locate(reference, self._settings.adapter_roots)))
        except InvalidAdapterError as error:
            self._errors[digest] = str(error)
            raise

    def _evictable(self, spared: Callable[[str], bool], drained: Collection[str] = ()) -> Iterator[str]:
        """Digests that may leave their slots, in the order of the policy."""
        for digest in self._policy:
            is_held = self._held[digest] and digest not in drained
            is_spared = any(map(spared, self.registry.names_of(digest)))
            if not (is_held or is_spared or self.registry.is_pinned(digest)):
                yield digest

    def _make_room(self, spared: Callable[[str], bool]) -> bool:
        if len(self._ready_at) < self.slots:
            return True
        victim = next(self._evictable(spared), None)
        if victim is None:
            return False
        self._remove(victim)
        self.counts["evictions"] += 1
        return True

    def _free_if_unused(self, digest: str) -> None:
        if digest in self._ready_at and not self._held[digest] and not self.registry.names_of(digest):
            self._remove(digest)

    def _remove(self, digest: str) -> None:
        self._policy.removed(digest)
        del self._ready_at[digest]
        self._unused.discard(digest)
