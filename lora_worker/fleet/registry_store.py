"""The fleet's adapters as Redis has them: a hash by name, and a number that every change raises.

A change reads what it depends on and writes under WATCH, so of two at once the second sees the first. The number starts
at the time in milliseconds, so that it goes on rising where Redis has come back without its data.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, fields
from typing import Any, NamedTuple

from redis import Redis
from redis.client import Pipeline

from lora_worker.adapters.reference import AdapterReference, LoadReport, check_name
from lora_worker.errors import InvalidAdapterError

logger = logging.getLogger(__name__)


class Entry(NamedTuple):
    """A registered adapter, and the number of the change that gave it this content."""

    reference: AdapterReference
    generation: int


# What a change reads: the entries of the names it asked for, as far as there are any.
Entries = Mapping[str, Entry]


class Changes(NamedTuple):
    """The registry after some generation: what was registered or changed since, and which names went."""

    generation: int
    entries: dict[str, Entry]
    gone: set[str]
    is_whole: bool  # all of the registry, and not what has changed alone


class RegistryStore:
    """Any thread may use it; raises RedisError where Redis doesn't answer.

    Args:
        prefix: the setting `queue_prefix`; the keys are `PREFIX:registry`, `PREFIX:registry:generation` and
            `PREFIX:registry:changes`, a sorted set of the names by their last change.
    """

    def __init__(self, redis: Redis, prefix: str) -> None:
        self._redis = redis
        self._hash = f"{prefix}:registry"
        self._generation = f"{prefix}:registry:generation"
        self._changes = f"{prefix}:registry:changes"

    def generation(self) -> int:
        """The number of the last change; 0 where there is no registry."""
        return int(self._redis.get(self._generation) or 0)

    def names(self) -> set[str]:
        return {name.decode() for name in self._redis.hkeys(self._hash)}

    def get(self, name: str) -> Entry | None:
        return _entry(name, self._redis.hget(self._hash, name))

    def changes_since(self, generation: int) -> Changes:
        """What has changed since then; all there is, where Redis knows less than that."""
        with self._redis.pipeline() as pipe:
            pipe.get(self._generation)
            pipe.zrangebyscore(self._changes, f"({generation}", "+inf")
            now, changed = pipe.execute()
            if int(now or 0) < generation or generation == 0:
                return self._all()
            if not changed:
                return Changes(int(now or 0), {}, set(), is_whole=False)
            # Entries may be newer than `now` by now; the next call then gives them again.
            values = self._redis.hmget(self._hash, changed)
        names = [name.decode() for name in changed]
        found = {name: _entry(name, value) for name, value in zip(names, values, strict=True)}
        entries = {name: entry for name, entry in found.items() if entry is not None}
        return Changes(int(now or 0), entries, set(names) - set(entries), is_whole=False)

    def change(
        self, names: Collection[str], decide: Callable[[Entries], Mapping[str, AdapterReference | None]]
    ) -> int:
        """Write what `decide` makes of the entries of these names, None to remove one; returns the generation.

        `decide` may be called more than once, and what it raises is raised. A change that only pins or unpins keeps the
        entry's own generation.
        """

        def run(pipe: Pipeline) -> int:
            found = {name: _entry(name, value) for name, value in self._read(pipe, names)}
            now = int(pipe.get(self._generation) or 0)
            before = {name: entry for name, entry in found.items() if entry is not None}
            changes = decide(before)
            pipe.multi()
            if not changes:
                return now
            after = now + 1 if now else int(time.time() * 1000)
            pipe.set(self._generation, after)
            for name, reference in changes.items():
                pipe.zadd(self._changes, {name: after})
                if reference is None:
                    pipe.hdel(self._hash, name)
                    continue
                known = before.get(name)
                is_same = known is not None and known.reference.digest == reference.digest
                own = known.generation if known is not None and is_same else after
                pipe.hset(self._hash, name, json.dumps({**asdict(reference), "generation": own}))
            return after

        return int(
            self._redis.transaction(run, self._hash, self._generation, value_from_callable=True)  # type: ignore[no-untyped-call]
        )

    def _read(self, pipe: Pipeline, names: Collection[str]) -> list[tuple[str, Any]]:
        return list(zip(names, pipe.hmget(self._hash, list(names)), strict=True)) if names else []

    def _all(self) -> Changes:
        with self._redis.pipeline() as pipe:
            pipe.get(self._generation)
            pipe.hgetall(self._hash)
            now, values = pipe.execute()
        found = {name.decode(): _entry(name.decode(), value) for name, value in values.items()}
        entries = {name: entry for name, entry in found.items() if entry is not None}
        return Changes(int(now or 0), entries, set(), is_whole=True)


def _entry(name: str, value: bytes | None) -> Entry | None:
    """An entry as Redis has it; one that this version can't read is left out, and said."""
    if value is None:
        return None
    try:
        found = json.loads(value)
        report = LoadReport(**_known(LoadReport, found["report"]))
        # Only what lies under this worker's own roots is read, whatever Redis says.
        lora_path = str(found.get("lora_path") or found["source"])
        values = {**_known(AdapterReference, found), "report": report, "lora_path": lora_path}
        return Entry(AdapterReference(**{**values, "name": check_name(name)}), int(found["generation"]))
    except (ValueError, KeyError, TypeError, InvalidAdapterError) as error:
        logger.error("The entry of the adapter %r in the registry cannot be read, and is left out: %r", name, error)
        return None


def _known(kind: type, values: dict[str, Any]) -> dict[str, Any]:
    # Workers of two versions may share a registry for the time of an upgrade.
    names = {field.name for field in fields(kind)}
    return {name: value for name, value in values.items() if name in names}
