"""A worker's lease: the heartbeat that says it lives, in its own thread and on its own connection.

Every beat renews an entry in a sorted set, by Redis's own clock. What follows from it, and why it is safe:

- *Who lost the lease knows.* A peer that restores a worker's messages first sets its entry to 0, and removes it when
  all are restored. The worker's next beat finds that, and then which rows are still its own (their messages are still
  under its key); it cancels the others. So it does after a beat whose answer was lost, which may have found it. A claim
  needs a lease that has not ended, so nothing is recorded under a key that a peer has emptied.
- *Who may have lost it says nothing.* `is_certain` counts from before the last good beat was sent, so while it holds
  the entry can't have ended on the server, which counts from later. A worker that was stopped, or cut off, for longer
  than its lease stores no result until a beat has told it which rows are still its own.
- *The living are not reaped.* A peer is held to be dead when it was expired at successive beats, and this worker's own
  contact with Redis has been unbroken for a full lease. Who lives renews in a fraction of a lease whenever Redis
  answers, so a full lease in which Redis answered us without a break, and the peer didn't renew, is its own fault. A
  beat that fails (Redis restarts), or comes late (this worker was stopped), begins the count anew.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import NamedTuple
from uuid import uuid4

from redis import Redis
from redis.exceptions import RedisError

from lora_worker.fleet.connection import script
from lora_worker.fleet.keys import Keys

logger = logging.getLogger(__name__)

BEATS_PER_LEASE = 15
LONGEST_BEAT_SECONDS = 1.0
RETRY_SECONDS = 0.25
# A beat this much of a lease after the one before is no unbroken contact.
BREAK = 0.5


class Beat(NamedTuple):
    """What Redis answers to a beat; `ended_at` is None where there was no lease, 0 where peers restore the messages."""

    ended_at: float | None
    partitions: int
    epoch: str
    members: int
    generation: int
    expired: frozenset[str]
    living: frozenset[str]


class Contact:
    """How long Redis has answered without a break, and which peers were expired at the last two beats."""

    def __init__(self, lease_seconds: float) -> None:
        self._lease_seconds = lease_seconds
        self._since: float | None = None
        self._last = 0.0
        self._expired: frozenset[str] = frozenset()
        self.dead: frozenset[str] = frozenset()

    def lost(self) -> None:
        self._since = None
        self._expired = self.dead = frozenset()

    def beat(self, now: float, expired: frozenset[str]) -> None:
        if self._since is None or now - self._last > BREAK * self._lease_seconds:
            self.lost()
            self._since = now
        self._last = now
        is_long_enough = now - self._since >= self._lease_seconds
        self.dead = expired & self._expired if is_long_enough else frozenset()
        self._expired = expired


class Lease:
    """The heartbeat thread.

    Args:
        on_doubt: called on the thread, before `is_certain` holds again, where peers may have restored messages of this
            worker; where it raises RedisError it is called again after the next beat.
        on_lost: the same, where Redis has come back without its data.
        on_beat: called on the thread with every answer; must not block.
    """

    def __init__(
        self,
        redis: Redis,
        keys: Keys,
        worker_id: str,
        lease_seconds: float,
        *,
        on_doubt: Callable[[], None],
        on_lost: Callable[[], None],
        on_beat: Callable[[Beat], None],
    ) -> None:
        self._keys = [keys.workers, keys.fleet, keys.generation]
        self._arguments: list[str | float] = [worker_id, lease_seconds, len(keys.partitions)]
        self._script = redis.register_script(script("beat"))
        self._worker_id = worker_id
        self._lease_seconds = lease_seconds
        self._on_doubt = on_doubt
        self._on_lost = on_lost
        self._on_beat = on_beat
        self._contact = Contact(lease_seconds)
        self._certain_until = 0.0
        self._epoch: str | None = None
        self._is_in_doubt = False
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lease", daemon=True)

    @property
    def is_certain(self) -> bool:
        """Whether the lease can't have ended, by this worker's own clock."""
        return time.monotonic() < self._certain_until

    @property
    def epoch(self) -> str:
        """Tells whether Redis has its data, as of the last good beat; what `on_lost` notes comes before a new one."""
        return self._epoch or ""

    @property
    def dead(self) -> frozenset[str]:
        """Peers whose messages are to be restored."""
        return self._contact.dead - {self._worker_id}

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        interval = min(self._lease_seconds / BEATS_PER_LEASE, LONGEST_BEAT_SECONDS)
        while not self._ended.is_set():
            try:
                self._beat()
                wait = interval
            except RedisError as error:
                logger.warning("The lease could not be renewed (%s).", error)
                self._is_in_doubt = self._epoch is not None
                self._contact.lost()
                wait = min(interval, RETRY_SECONDS)
            except Exception:
                logger.exception("A beat failed; the next one follows.")
                wait = interval
            self._ended.wait(wait)

    def _beat(self) -> None:
        sent_at = time.monotonic()
        ended_at, partitions, epoch, members, generation, expired, living = self._script(
            keys=self._keys, args=[*self._arguments, uuid4().hex]
        )
        beat = Beat(
            float(ended_at) if ended_at else None,
            partitions,
            epoch.decode(),
            members,
            generation,
            frozenset(worker.decode() for worker in expired),
            frozenset(worker.decode() for worker in living),
        )
        self._judge(beat)
        if self._is_in_doubt:
            self._on_doubt()
            self._is_in_doubt = False
        self._certain_until = sent_at + self._lease_seconds
        self._contact.beat(sent_at, beat.expired)
        self._on_beat(beat)

    def _judge(self, beat: Beat) -> None:
        if self._epoch not in (None, beat.epoch):
            logger.error("Redis has lost its data. Rows that run go on; what waited in its queues is gone.")
            self._on_lost()
            self._is_in_doubt = False
        elif not beat.ended_at and self._epoch is not None:
            logger.warning("This worker's lease had ended, so peers may have restored its messages.")
            self._is_in_doubt = True
        self._epoch = beat.epoch
