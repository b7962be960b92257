"""This worker's membership of the fleet: its id, lease, messages in hand, and what it knows of the others."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any, NamedTuple
from uuid import uuid4

from redis.exceptions import RedisError

from lora_worker.errors import SettingsError
from lora_worker.fleet.claiming.claimer import Claimer
from lora_worker.fleet.connection import check_server, connect, tags_under
from lora_worker.fleet.keys import Keys
from lora_worker.fleet.living import read_leases
from lora_worker.fleet.members import Members
from lora_worker.fleet.membership.lease import Beat, Lease
from lora_worker.fleet.membership.steward import Steward
from lora_worker.fleet.membership.unacknowledged import Unacknowledged
from lora_worker.fleet.routing import node_of
from lora_worker.settings import Settings

logger = logging.getLogger(__name__)

SHORTEST_TIMEOUT_SECONDS, LONGEST_TIMEOUT_SECONDS = 0.5, 5.0
STEWARD_TIMEOUT_SECONDS = 5.0
LEAVE_SECONDS = 5.0
CERTAINTY_LOOK_SECONDS = 0.05
REFUSAL_SAY_SECONDS = 30.0


class Held(NamedTuple):
    """How Redis knows whether a message is still this worker's: its tag under `unacked`, at this epoch of `fleet`."""

    unacked: str
    tag: str
    fleet: str
    epoch: str


