"""What a pool's rows mean to the fleet: which may run, which go elsewhere, and what peers are told."""

from __future__ import annotations

import logging
import time
from collections import Counter
from typing import TYPE_CHECKING, Any, Protocol

from redis.exceptions import RedisError

from lora_worker.errors import PoisonedRequestError, raiser
from lora_worker.fleet.claiming.claimer import Claimer
from lora_worker.fleet.claiming.claims import Load
from lora_worker.fleet.claiming.hand_over import Candidate, choose
from lora_worker.fleet.keys import PRIORITY_STEPS, list_of, step_of
from lora_worker.fleet.membership.member import FleetMember, Held
from lora_worker.fleet.pool.quarantine import Quarantine
from lora_worker.fleet.pool.task_row import TaskRow

if TYPE_CHECKING:
    from lora_worker.engine import Engine

logger = logging.getLogger(__name__)


class Pool(Protocol):
    """What is asked of the pool."""

    engine: Engine

    @property
    def rows(self) -> list[TaskRow]: ...

    @property
    def worked_on(self) -> set[str]: ...

    @property
    def managed(self) -> int: ...

    @property
    def is_draining(self) -> bool: ...

    @property
    def is_stopping(self) -> bool: ...

    @property
    def row_limit(self) -> int: ...

    @property
    def free_managers(self) -> int: ...

    def submit(self, row: TaskRow) -> None: ...

    def run_later(self, function: Any) -> None: ...


class PoolInFleet:
    """Joins a pool and the fleet's member."""

    def __init__(self, pool: Pool, member: FleetMember) -> None:
        self._pool = pool
        self._member = member
        self._settings = member.settings
        self._ledger = member.unacknowledged
        self._quarantine = Quarantine(
            run=lambda row: pool.run_later(lambda: self._run_suspect(row)),
            others=lambda: len(self._pool.rows) - len(self._quarantine),
        )
        member.worked_on = lambda: pool.worked_on
        member.run_later = pool.run_later
        member.on_foreign = self._abandon
        member.descriptions.append(self._describe)
        member.claimer = Claimer(
            member,
            rows=pool.row_limit,
            base_name=member.settings.base_name,
            load=self._load,
            hand_over=self._hand_over,
        )

    def admit(self, row: TaskRow) -> None:
        """Let a row that was claimed run, wait its turn, or end at once."""
        deaths = row.message.deaths
        if deaths > self._settings.max_redeliveries:
            row.on_done(raiser(_poisoned(row.task_id, deaths)))
        elif deaths == self._settings.max_redeliveries:
            self._isolate(row, deaths)
        elif self._pool.is_draining or self._quarantine.is_active:
            self._give_back(row)
        elif row.message.is_suspect:
            self._pool.run_later(lambda: self._run_suspect(row))
        else:
            self._pool.submit(row)

    def note_started(self, row: TaskRow) -> None:
        if not row.message.is_suspect:
            self._ledger.mark_started(row.tags)
            return
        # If it kills this worker in its first step, that must be known; it has been in a dying worker's hands before.
        try:
            self._ledger.mark_started_now(self._member.engine_redis, row.tags)
        except RedisError as error:
            logger.warning("The start of %s could not be written down (%s).", row.task_id, error)

    def is_own(self, row: TaskRow) -> bool:
        return self._member.is_own(row.tag, lambda: self._pool.is_stopping)

    def held(self, row: TaskRow) -> Held | None:
        return self._member.held(row.tag)

    def ended(self, row: TaskRow) -> None:
        self._quarantine.ended(row)

    def drain(self) -> None:
        """The worker takes nothing more, and peers take its partitions over."""
        self._member.steward.drain()
        for row in self._pool.rows:
            self._give_back(row)

    def leave(self) -> None:
        self._member.leave()

    # ---------------------------------------------------------------------------------------------

    def _isolate(self, row: TaskRow, deaths: int) -> None:
        """Run it with nothing beside it."""
        self._quarantine.add(row)
        logger.warning(
            "%s was running when %d workers died; it runs with nothing beside it (%d such requests here).",
            *(row.task_id, deaths, len(self._quarantine)),
        )
        for other in self._pool.rows:
            if not self._quarantine.has(other):
                self._give_back(other)

    def _run_suspect(self, row: TaskRow) -> None:
        """A worker died that had it in hand: it may be done already. Asks Redis."""
        try:
            is_done = row.has_result()
        except Exception:
            logger.exception("Whether %s has a result could not be found out; it runs.", row.task_id)
            is_done = False
        if is_done:
            logger.info("The result of %s is there already; it is not run again.", row.task_id)
            row.acknowledge()
        else:
            self._pool.submit(row)

    def _give_back(self, row: TaskRow) -> None:
        """To the front of its queue, if it has not started."""
        for tag in row.withdraw():
            self._ledger.give_back(tag)

    def _abandon(self, foreign: set[str]) -> None:
        """Peers have restored these messages, since this worker was away for longer than its lease."""
        rows = [row for row in self._pool.rows if row.tag in foreign]
        # The unstarted first: the place of one that ran would be given to the next of them.
        for row in sorted(rows, key=lambda row: row.is_started):
            row.abandon()
        if rows:
            logger.warning("%d rows here were another worker's by now, and were stopped.", len(rows))

    def _load(self) -> Load:
        rows = self._pool.rows
        held = Counter(step_of(row.message.priority) for row in rows)
        return Load(
            # Management tasks, which run beside the rows, take none of their credit.
            in_hand=len(self._ledger) - self._pool.managed,
            held=tuple(held[step] for step in range(len(PRIORITY_STEPS))),
            has_unstarted=any(not row.is_started for row in rows),
            unsettled=self._ledger.unsettled,
            is_paused=self._quarantine.is_active or self._pool.is_draining,
            free_managers=self._pool.free_managers,
        )

    def _hand_over(self, peers: dict[str, int]) -> None:
        members = self._member.members
        if members is None:
            return
        rows = {row.task_id: row for row in self._pool.rows}
        free_rows = self._pool.row_limit - sum(row.is_started for row in rows.values())
        now = time.monotonic()
        pinned = members.pins_of(self._member.worker_id)
        candidates = [
            Candidate(row.task_id, row.adapter, row.message.priority, now - row.arrived_at)
            for row in rows.values()
            if not row.is_started and row.adapter not in pinned
        ]
        for peer, task_ids in choose(candidates, free_rows, peers, members.resident()).items():
            for row in (rows[task_id] for task_id in task_ids):
                target = list_of(self._member.keys.direct(peer), row.message.priority)
                for tag in row.withdraw():
                    self._ledger.forward(tag, target, worker=peer)

    def _describe(self) -> dict[str, Any]:
        info = self._pool.engine.info()
        pool = info.get("pool", {})
        return {
            "rows": self._pool.row_limit,
            "running": info.get("running", 0),
            "rows_free": max(0, self._pool.row_limit - info.get("running", 0)),
            "waiting": sum(not row.is_started for row in self._pool.rows),
            "in_hand": len(self._ledger),
            "quarantined": len(self._quarantine),
            "pinned": pool.get("pinned", []),
            "resident": sorted(pool.get("slots", {}).values()),
        }


def _poisoned(task_id: str, deaths: int) -> PoisonedRequestError:
    return PoisonedRequestError(
        f"the request {task_id} was running when {deaths} workers died, the last time with nothing beside it; it is "
        f"not run again"
    )
