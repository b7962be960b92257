"""Keeps a worker's engine with the fleet's registry.

Every claim brings the registry's generation along. Rows that were claimed with a newer one than the engine has applied
wait here until it has caught up, and so does a row for a name that it doesn't know; each then goes to the engine, which
starts or refuses it. Redis is asked on this module's own thread alone, never on Celery's loop.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, Protocol

from redis.exceptions import RedisError

from lora_worker.adapters.reference import AdapterReference
from lora_worker.errors import EngineStoppedError
from lora_worker.fleet.pins import pinned_here
from lora_worker.fleet.registry_store import Changes, Entry, RegistryStore

logger = logging.getLogger(__name__)

RETRY_SECONDS = 0.5


class Registered(Protocol):
    """`lora_worker.engine.registered.RegisteredAdapters`, or what stands in for it."""

    def references(self) -> dict[str, AdapterReference]: ...

    def read(self, lora_name: str, lora_path: str, *, pinned: bool) -> AdapterReference: ...

    def apply(self, changes: Mapping[str, AdapterReference | None]) -> dict[str, Future[None]]: ...

    def here(self) -> dict[str, dict[str, Any]]: ...


class Reconciler:
    """The thread, and what this worker has applied.

    Args:
        base_name: no adapter may have this name.
        own_pins: names that the worker's settings pin.
        changed: called on any thread when what `report` says has changed; must not block.
        lost: called on the thread where Redis has come back without a registry, after there was one.
    """

    def __init__(
        self,
        store: RegistryStore,
        registered: Registered,
        *,
        base_name: str,
        own_pins: Collection[str],
        slots: int,
        changed: Callable[[], None],
        lost: Callable[[], None],
    ) -> None:
        self._store = store
        self._registered = registered
        self._base_name = base_name
        self._own_pins = own_pins
        self._slots = slots
        self._changed = changed
        self._lost = lost
        self._entries: dict[str, Entry] = {}
        self._leaving: Counter[str] = Counter()
        self._unpinned: set[str] = set()
        self._applied = 0
        self._is_behind = False
        self._held: list[Callable[[], None]] = []
        self._is_ended = False
        self._lock = threading.Lock()
        self._applying = threading.Lock()
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="registry", daemon=True)

    @property
    def generation(self) -> int:
        """The registry's generation that the engine has applied."""
        return self._applied

    @property
    def leaving(self) -> list[str]:
        """Names with rows that still run with content which was unloaded or replaced."""
        return sorted(+self._leaving)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread; what waits goes to the engine, which has stopped and says so."""
        self._is_ended = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join()
        for go_on in self._take_held():
            go_on()

    def on_generation(self, generation: int) -> None:
        """What a claim or a beat found; never blocks."""
        if generation == self._applied:
            return
        # A beat or claim may also be older than what is applied; to look is cheap.
        self._is_behind = self._is_behind or generation > self._applied
        self._wake.set()

    def admit(self, name: Any, go_on: Callable[[], None]) -> None:
        """Call `go_on` as soon as the engine has applied what is known to have changed, and knows the name if anyone does.

        At once, on this thread, as a rule. Rows of one name stay in order.
        """
        with self._lock:
            must_wait = self._is_behind or bool(self._held) or not self._knows(name)
            if must_wait and not self._is_ended:
                self._held.append(go_on)
                self._wake.set()
                return
        go_on()

    def refresh(self) -> None:
        """Apply what has changed in Redis; raises RedisError."""
        with self._applying:
            changes = self._store.changes_since(self._applied)
            if changes.generation == self._applied and not changes.is_whole:
                return
            if changes.generation == 0 and self._applied > 0:
                self._lost()
                changes = self._store.changes_since(0)
            self._apply(changes)

    # ---------------------------------------------------------------------------------------------

    def _knows(self, name: Any) -> bool:
        return not isinstance(name, str) or name == self._base_name or name in self._entries

    def _run(self) -> None:
        while not self._is_ended:
            self._wake.wait()
            self._wake.clear()
            with self._lock:
                was_behind, self._is_behind = self._is_behind, False
            held = self._take_held()
            try:
                self.refresh()
            except Exception as error:
                if isinstance(error, EngineStoppedError):
                    pass
                elif isinstance(error, RedisError):
                    logger.warning("Redis is away (%s); %d rows wait for the registry.", error, len(held))
                else:
                    logger.exception("The registry could not be followed; %d rows wait for it.", len(held))
                with self._lock:
                    self._is_behind = self._is_behind or was_behind
                    self._held = held + self._held
                self._again_soon()
                continue
            for go_on in held:
                go_on()