class FleetMember:
    """Joins when the engine is ready and leaves when it has closed.

    `on_generation` is called with the registry's generation: on Celery's loop before messages of a claim are delivered,
    and on the lease's thread with every beat. `descriptions` are functions whose dictionaries make up the report that
    peers see. `on_foreign` gets the tags of messages that peers have restored while this worker went on with them.
    """

    def __init__(self, settings: Settings, nodename: str) -> None:
        self.settings = settings
        self.keys = Keys(settings.queue_prefix, settings.partitions)
        self.worker_id = f"{nodename}:{uuid4().hex[:12]}"
        self.on_generation: Callable[[int], None] = lambda _: None
        self.on_foreign: Callable[[set[str]], None] = lambda _: None
        self.on_refused: Callable[[str], None] = lambda _: None
        # For what may have to wait for Redis: runs a function on a thread of the pool's.
        self.run_later: Callable[[Callable[[], None]], None] = lambda function: function()
        # The tags of messages that something here works on; what else is in hand goes back when a connection breaks.
        self.worked_on: Callable[[], set[str]] = set
        self.claimer: Claimer | None = None
        self.descriptions: list[Callable[[], dict[str, Any]]] = []
        lease_timeout = min(max(settings.lease_seconds / 5, SHORTEST_TIMEOUT_SECONDS), LONGEST_TIMEOUT_SECONDS)
        self._lease_redis = connect(settings.redis_url, timeout_seconds=lease_timeout, is_single=True)
        self._redis = connect(settings.redis_url, timeout_seconds=STEWARD_TIMEOUT_SECONDS)
        self.engine_redis = connect(settings.redis_url, timeout_seconds=SHORTEST_TIMEOUT_SECONDS)
        self.unacknowledged = Unacknowledged(self._redis, self.keys, self.worker_id)
        self.lease = Lease(
            self._lease_redis,
            self.keys,
            self.worker_id,
            settings.lease_seconds,
            on_doubt=self._find_foreign,
            on_lost=self.unacknowledged.note_lost,
            on_beat=self._on_beat,
        )
        self.steward = Steward(
            self._redis, self.keys, self.worker_id, describe=self._describe, dead=lambda: self.lease.dead
        )
        self._has_joined = False
        self._is_checked = False
        self._refusal_said_at = -REFUSAL_SAY_SECONDS

    def check(self) -> None:
        """Raise SettingsError where the server or the fleet on it is none for this worker; RedisError if it is away."""
        check_server(self._lease_redis)
        found = self._lease_redis.hget(self.keys.fleet, "partitions")
        if found is not None:
            self._check_partitions(int(found))
        self._is_checked = True

    def check_name(self) -> None:
        """Raise SettingsError where another living worker has this one's node name; waits while that may be a dead one.

        Workers rank themselves for partitions by that name, so of two that share it one would get none.
        """
        node = node_of(self.worker_id)
        first = self._leases_of(node)
        if first:
            logger.warning("A worker called %s has a lease; waiting until that has ended, or is renewed.", node)
        while leases := self._leases_of(node):
            if any(ends_at != first.get(worker_id) for worker_id, ends_at in leases.items()):
                raise SettingsError(
                    f"another worker of this fleet is called {node}; start each with a name of its own, as -n gpu0@%h"
                )
            time.sleep(CERTAINTY_LOOK_SECONDS)

    def join(self) -> None:
        self.unacknowledged.start()
        self.steward.start()
        self.lease.start()
        self._has_joined = True

    def leave(self) -> None:
        """Settle what is left, give back what is in hand, end the lease. With Redis away, peers do it in time."""
        if not self._has_joined:
            return
        self._has_joined = False
        is_settled = self.unacknowledged.flush(LEAVE_SECONDS)
        self.unacknowledged.stop()
        self.steward.stop()
        self.lease.stop()
        try:
            count = self.steward.restore(self.worker_id, "leaving")
            logger.info("Left the fleet; %d messages went back to their queues.", count or 0)
        except RedisError as error:
            logger.warning("Redis is away (%s); peers restore this worker's messages in time.", error)
        if not is_settled:
            logger.warning("Some acknowledgements could not be written; those tasks run again.")

    @property
    def queues(self) -> list[str]:
        """All that this worker may claim from."""
        return [*self.keys.queues, self.keys.direct(self.worker_id)]

    @property
    def members(self) -> Members | None:
        """Who lives, as of the last look; None before the first."""
        members = self.steward.members
        return members if members and self.worker_id in members.ids else None

    def note_fleet(self, version: int, generation: int) -> None:
        """What a claim tells of the fleet, before its messages are delivered."""
        members = self.steward.members
        if members is None or version != members.version:
            self.steward.wake()
        self.on_generation(generation)

    def note_refusal(self, error: RedisError) -> None:
        """Redis answers, and refuses what the worker can't do without. Called once a second, says it less often."""
        now = time.monotonic()
        if now >= self._refusal_said_at + REFUSAL_SAY_SECONDS:
            self._refusal_said_at = now
            logger.error("Redis refuses to give out messages (%s); this worker goes on asking each second.", error)

    def report_now(self) -> None:
        """Have the report written at once instead of within a second."""
        self.steward.wake()

    def is_own(self, tag: str, is_stopping: Callable[[], bool]) -> bool:
        """Whether a message is still this worker's; waits until the lease is certain, or the worker stops."""
        while not self.lease.is_certain and not is_stopping():
            time.sleep(CERTAINTY_LOOK_SECONDS)
        return tag in self.unacknowledged

    def held(self, tag: str) -> Held | None:
        """By what Redis is asked whether the message is still this worker's; None where Redis has lost it."""
        if self.unacknowledged.is_lost(tag):
            return None
        return Held(self.keys.unacked(self.worker_id), tag, self.keys.fleet, self.lease.epoch)

    def give_back_unworked(self) -> None:
        """Celery has lost its connection, and with it what it kept for later (tasks with an ETA)."""
        worked_on = self.worked_on()
        for tag in self.unacknowledged.in_hand() - worked_on:
            self.unacknowledged.give_back(tag)

    def give_back_unknown(self) -> None:
        """What is under this worker's key in Redis and not in its hands; raises RedisError."""
        recorded = tags_under(self._redis, self.keys.unacked(self.worker_id))
        unknown = recorded - self.unacknowledged.tags()
        for tag in unknown:
            self.unacknowledged.give_back(tag, is_unknown=True)
        if unknown:
            logger.warning("%d messages had got lost on their way from Redis, and went back.", len(unknown))

    def _leases_of(self, node: str) -> dict[str, float]:
        """The workers of this node name whose leases have not ended, and when they will."""
        leases = read_leases(self._redis, self.keys)
        return {worker: leases.until[worker] for worker in leases.living if node_of(worker) == node}

    def _find_foreign(self) -> None:
        held = self.unacknowledged.tags()
        here = tags_under(self._lease_redis, self.keys.unacked(self.worker_id))
        foreign = {tag for tag in held - here if not self.unacknowledged.is_lost(tag)}
        self.unacknowledged.forget(foreign)
        if foreign:
            self.on_foreign(foreign)

    def _on_beat(self, beat: Beat) -> None:
        if not self._is_checked:
            self._check_late()
        try:
            self._check_partitions(beat.partitions)
        except SettingsError as error:
            self.on_refused(str(error))
        members = self.steward.members
        if members is None or beat.members != members.version or beat.living != members.ids or self.lease.dead:
            self.steward.wake()
        self.on_generation(beat.generation)

    def _check_late(self) -> None:
        """What could not be checked before the start, because Redis was away."""
        try:
            self.check()
        except SettingsError as error:
            self.on_refused(str(error))

    def _check_partitions(self, found: int) -> None:
        if found != len(self.keys.partitions):
            raise SettingsError(
                f"the fleet on this Redis has {found} partitions, and the setting partitions says "
                f"{len(self.keys.partitions)}; set it to {found}, here and for clients, or, with all queues empty and "
                f"all workers stopped, delete the key {self.keys.fleet}"
            )

    def _describe(self) -> dict[str, Any]:
        report: dict[str, Any] = {"hostname": node_of(self.worker_id)}
        for describe in self.descriptions:
            report |= describe()
        return report


_current: list[FleetMember] = []


def current_member() -> FleetMember | None:
    """The membership of this worker process; None in a client."""
    return _current[-1] if _current else None


def set_member(member: FleetMember) -> None:
    _current[:] = [member]
