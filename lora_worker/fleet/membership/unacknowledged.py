"""The messages this worker has claimed and not acknowledged, and the thread that settles them in Redis.

They are a worker's and not a connection's: a row that outlives the connection its message came by is acknowledged by
the next one, and a connection that breaks gives nothing back that still runs. Whatever is settled is written down here
at once and brought to Redis in order, again and again while Redis is away. Every such operation may run twice: it does
nothing for a tag that is no longer under this worker's key, so a message that a peer has restored meanwhile is safe.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from redis import Redis
from redis.exceptions import RedisError

from lora_worker.fleet.connection import script, tags_under
from lora_worker.fleet.keys import Keys

logger = logging.getLogger(__name__)

BATCH = 256
RETRY_SECONDS = (0.1, 2.0)  # the first wait while Redis is away, and the longest
LOOK_SECONDS = 0.01


class _Mark(NamedTuple):
    tag: str


class _Acknowledge(NamedTuple):
    tag: str


class _Move(NamedTuple):
    """See move.lua."""

    tag: str
    target: str = ""
    worker: str = ""
    is_unknown: str = ""


_Operation = _Mark | _Acknowledge | _Move


class Unacknowledged:
    """The ledger; any thread may use it."""

    def __init__(self, redis: Redis, keys: Keys, worker_id: str) -> None:
        self._redis = redis
        self._unacked, self._started = keys.unacked(worker_id), keys.started(worker_id)
        self._move_keys = [self._unacked, self._started, keys.workers, keys.idle]
        self._move = redis.register_script(script("move"))
        self._mark = redis.register_script(script("mark"))
        self._tags: set[str] = set()
        self._lost: set[str] = set()
        self._operations: deque[_Operation] = deque()
        self._writing: list[_Operation] = []
        # Reentrant: Celery cancels everything from within a signal handler, wherever the main thread is then.
        self._lock = threading.RLock()
        self._wake = threading.Event()
        self._is_ended = False
        self._thread = threading.Thread(target=self._run, name="acknowledgements", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def __len__(self) -> int:
        """Messages that are in this worker's hands."""
        return len(self._tags)

    def __contains__(self, tag: str) -> bool:
        return tag in self._tags

    def add(self, tag: str) -> None:
        """A message has come in."""
        with self._lock:
            self._tags.add(tag)

    def in_hand(self) -> set[str]:
        with self._lock:
            return set(self._tags)

    @property
    def unsettled(self) -> int:
        """Operations that are yet to be written."""
        return len(self._operations)

    def tags(self) -> set[str]:
        """Those in hand, and those that are being settled."""
        with self._lock:
            return self._tags | {operation.tag for operation in (*self._operations, *self._writing)}

    def note_lost(self) -> None:
        """Redis has come back without what was there; raises RedisError. The rows that run are nobody else's."""
        held = self.in_hand()
        here = tags_under(self._redis, self._unacked)
        with self._lock:
            self._lost |= held - here

    def is_lost(self, tag: str) -> bool:
        """Whether the message was this worker's when Redis lost its data."""
        return tag in self._lost

    def forget(self, tags: Iterable[str]) -> None:
        """A peer has restored these; there is nothing to settle."""
        with self._lock:
            self._tags.difference_update(tags)

    def acknowledge(self, tag: str) -> None:
        self._settle(_Acknowledge(tag))

    def give_back(self, tag: str, *, is_unknown: bool = False) -> None:
        """To the front of the list it came from. `is_unknown`: it may have a result already."""
        self._settle(_Move(tag, is_unknown="1" if is_unknown else ""))

    def forward(self, tag: str, target: str, *, worker: str = "") -> None:
        """To the back of another list, and, where that is some worker's own, only if that worker lives."""
        self._settle(_Move(tag, target, worker))

    def mark_started(self, tags: Iterable[str]) -> None:
        """The row of this message starts; should the worker die now, the message is told so."""
        with self._lock:
            self._operations += [_Mark(tag) for tag in tags if tag in self._tags]
        self._wake.set()

    def mark_started_now(self, redis: Redis, tags: list[str]) -> None:
        """The same, and in Redis when this returns; raises RedisError."""
        self._mark(keys=[self._unacked, self._started], args=tags, client=redis)

    def flush(self, timeout_seconds: float) -> bool:
        """Wait until everything is settled; False where it took too long."""
        end = time.monotonic() + timeout_seconds
        while self._operations or self._writing:
            if time.monotonic() > end:
                return False
            time.sleep(LOOK_SECONDS)
        return True

    def stop(self) -> None:
        self._is_ended = True
        self._wake.set()

    def _settle(self, operation: _Operation) -> None:
        with self._lock:
            self._tags.discard(operation.tag)
            self._lost.discard(operation.tag)
            self._operations.append(operation)
        self._wake.set()

    def _run(self) -> None:
        wait, longest = RETRY_SECONDS
        while not self._is_ended:
            self._wake.wait()
            self._wake.clear()
            while self._take() and not self._is_ended:
                try:
                    self._write(self._writing)
                    wait = RETRY_SECONDS[0]
                    self._writing = []
                    continue
                except RedisError as error:
                    waiting = len(self._writing) + len(self._operations)
                    logger.warning("Redis is away or refuses (%s); %d acknowledgements wait.", error, waiting)
                except Exception:
                    logger.exception("Acknowledgements could not be written; they are tried again.")
                time.sleep(wait)
                wait = min(2 * wait, longest)

    def _take(self) -> bool:
        with self._lock:
            while self._operations and len(self._writing) < BATCH:
                self._writing.append(self._operations.popleft())
        return bool(self._writing)

    def _write(self, operations: list[_Operation]) -> None:
        """All marks, then all acknowledgements, then all moves: the order that the tags of one batch have."""
        marked = [operation.tag for operation in operations if isinstance(operation, _Mark)]
        done = [operation.tag for operation in operations if isinstance(operation, _Acknowledge)]
        moved = [word for operation in operations if isinstance(operation, _Move) for word in operation]
        if marked:
            self._mark(keys=[self._unacked, self._started], args=marked)
        if done:
            self._redis.hdel(self._unacked, *done)
            self._redis.srem(self._started, *done)
        if moved:
            self._move(keys=self._move_keys, args=moved)
