"""All the engine knows and does about adapters: names, host memory, slots, and reads that run beside generation."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lora_worker.adapters.device_pool import DevicePool
from lora_worker.adapters.host_cache import HostCache
from lora_worker.adapters.plan import AdapterPlanner, HostAdapter, LoadedAdapter
from lora_worker.adapters.reference import AdapterReference, Readiness
from lora_worker.adapters.registry import AdapterRegistry
from lora_worker.errors import AdapterConflictError, AdapterError, InvalidAdapterError
from lora_worker.messages import AdapterOnWorker, AdapterStatus

READER_THREADS = 2
READ_AGAIN_SECONDS = 1.0

logger = logging.getLogger(__name__)


class AdapterManager:
    """Owned by the engine thread, but for `planner`, which any thread may use.

    Args:
        post: runs a function on the engine thread.
        on_read_failed: told, on the engine thread, which names can't be served because their files can't be read.
        locate: the folder of a registered adapter; any thread but the engine's calls it.
    """

    def __init__(
        self,
        registry: AdapterRegistry,
        cache: HostCache,
        pool: DevicePool,
        planner: AdapterPlanner,
        *,
        post: Callable[[Callable[[], None]], None],
        on_read_failed: Callable[[set[str], AdapterError], None],
        locate: Callable[[AdapterReference], Path] = lambda reference: Path(reference.source),
    ) -> None:
        self.registry = registry
        self.cache = cache
        self.pool = pool
        self.planner = planner
        self._post = post
        self._on_read_failed = on_read_failed
        self._locate = locate
        self._reading: set[str] = set()
        self._read_after: dict[str, float] = {}  # by digest, after a read that failed
        self._read_errors: dict[str, str] = {}  # likewise, until a read succeeds
        self._readers = ThreadPoolExecutor(READER_THREADS, "adapter-reader")

    # Registered names ----------------------------------------------------------------------------

    def register(self, loaded: LoadedAdapter, *, pinned: bool, replace: bool) -> AdapterReference:
        """Make a checked adapter known under its name; rows admitted from now on use this content."""
        report = loaded.report
        adapter = loaded.adapter
        known = report.lora_name in self.registry and self.registry.get(report.lora_name)
        pinned = pinned or bool(known and known.pinned)
        if pinned:
            self._check_pin(report.lora_name, adapter.digest)
        reference = AdapterReference(
            report.lora_name,
            report.source,
            adapter.digest,
            adapter.rank,
            adapter.has_bias,
            adapter.nbytes,
            pinned,
            report,
        )
        before = self.registry.register(reference, replace_content=replace)
        self._update_pins()
        self.cache.put(adapter, self._is_pinned)
        if before is not None:
            self._forget_if_unused(before.digest)
        return reference

    def register_reference(self, reference: AdapterReference) -> None:
        """Make an adapter known that another worker has checked; its files are read when it is first needed."""
        before = self.registry.register(reference, replace_content=True)
        self._update_pins()
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
        self._update_pins()
        self._forget_if_unused(reference.digest)
        return reference

    def read_again(self, reference: AdapterReference) -> HostAdapter:
        """The weights of a registered adapter from its folder; any thread but the engine's may call it."""
        adapter = self.planner.load(reference.name, self._locate(reference)).adapter
        _check_digest(reference, adapter)
        return adapter

    def pin(self, name: str, adapter: HostAdapter | None) -> None:
        """Keep the adapter resident from now on; refused where no slot would stay unpinned.

        `adapter` is its weights where they were not in the cache; pinned, they stay there.
        """
        reference = self.registry.get(name)
        self._check_pin(name, reference.digest)
        if adapter is not None and adapter.digest == reference.digest:
            self.cache.put(adapter, self._is_pinned)
        self.registry.set_pinned(name, pinned=True)
        self._update_pins()

    def unpin(self, name: str) -> bool:
        """Returns whether the adapter was pinned."""
        was_pinned = name in self.registry and self.registry.get(name).pinned
        if was_pinned:
            self.registry.set_pinned(name, pinned=False)
            self._update_pins()
        return was_pinned

    # Rows ----------------------------------------------------------------------------------------

    def prepare(self, reference: AdapterReference) -> Readiness:
        """Bring the adapter into a slot if that can be done now."""
        if reference.digest in self.pool:
            self.pool.counters.hits += 1
            return Readiness.READY
        adapter = self.cache.get(reference.digest)
        if adapter is None:
            self._read_ahead(reference)
            return Readiness.NOT_YET
        if not self.pool.has_room():
            return Readiness.NO_SLOT
        self.pool.load(adapter)
        return Readiness.READY

    def prepare_pinned(self) -> bool:
        """Bring pinned adapters into their slots, before any row asks; returns whether all are there."""
        waiting = [r for r in self.registry if r.pinned and r.digest not in self.pool]
        # Each of them is prepared, also where an earlier one is not ready.
        found = [self.prepare(reference) for reference in waiting]
        return all(readiness is Readiness.READY for readiness in found)

    def hold(self, digest: str) -> int:
        """A row starts; returns the adapter's slot."""
        self.pool.hold(digest)
        return self.pool.slot(digest)

    def release(self, digest: str) -> None:
        """A row has ended, however it ended."""
        self.pool.release(digest)
        self._forget_if_unused(digest)

    # Reports -------------------------------------------------------------------------------------

    def status(self, worker_name: str) -> dict[str, dict[str, Any]]:
        """Per registered name: what it is, and what this worker does with it."""
        return {
            reference.name: AdapterStatus(
                source=reference.source,
                digest=reference.digest,
                rank=reference.rank,
                bytes=reference.nbytes,
                pinned=reference.pinned,
                report=asdict(reference.report),
                workers={worker_name: self.here(reference.digest)},
            ).model_dump()
            for reference in self.registry
        }

    def here(self, digest: str) -> AdapterOnWorker:
        """Where the weights of one content are on this worker."""
        return AdapterOnWorker(
            cached=digest in self.cache,
            resident=digest in self.pool,
            slot=self.pool.slot(digest) if digest in self.pool else None,
            held=self.pool.held(digest),
            last_used=self.pool.last_used(digest),
            error=self._read_errors.get(digest),
        )

    def pool_info(self, policy: str) -> dict[str, Any]:
        """The pool as `inspect stats` shows it."""
        names = {reference.digest: reference.name for reference in self.registry}
        counters = self.pool.counters
        return {
            "policy": policy,
            "slots": {
                str(slot): names.get(digest, f"(unloading {digest[:12]})")
                for slot, digest in self.pool.residents().items()
            },
            "max_loras_per_batch": self.pool.slots,
            "pinned": sorted(reference.name for reference in self.registry if reference.pinned),
            "hits": counters.hits,
            "loads": counters.loads,
            "evictions": counters.evictions,
            "pool_bytes": self.pool.nbytes,
            "cached_adapters": len(self.cache),
            "cached_bytes": self.cache.nbytes,
        }

    def check_integrity(self, held: Mapping[str, int]) -> None:
        self.pool.check_integrity(held)
        self.cache.check_integrity()
        known = {reference.digest for reference in self.registry} | set(held)
        assert set(self.pool.residents().values()) <= known, "a slot is taken by an adapter that nobody knows"

    def close(self) -> None:
        self._readers.shutdown(wait=True, cancel_futures=True)

    # ---------------------------------------------------------------------------------------------

    def _check_pin(self, name: str, digest: str) -> None:
        # What the name stands for now leaves with its replacement.
        pinned = {r.digest for r in self.registry if r.pinned and r.name != name} | {digest}
        if len(pinned) >= self.pool.slots:
            raise AdapterConflictError(
                f"pinning {name!r} would pin {len(pinned)} of {self.pool.slots} slots, and one must stay unpinned; "
                f"unpin another adapter or raise max_loras_per_batch"
            )

    def _update_pins(self) -> None:
        self.pool.pinned = self.registry.pinned_digests()

    def _is_pinned(self, digest: str) -> bool:
        return digest in self.pool.pinned

    def _forget_if_unused(self, digest: str) -> None:
        if self.registry.has_digest(digest):
            return
        self._read_errors.pop(digest, None)
        self.cache.drop(digest)
        if digest in self.pool and not self.pool.held(digest):
            self.pool.remove(digest)

    def _read_ahead(self, reference: AdapterReference) -> None:
        if reference.digest in self._reading or time.monotonic() < self._read_after.get(reference.digest, 0):
            return
        self._reading.add(reference.digest)

        def read() -> None:
            try:
                adapter = self.read_again(reference)
            except AdapterError as error:
                failure = error
            except Exception as error:
                logger.exception("Reading the adapter %r failed.", reference.name)
                failure = AdapterError(f"the adapter {reference.name!r} could not be read: {type(error).__name__}")
            else:
                self._post(lambda: self._read_done(adapter))
                return
            self._post(lambda: self._read_failed(reference.digest, failure))

        self._readers.submit(read)

    def _read_done(self, adapter: HostAdapter) -> None:
        self._reading.discard(adapter.digest)
        self._read_errors.pop(adapter.digest, None)
        if self.registry.has_digest(adapter.digest):
            self.cache.put(adapter, self._is_pinned)

    def _read_failed(self, digest: str, error: AdapterError) -> None:
        self._reading.discard(digest)
        self._read_after[digest] = time.monotonic() + READ_AGAIN_SECONDS
        if self.registry.has_digest(digest):
            self._read_errors[digest] = str(error)
        logger.error("An adapter is not served: %s", error)
        self._on_read_failed(_names(self.registry, digest), error)


def _check_digest(reference: AdapterReference, adapter: HostAdapter) -> None:
    if adapter.digest != reference.digest:
        raise InvalidAdapterError(
            f"the files of the adapter {reference.name!r} in {reference.source} have changed since it was loaded "
            f"(digest {reference.digest[:12]}, now {adapter.digest[:12]}); load it again with replace=True"
        )


def _names(references: Iterable[AdapterReference], digest: str) -> set[str]:
    return {reference.name for reference in references if reference.digest == digest}
