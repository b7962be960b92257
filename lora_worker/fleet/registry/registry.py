"""What the adapter-management tasks do: they change the fleet's registry, and wait for the workers to follow."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from typing import Any

from lora_worker.adapters.reference import AdapterReference, check_name
from lora_worker.adapters.registry import name_is_taken, unknown_adapter, was_not
from lora_worker.adapters.room import PinRoom
from lora_worker.errors import AdapterTimeoutError, EngineStoppedError, InvalidAdapterError
from lora_worker.fleet.registry import decisions
from lora_worker.fleet.registry.leaving import Row
from lora_worker.fleet.registry.own import OwnAdapters
from lora_worker.fleet.registry.pins import check_pin
from lora_worker.fleet.registry.reconciler import Reconciler, Registered
from lora_worker.fleet.registry.report import has_let_go, status_of, worker_name_of
from lora_worker.fleet.registry.store import RegistryStore
from lora_worker.settings import Settings

logger = logging.getLogger(__name__)

LOOK_SECONDS = (0.03, 0.5)  # the first wait for other workers, and the longest
SAY_SECONDS = 30.0


class FleetRegistry:
    """One worker's doors to the registry, for its management threads; each call may block for long.

    Args:
        worker_name: what reports and answers call this worker.
        worker_id: its id in the fleet.
        rows: all requests that are here.
        on_join: called before the first row is let in, again and again while it raises RedisError.
        changed: called on any thread when the worker's report should be written anew; must not block.
    """

    def __init__(
        self,
        store: RegistryStore,
        registered: Registered,
        settings: Settings,
        *,
        worker_name: str,
        worker_id: str,
        rows: Callable[[], Iterable[Row]],
        changed: Callable[[], None],
        on_join: Callable[[], None] = lambda: None,
    ) -> None:
        self._store = store
        self._registered = registered
        self._settings = settings
        self._worker_name = worker_name
        self._worker_id = worker_id
        self._is_ended = False
        self._own_pins = frozenset(entry.lora_name for entry in settings.lora_paths if entry.pinned)
        self._own = OwnAdapters(store, settings, worker_id, on_join=on_join)
        self.reconciler = Reconciler(
            store,
            registered,
            base_name=settings.base_name,
            own_pins=self._own_pins,
            pin_room=PinRoom.of(settings),
            rows=rows,
            own=self._own,
            changed=changed,
        )

    def start(self) -> None:
        self.reconciler.start()

    def stop(self) -> None:
        """After the engine has closed. Calls that wait end with EngineStoppedError, and their tasks go back."""
        self._is_ended = True
        self.reconciler.stop()

    def describe(self) -> dict[str, Any]:
        """What this worker reports to the others."""
        return {
            "worker": self._worker_name,
            "pin_room": PinRoom.of(self._settings),
            "own_pins": sorted(self._own_pins),
            "refused": {name: sentence for name in self._own.refused if (sentence := self._refusal(name))},
            **self.reconciler.describe(),
        }

    def explained(self, name: str | None, outcome: Callable[[], Any]) -> Callable[[], Any]:
        """What a request ends with: where its adapter can't be read here, since this worker's files differ, that."""
        sentence = self._refusal(name) if name is not None else None
        if sentence is None:
            return outcome

        def explain() -> Any:
            try:
                return outcome()
            except InvalidAdapterError as error:
                raise InvalidAdapterError(sentence) from error

        return explain

    def load_lora_adapter(
        self, lora_name: str, lora_path: str, *, pinned: bool = False, replace: bool = False
    ) -> dict[str, Any]:
        """Read and check an adapter here, then register it; with `replace`, return when its old content is gone."""
        if lora_name == self._settings.base_name:
            raise name_is_taken(lora_name)
        reference = self._registered.read(lora_name, lora_path, pinned=pinned)
        if pinned:
            self._check_pin(reference)
        generation = self._store.change(
            [lora_name], lambda entries: decisions.load(entries, reference, replace_content=replace)
        )
        self.reconciler.refresh()
        if replace:
            self._wait_until_all_let_go(lora_name, generation, None)
        return {"lora_name": lora_name, "report": asdict(reference.report), **self._success()}

    def unload_lora_adapter(
        self, lora_name: str, *, force: bool = False, timeout_seconds: float | None = None
    ) -> dict[str, Any]:
        """Take the name off the registry; return when no row runs with it on any worker."""
        pinning = self._pinning_workers(check_name(lora_name))
        self.reconciler.refresh()
        was_loaded = lora_name in self.reconciler.entries
        generation = self._store.change(
            [lora_name], lambda entries: decisions.unload(entries, lora_name, force=force, pinning=pinning)
        )
        self.reconciler.refresh()
        self._wait_until_all_let_go(lora_name, generation, timeout_seconds)
        return self._success(None if was_loaded else was_not(lora_name, "loaded"))

    def pin_lora_adapter(self, lora_name: str) -> dict[str, Any]:
        """Register that every worker is to keep the adapter in a slot; each loads it at once."""
        self.reconciler.refresh()
        entry = self.reconciler.entries.get(check_name(lora_name))
        if entry is None:
            raise unknown_adapter(lora_name, self.reconciler.entries, self._settings.base_name)
        self._check_pin(replace(entry, pinned=True))
        self._store.change([lora_name], lambda entries: decisions.set_pinned(entries, lora_name, pinned=True))
        self.reconciler.refresh()
        return self._success()

    def unpin_lora_adapter(self, lora_name: str) -> dict[str, Any]:
        """Let the adapter be evicted again, but on workers whose settings pin it."""
        self.reconciler.refresh()
        entry = self.reconciler.entries.get(check_name(lora_name))
        self._store.change([lora_name], lambda entries: decisions.set_pinned(entries, lora_name, pinned=False))
        self.reconciler.refresh()
        pinning = self._pinning_workers(lora_name)
        if pinning:
            return self._success(f"the settings of {', '.join(pinning)} go on pinning {lora_name!r} there")
        was_pinned = entry is not None and entry.pinned
        return self._success(None if was_pinned else was_not(lora_name, "pinned"))

    def list_lora_adapters(self) -> dict[str, Any]:
        """Every registered adapter, and by each worker's own report where its weights are."""
        self.reconciler.refresh()
        own = {**self.describe(), "adapters": self._registered.here()}
        reports = [*self._reports(own).values()]
        return {name: status_of(entry, reports) for name, entry in sorted(self.reconciler.entries.items())}

    # ---------------------------------------------------------------------------------------------

    def _success(self, message: str | None = None) -> dict[str, Any]:
        loaded = {name: entry.source for name, entry in sorted(self.reconciler.entries.items())}
        return {"success": True, "loaded_adapters": loaded, **({"message": message} if message else {})}

    def _refusal(self, name: str) -> str | None:
        """What is wrong with this worker's files of a name, while what they differ from is registered."""
        digest, sentence = self._own.refused.get(name, ("", ""))
        entry = self.reconciler.entries.get(name)
        return sentence if entry is not None and entry.digest == digest else None

    def _reports(self, own: dict[str, Any]) -> dict[str, dict[str, Any]]:
        """What the workers last said of themselves; `own` is what this one says now."""
        return {**self._store.reports(), self._worker_id: own}

    def _pinning_workers(self, name: str) -> list[str]:
        reports = self._reports(self.describe())
        return sorted(worker_name_of(w, report) for w, report in reports.items() if name in report.get("own_pins", []))

    def _check_pin(self, reference: AdapterReference) -> None:
        self.reconciler.refresh()
        references = {**self.reconciler.entries, reference.name: reference}.values()
        for worker_id, report in self._reports(self.describe()).items():
            if "pin_room" in report:
                worker = worker_name_of(worker_id, report)
                room = PinRoom(*report["pin_room"])
                check_pin(reference.name, references, report["own_pins"], room, worker=worker)

    def _wait_until_all_let_go(self, name: str, generation: int, timeout_seconds: float | None) -> None:
        """Until no worker can answer with what the name stood for before that generation."""
        started = said = time.monotonic()
        pause, longest = LOOK_SECONDS
        while waiting := self._waiting_for(name, generation):
            now = time.monotonic()
            if self._is_ended:
                raise EngineStoppedError("the worker stops before all workers have confirmed")
            if timeout_seconds is not None and now - started > timeout_seconds:
                raise AdapterTimeoutError(
                    f"the registry has changed, but rows with the former content of {name!r} still run after "
                    f"{timeout_seconds} s, or may, on {', '.join(waiting)}; they end in time, and no more start"
                )
            if now - said > SAY_SECONDS:
                said = now
                logger.info("Still waiting for %s to let go of the adapter %r.", ", ".join(waiting), name)
            time.sleep(pause)
            pause = min(2 * pause, longest)

    def _waiting_for(self, name: str, generation: int) -> list[str]:
        reports = self._reports(self.reconciler.describe())
        return sorted(worker_name_of(w, r) for w, r in reports.items() if not has_let_go(r, name, generation))
