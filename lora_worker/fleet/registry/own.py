"""What a worker brings into the registry: at its start what its settings name, and later what Redis has lost."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

from lora_worker.adapters.reference import AdapterReference
from lora_worker.adapters.source import portable_path
from lora_worker.fleet.living import Leases
from lora_worker.fleet.registry import decisions
from lora_worker.fleet.registry.store import Decision, Entries, RegistryStore
from lora_worker.settings import Settings

logger = logging.getLogger(__name__)


class OwnAdapters:
    """One worker's; the reconciler alone calls what asks Redis, which raises RedisError.

    Args:
        on_join: called before the first look at the registry.
    """

    def __init__(
        self, store: RegistryStore, settings: Settings, worker_id: str, *, on_join: Callable[[], None]
    ) -> None:
        # As the engine has loaded them at its start, by name.
        self.named: dict[str, AdapterReference] = {}
        # By name: the digest that is registered, and what is wrong with this worker's files.
        self.refused: dict[str, tuple[str, str]] = {}
        self._store = store
        self._settings = settings
        self._worker_id = worker_id
        self._on_join = on_join
        # The leases of the other workers at the start, while it is open whether one of them lives.
        self._found: Leases | None = None

    def join(self, named: dict[str, AdapterReference]) -> None:
        """Register what the settings name; those of a worker that starts with nobody else there are wanted now."""
        self._on_join()
        self.named = named
        found = self._store.leases(but=self._worker_id)
        self._register(self._of_settings(), replace_content=not found.living)
        self._found = found if self.refused else None

    def look_again(self) -> None:
        """A worker that was killed and started again finds the lease that it had before: it is alone when that ends."""
        if self._found is None:
            return
        now = self._store.leases(but=self._worker_id)
        if any(until > self._found.until.get(worker_id, 0.0) for worker_id, until in now.until.items()):
            self._found = None  # one has renewed its lease, or is new
        elif not now.living:
            logger.info("The workers that were there at the start are dead; what the settings name is registered.")
            self._register(self._of_settings(), replace_content=True)
            self._found = None

    def restore(self, entries: Entries) -> None:
        """Register what was known before Redis came back without it."""
        self._register(entries.values(), replace_content=False)

    def _register(self, references: Iterable[AdapterReference], *, replace_content: bool) -> None:
        wanted = list(references)
        restored = decisions.Restored({}, {}, [])

        def decide(found: Entries) -> Decision:
            nonlocal restored
            restored = decisions.restore(found, wanted, replace_content=replace_content)
            self.refused = {name: (found[name].digest, sentence) for name, sentence in restored.refused.items()}
            return restored.decision

        self._store.change([reference.name for reference in wanted], decide)
        for sentence in restored.refused.values():
            logger.error("An adapter is not served here: %s", sentence)
        for sentence in restored.passed_over:
            logger.warning("%s", sentence)

    def _of_settings(self) -> list[AdapterReference]:
        """As other workers may find them; pins of settings are no one else's."""
        paths = {entry.lora_name: entry.lora_path for entry in self._settings.lora_paths}
        roots = self._settings.adapter_roots
        return [
            replace(
                found,
                pinned=False,
                by_settings=True,
                lora_path=portable_path(paths.get(name), Path(found.source), roots),
            )
            for name, found in self.named.items()
        ]
