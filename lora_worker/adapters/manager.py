"""All the engine knows and does about adapters: names, host memory, slots, and reads that run beside generation."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from lora_worker.adapters.device_pool import DevicePool
from lora_worker.adapters.host_adapter import HostAdapter
from lora_worker.adapters.host_cache import HostCache, Spares
from lora_worker.adapters.plan import AdapterPlanner, LoadedAdapter
from lora_worker.adapters.readers import AdapterReaders
from lora_worker.adapters.reference import AdapterReference, AdapterState
from lora_worker.adapters.registry import AdapterRegistry
from lora_worker.adapters.room import PinRoom
from lora_worker.adapters.statistics import AdapterWaits, PoolCounters
from lora_worker.errors import AdapterConflictError, AdapterError
from lora_worker.kernels.pages import pages_for
from lora_worker.lora.layer import Place

COPY_AGAIN_SECONDS = 1.0

logger = logging.getLogger(__name__)


def _nobody(_: str) -> bool:
    return False


class Tiers(NamedTuple):
    """Where adapters are, and what counts them."""

    registry: AdapterRegistry
    cache: HostCache
    pool: DevicePool
    counters: PoolCounters


class AdapterManager:
    """Owned by the engine thread, but for `planner` and `read_again`, which any thread may use.

    Args:
        pin_room: what may be pinned.
        post: runs a function on the engine thread.
        is_wanted: whether rows wait for the adapter of that name.
        on_read_failed: told, on the engine thread, which names can't be served because their files can't be read.
        locate: the folder of a registered adapter; any thread but the engine's calls it.
    """

    def __init__(
        self,
        tiers: Tiers,
        planner: AdapterPlanner,
        *,
        pin_room: PinRoom,
        post: Callable[[Callable[[], None]], None],
        is_wanted: Callable[[str], bool],
        on_read_failed: Callable[[set[str], AdapterError], None],
        locate: Callable[[AdapterReference], Path],
    ) -> None:
        self.registry, self.cache, self.pool, self.counters = tiers
        self.planner = planner
        self.waits = AdapterWaits()
        self._pin_room = pin_room
        self._is_wanted = is_wanted
        self._on_read_failed = on_read_failed
        self.errors: dict[str, str] = {}  # by digest, why it could not be read or copied, until it can
        # By digest, when a pinned one that could not be copied is tried again.
        self._copy_again_at: dict[str, float] = {}
        self._readers = AdapterReaders(
            planner,
            self.counters.reads,
            locate=locate,
            post=post,
            on_read=self._on_read,
            on_failed=self._on_failed,
        )

    # Registered names ----------------------------------------------------------------------------

    def register(self, loaded: LoadedAdapter, *, pinned: bool, replace: bool) -> AdapterReference:
        """Make a checked adapter known under its name; rows admitted from now on use this content."""
        report = loaded.report
        adapter = loaded.adapter
        pinned = pinned or self.is_pinned(report.lora_name)
        if pinned:
            self._check_pin(report.lora_name, adapter.rank, adapter.digest)
        reference = loaded.reference(pinned=pinned)
        before = self.registry.register(reference, replace_content=replace)
        self.cache.put(adapter, self._is_next)
        if before is not None:
            self._forget_if_unused(before.digest)
        return reference

    def register_reference(self, reference: AdapterReference) -> None:
        """Make an adapter known that another worker has checked; its files are read when it is first needed."""
        before = self.registry.register(reference, replace_content=True)
        if before is not None:
            self._forget_if_unused(before.digest)

    def unregister(self, name: str, *, force: bool) -> AdapterReference | None:
        """Hide the name at once; its memory comes back when the last row that holds it has ended."""
        if name not in self.registry:
            return None
        reference = self.registry.get(name)
        if reference.pinned and not force:
            raise AdapterConflictError(f"the adapter {name!r} is pinned; unpin it first, or unload with force=True")
        self.registry.remove(name)
        self._forget_if_unused(reference.digest)
        return reference

    def read_again(self, reference: AdapterReference) -> HostAdapter:
        """The weights of a registered adapter from its folder; any thread but the engine's may call it."""
        return self._readers.read(reference)

    def pin(self, name: str, adapter: HostAdapter | None) -> None:
        """Keep the adapter resident from now on; refused where no slot would stay unpinned.

        `adapter` is its weights where they were not in the cache; pinned, they stay there.
        """
        reference = self.registry.get(name)
        self._check_pin(name, reference.rank, reference.digest)
        if adapter is not None and adapter.digest == reference.digest:
            self.cache.put(adapter, self._is_next)
        self.registry.set_pinned(name, pinned=True)

    def unpin(self, name: str) -> bool:
        """Returns whether the adapter was pinned."""
        was_pinned = self.is_pinned(name)
        if was_pinned:
            self.registry.set_pinned(name, pinned=False)
        return was_pinned

    # Rows ----------------------------------------------------------------------------------------

    @property
    def slots(self) -> int:
        return self.pool.slots

    def state(self, name: str) -> AdapterState:
        reference = self.registry.find(name)
        if reference is None:
            return AdapterState.AWAY
        if reference.digest in self.pool:
            return AdapterState.RESIDENT if self.pool.is_ready(reference.digest) else AdapterState.AWAY
        return AdapterState.CACHED if reference.digest in self.cache else AdapterState.AWAY

    def residents(self) -> list[str]:
        digests = self.pool.residents().values()
        return [name for digest in digests if self.pool.is_ready(digest) for name in self.registry.names_of(digest)]

    def pages(self, name: str) -> int:
        reference = self.registry.find(name)
        return pages_for(reference.rank) if reference else 0

    def names_of(self, digest: str) -> Collection[str]:
        return self.registry.names_of(digest)

    def room(self, spared: Callable[[str], bool], drained: Collection[str] = ()) -> int:
        return self.pool.room(self._by_digest(spared), drained)

    def fetch(self, name: str, *, is_urgent: bool = False) -> None:
        """Have an adapter read into host memory, unless it is there.

        Unless it is urgent, nor where it would drive out what comes before it. Where host memory is too small for more,
        one is read at a time, once those before it are in their slots.
        """
        reference = self.registry.find(name)
        if reference is None or reference.digest in self.cache or reference.digest in self.pool:
            return
        if not self._readers.can_start(reference.digest):
            return
        coming = self._readers.coming()
        sizes = [reference.nbytes, *(other.nbytes for other in coming)]
        comes_next = is_urgent or not (coming or self.cache.holds_any(self._is_next))
        if comes_next or self.cache.has_room(sizes, self._is_next):
            self._readers.start(reference)

    def prepare(self, reference: AdapterReference, spared: Callable[[str], bool] = _nobody) -> bool:
        """Bring the adapter into a slot, if it is in host memory and there is room; returns whether rows can use it.

        No adapter leaves its slot for it whose name is `spared`. Raises AdapterError where it could not be copied.
        """
        if reference.digest not in self.pool:
            adapter = self.cache.get(reference.digest)
            if adapter is None:
                self.fetch(reference.name)
                return False
            if not self._copy(reference.name, adapter, self._by_digest(spared)):
                return False
        return self.pool.is_ready(reference.digest)

    def prepare_pinned(self) -> None:
        """Bring pinned adapters into their slots, before any row asks; what can't be copied is tried again later."""
        now = time.monotonic()
        for reference in self.registry.pinned():
            if not self.pool.is_ready(reference.digest) and now >= self._copy_again_at.get(reference.digest, 0):
                with suppress(AdapterError):  # it is among `errors`
                    self.prepare(reference)

    def are_pinned_ready(self) -> bool:
        """Whether all pinned adapters are in their slots; raises AdapterError where one can't be served."""
        for error in (self.errors.get(reference.digest) for reference in self.registry.pinned()):
            if error is not None:
                raise AdapterError(error)
        return all(self.pool.is_ready(reference.digest) for reference in self.registry.pinned())

    def is_pinned(self, name: str) -> bool:
        reference = self.registry.find(name)
        return reference is not None and reference.pinned

    def pinned_without_slot(self) -> list[str]:
        """The pinned adapters that could be copied if they had room."""
        waiting = [reference for reference in self.registry.pinned() if reference.digest not in self.pool]
        return [r.name for r in waiting if r.digest in self.cache and r.digest not in self.errors]

    def hold(self, digest: str) -> Place:
        """A row starts; returns where its adapter is."""
        return self.pool.hold(digest)

    def release(self, digest: str) -> None:
        """A row has ended, however it ended."""
        self.pool.release(digest)
        self._forget_if_unused(digest)

    # ---------------------------------------------------------------------------------------------

    def check_integrity(self, held: Mapping[str, int]) -> None:
        self.pool.check_integrity(held)
        self.cache.check_integrity()
        self.registry.check_integrity()
        known = {reference.digest for reference in self.registry} | set(held)
        assert set(self.pool.residents().values()) <= known, "a slot is taken by an adapter that nobody knows"

    def close(self) -> None:
        self._readers.close()

    def _check_pin(self, name: str, rank: int, digest: str) -> None:
        # What the name stands for now leaves with its replacement.
        ranks = {r.digest: r.rank for r in self.registry.pinned() if r.name != name} | {digest: rank}
        reason = self._pin_room.lacks(ranks.values())
        if reason is not None:
            raise AdapterConflictError(f"pinning {name!r} {reason}")

    def _by_digest(self, spared: Callable[[str], bool]) -> Callable[[str], bool]:
        return lambda digest: any(map(spared, self.registry.names_of(digest)))

    def _is_next(self, digest: str) -> bool:
        """Whether rows wait for its copy into a slot."""
        return digest not in self.pool and any(map(self._is_wanted, self.registry.names_of(digest)))

    def _copy(self, name: str, adapter: HostAdapter, spares: Spares) -> bool:
        """Copy an adapter into a slot; returns whether there was room."""
        try:
            was_copied = self.pool.load(adapter, spares)
        except Exception as error:  # torch's, of whatever lacks
            sentence = f"the adapter {name!r} could not be copied into a slot: {type(error).__name__}: {error}"[:500]
            if self.errors.get(adapter.digest) != sentence:
                logger.exception("An adapter is not served: %s", sentence)
            self.errors[adapter.digest] = sentence
            self._copy_again_at[adapter.digest] = time.monotonic() + COPY_AGAIN_SECONDS
            raise AdapterError(sentence) from None
        self._forget_errors(adapter.digest)
        return was_copied

    def _forget_errors(self, digest: str) -> None:
        self.errors.pop(digest, None)
        self._copy_again_at.pop(digest, None)

    def _forget_if_unused(self, digest: str) -> None:
        if self.registry.names_of(digest):
            return
        self._forget_errors(digest)
        self.cache.drop(digest)
        if digest in self.pool and not self.pool.held(digest):
            self.pool.remove(digest)

    def _on_read(self, adapter: HostAdapter) -> None:
        self._forget_errors(adapter.digest)
        if self.registry.names_of(adapter.digest):
            self.cache.put(adapter, self._is_next)

    def _on_failed(self, digest: str, error: AdapterError) -> None:
        names = set(self.registry.names_of(digest))
        if names:
            self.errors[digest] = str(error)
        self._on_read_failed(names, error)
