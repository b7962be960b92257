"""Keeps a worker's engine with the fleet's registry.

Every claim brings the registry's generation along. Rows that were claimed with a newer one than the engine has applied
wait here until it has caught up, and so does a row for a name that it doesn't know; each then goes to the engine, which
starts or refuses it. Redis is asked on this module's own thread alone, never on Celery's loop.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, Protocol

from redis.exceptions import RedisError

from lora_worker.adapters.reference import AdapterReference
from lora_worker.adapters.room import PinRoom
from lora_worker.errors import EngineStoppedError
from lora_worker.fleet.registry.leaving import Leaving, Row
from lora_worker.fleet.registry.own import OwnAdapters
from lora_worker.fleet.registry.pins import pinned_here
from lora_worker.fleet.registry.store import Changes, RegistryStore

logger = logging.getLogger(__name__)

RETRY_SECONDS = (0.2, 5.0)  # the first wait while Redis is away, and the longest
LOOK_SECONDS = 2.0


class Registered(Protocol):
    """`lora_worker.engine.registered.RegisteredAdapters`, or what stands in for it."""

    def references(self) -> dict[str, AdapterReference]: ...

    def read(self, lora_name: str, lora_path: str, *, pinned: bool) -> AdapterReference: ...

    def apply(self, changes: Mapping[str, AdapterReference | None]) -> None: ...

    def here(self) -> dict[str, dict[str, Any]]: ...


class Reconciler:
    """The thread, and what this worker has applied.

    Args:
        rows: all that are here.
        own: registers what this worker's settings name at the start, and what is known here where Redis has come back
            without it.
        own_pins: names that the worker's settings pin.
        changed: called on any thread when what `describe` says has changed; must not block.
    """

    def __init__(
        self,
        store: RegistryStore,
        registered: Registered,
        *,
        base_name: str,
        own_pins: frozenset[str],
        pin_room: PinRoom,
        rows: Callable[[], Iterable[Row]],
        own: OwnAdapters,
        changed: Callable[[], None],
    ) -> None:
        self.entries: dict[str, AdapterReference] = {}
        self.here: dict[str, dict[str, Any]] = {}
        self.pinned: frozenset[str] = frozenset()
        self._store = store
        self._registered = registered
        self._base_name = base_name
        self._own_pins = own_pins
        self._pin_room = pin_room
        self.leaving = Leaving(rows, changed)
        self._own = own
        self._changed = changed
        self._has_joined = False
        self._left_out: set[str] = set()
        self._applied = 0
        self._epoch = ""
        self._seen = 0  # the newest generation that a claim or beat has brought
        self._held: list[Callable[[], None]] = []
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._applying = threading.Lock()
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="registry", daemon=True)

    @property
    def generation(self) -> int:
        """The registry's, as far as the engine has applied it."""
        return self._applied

    def describe(self) -> dict[str, Any]:
        """The registry's part of what this worker reports."""
        return {
            "generation": self._applied,
            "leaving": self.leaving.names(),
            "pinned": sorted(self.pinned),
            "adapters": self.here,
        }

    def start(self) -> None:
        self._wake.set()
        self._thread.start()

    def stop(self) -> None:
        """End the thread; what waits goes to the engine, which has stopped and says so."""
        self._ended.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join()
        self._let_go(self._held)

    def on_generation(self, generation: int) -> None:
        """What a claim or a beat has found; never blocks."""
        if generation != self._applied:
            with self._lock:
                self._seen = max(self._seen, generation)
            self._wake.set()

    def admit(self, name: Any, go_on: Callable[[], None]) -> None:
        """Call `go_on` when all that is known to have changed is applied, and the name looked up if it is unknown.

        At once, on the caller's thread, as a rule. Rows keep their order.
        """
        with self._lock:
            is_current = self._has_joined and self._seen <= self._applied
            is_known = not isinstance(name, str) or name == self._base_name or name in self.entries
            if not self._ended.is_set() and not (is_current and is_known and not self._held):
                self._held.append(go_on)
                self._wake.set()
                return
        go_on()

    def refresh(self) -> None:
        """Apply what has changed in Redis; any thread; raises RedisError."""
        with self._applying:
            if not self._has_joined:
                self._own.join(self._registered.references())
                self._has_joined = True
            self._own.look_again()
            changes = self._store.changes_since(self._applied)
            # Whoever was first may have registered something by now: its number says nothing, its epoch does.
            if self._applied > 0 and (changes.generation == 0 or changes.epoch != self._epoch):
                logger.warning("Redis has come back without the registry of adapters; what is known here is kept.")
                self._own.restore(self.entries)
                changes = self._store.changes_since(0)
            if (changes.generation, changes.epoch) != (self._applied, self._epoch):
                self._apply(changes)

    # ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        wait, longest = RETRY_SECONDS
        while not self._ended.is_set():
            self._wake.wait(LOOK_SECONDS)
            self._wake.clear()
            with self._lock:
                seen, held, self._held = self._seen, self._held, []
            try:
                self.refresh()
                self.here = self._registered.here()
            except Exception as error:
                self._say(error, len(held))
                with self._lock:
                    self._held = held + self._held
                self._ended.wait(wait)
                wait = min(2 * wait, longest)
                self._wake.set()
                continue
            wait = RETRY_SECONDS[0]
            with self._lock:
                if self._seen == seen > self._applied:
                    self._seen = self._applied  # Redis came back with less than it had
            self._let_go(held)

    def _let_go(self, held: Iterable[Callable[[], None]]) -> None:
        for go_on in held:
            try:
                go_on()
            except Exception:
                logger.exception("A row that waited for the registry could not be given to the engine.")

    def _say(self, error: Exception, waiting: int) -> None:
        if isinstance(error, RedisError):
            logger.warning("The registry could not be read or written (%s); %d rows wait for it.", error, waiting)
        elif not isinstance(error, EngineStoppedError):
            logger.error("The registry could not be followed; %d rows wait for it.", waiting, exc_info=error)

    def _apply(self, changes: Changes) -> None:
        kept = {} if changes.is_whole else {n: e for n, e in self.entries.items() if n not in changes.gone}
        entries = {name: entry for name, entry in {**kept, **changes.entries}.items() if name != self._base_name}
        pinned, left_out = pinned_here(entries.values(), self._own_pins, self._pin_room)
        if left_out - self._left_out:
            logger.error(
                "Not pinned here, since a slot and room for the greatest rank must stay unpinned: %s",
                ", ".join(sorted(left_out)),
            )
        known = self._registered.references()
        touched = changes.entries.keys() | changes.gone | (pinned ^ self.pinned)
        wanted: dict[str, AdapterReference | None] = {}
        for name in known.keys() | entries.keys() if changes.is_whole else touched:
            reference = self._wanted(name, entries.get(name), is_pinned=name in pinned)
            if reference != known.get(name):
                wanted[name] = reference
        self._registered.apply(wanted)
        left = [name for name in wanted.keys() & known.keys() if _digest(wanted[name]) != known[name].digest]
        self.leaving.note(left, changes.generation)
        self.entries, self.pinned, self._left_out = entries, frozenset(pinned), left_out
        self._applied, self._epoch = changes.generation, changes.epoch
        self._changed()

    def _wanted(self, name: str, entry: AdapterReference | None, *, is_pinned: bool) -> AdapterReference | None:
        """What the engine is to have of a name."""
        if entry is None:
            return None
        # Files that this worker's settings name are read from there, if their content is what is registered.
        named = self._own.named.get(name)
        return replace(named if named and named.digest == entry.digest else entry, pinned=is_pinned)


def _digest(reference: AdapterReference | None) -> str | None:
    return reference.digest if reference is not None else None
