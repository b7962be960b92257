"""The fleet's adapters as Redis has them: a hash by name, and a number that every change raises.

A change reads what it depends on and writes under WATCH, so of two at once the second sees the first. The number is the
time in milliseconds or more, so that it goes on rising where Redis has come back without its data, or with older data.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict, fields
from typing import Any, NamedTuple
from uuid import uuid4

from redis import Redis
from redis.client import Pipeline

from lora_worker.adapters.reference import AdapterReference, LoadReport, check_name
from lora_worker.errors import InvalidAdapterError
from lora_worker.fleet.connection import script
from lora_worker.fleet.keys import Keys
from lora_worker.fleet.living import Leases, read_leases

logger = logging.getLogger(__name__)

# So many changes are remembered at least; who has missed more reads the whole registry.
KEPT_CHANGES = 1000
EPOCH, FLOOR = "registry", "registry_floor"  # fields of the fleet's hash

# What a change reads: those of the names it asked for that are registered.
Entries = Mapping[str, AdapterReference]
# What it writes: an entry's new content, or None to remove it.
Decision = dict[str, AdapterReference | None]


class Changes(NamedTuple):
    """The registry after some generation: what was registered or changed since, and which names went.

    `epoch` is another where Redis had lost the registry in between.
    """

    generation: int
    entries: dict[str, AdapterReference]
    gone: set[str]
    is_whole: bool  # all of the registry, and not what has changed alone
    epoch: str


class RegistryStore:
    """Any thread may use it; raises RedisError where Redis doesn't answer."""

    def __init__(self, redis: Redis, keys: Keys) -> None:
        self._redis = redis
        self._keys = keys
        self._write = script("register")
        self._hash, self._generation, self._changes = keys.registry, keys.generation, keys.registry_changes
        self._fleet = keys.fleet

    def generation(self) -> int:
        """The number of the last change; 0 where there is no registry."""
        return int(self._redis.get(self._generation) or 0)

    def reports(self) -> dict[str, dict[str, Any]]:
        """What the workers last said of themselves, by id; a dead one is among them until all it had is restored."""
        found: list[Any] = self._redis.zrange(self._keys.workers, 0, -1)
        workers = [worker.decode() for worker in found]
        with self._redis.pipeline(transaction=False) as pipe:
            for worker in workers:
                pipe.hget(self._keys.worker(worker), "report")
            return {worker: json.loads(report or "{}") for worker, report in zip(workers, pipe.execute(), strict=True)}

    def leases(self, *, but: str) -> Leases:
        """Of all workers but one."""
        found = read_leases(self._redis, self._keys)
        return Leases({worker: end for worker, end in found.until.items() if worker != but}, found.living - {but})

    def changes_since(self, generation: int) -> Changes:
        """What has changed since then; all there is, where Redis knows less than that, or no longer so far back."""
        with self._redis.pipeline() as pipe:
            pipe.get(self._generation)
            pipe.hmget(self._fleet, EPOCH, FLOOR)
            pipe.zrangebyscore(self._changes, f"({generation}", "+inf")
            now, (epoch, floor), changed = pipe.execute()
            if int(now or 0) < generation or generation < int(floor or 0) or generation == 0:
                return self._all()
            if not changed:
                return Changes(int(now or 0), {}, set(), is_whole=False, epoch=_text(epoch))
            # Entries may be newer than `now` by now; the next call then gives them again.
            values: list[Any] = self._redis.hmget(self._hash, changed)
        names = [name.decode() for name in changed]
        entries = _entries(names, values)
        return Changes(int(now or 0), entries, set(names) - set(entries), is_whole=False, epoch=_text(epoch))

    def change(self, names: Collection[str], decide: Callable[[Entries], Decision]) -> int:
        """Write what `decide` makes of the entries of these names; returns the generation.

        `decide` may be called more than once, and what it raises is raised.
        """

        def run(pipe: Pipeline) -> int:
            found = pipe.hmget(self._hash, list(names)) if names else []
            now = int(pipe.get(self._generation) or 0)
            changes = decide(_entries(names, found))
            pipe.multi()
            if not changes:
                return now
            after = max(now + 1, int(time.time() * 1000))
            values = {name: "" if r is None else json.dumps(asdict(r)) for name, r in changes.items()}
            keys = (self._hash, self._changes, self._generation, self._fleet)
            words = [word for item in values.items() for word in item]
            pipe.eval(self._write, len(keys), *keys, after, uuid4().hex, KEPT_CHANGES, *words)
            return after

        transaction: Any = self._redis.transaction  # typed as if it returned the commands' answers
        return int(transaction(run, self._hash, self._generation, value_from_callable=True))

    def _all(self) -> Changes:
        with self._redis.pipeline() as pipe:
            pipe.get(self._generation)
            pipe.hget(self._fleet, EPOCH)
            pipe.hgetall(self._hash)
            now, epoch, values = pipe.execute()
        entries = _entries([name.decode() for name in values], list(values.values()))
        return Changes(int(now or 0), entries, set(), is_whole=True, epoch=_text(epoch))


def _text(value: bytes | None) -> str:
    return (value or b"").decode()


def _entries(names: Iterable[str], values: list[Any]) -> dict[str, AdapterReference]:
    """What Redis has under these names; an entry that this version can't read is left out, and said."""
    entries = {}
    for name, value in zip(names, values, strict=True):
        try:
            if value is not None:
                entries[name] = _reference(check_name(name), json.loads(value))
        except (ValueError, KeyError, TypeError, InvalidAdapterError) as error:
            logger.error("The adapter %r in the registry cannot be understood, and is left out: %r", name, error)
    return entries


def _reference(name: str, found: dict[str, Any]) -> AdapterReference:
    report = LoadReport(**_known(LoadReport, found["report"]))
    # With a `lora_path`, files are read from under this worker's own roots alone, whatever Redis says.
    own = {"name": name, "report": report, "lora_path": str(found.get("lora_path") or found["source"])}
    return AdapterReference(**_known(AdapterReference, found) | own)


def _known(kind: type, values: dict[str, Any]) -> dict[str, Any]:
    # Workers of two versions may share a registry for the time of an upgrade.
    names = {field.name for field in fields(kind)}
    return {name: value for name, value in values.items() if name in names}
