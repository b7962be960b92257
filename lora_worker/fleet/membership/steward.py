"""What a worker does for the fleet beside its rows, in a thread of its own: it reports, looks around, and restores."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from redis import Redis
from redis.exceptions import RedisError

from lora_worker.fleet.connection import script, tags_under
from lora_worker.fleet.keys import Keys, lists_of
from lora_worker.fleet.members import Members, read_members

logger = logging.getLogger(__name__)

ROUND_SECONDS = 1.0
# A report outlives its worker by so much where nobody is left to clean up.
REPORT_EXPIRES_SECONDS = 3600
RESTORE_CHUNK = 128


class Steward:
    """The thread, and what it knows.

    Args:
        describe: what to report; called on the thread.
        dead: the peers whose messages are to be restored.
    """

    def __init__(
        self,
        redis: Redis,
        keys: Keys,
        worker_id: str,
        *,
        describe: Callable[[], dict[str, Any]],
        dead: Callable[[], frozenset[str]],
    ) -> None:
        # Called on the thread once a round, for whatever else belongs into one; must not block for long.
        self.on_round: list[Callable[[], None]] = []
        self.members: Members | None = None
        self._redis = redis
        self._keys = keys
        self._worker_id = worker_id
        self._describe = describe
        self._dead = dead
        self._is_draining = False
        self._said: tuple[bool, list[str]] | None = None
        self._read_members = redis.register_script(script("members"))
        self._write_report = redis.register_script(script("report"))
        self._restore = redis.register_script(script("restore"))
        self._wake = threading.Event()
        self._is_ended = False
        self._thread = threading.Thread(target=self._run, name="steward", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._is_ended = True
        self.wake()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()

    def wake(self) -> None:
        """Begin a round now: something has changed."""
        self._wake.set()

    def drain(self) -> None:
        """Tell the others to take over this worker's partitions."""
        self._is_draining = True
        self.wake()

    def read(self) -> Members:
        """Who lives now; raises RedisError."""
        return read_members(
            self._read_members(keys=[self._keys.workers, self._keys.fleet], args=[self._keys.worker("")])
        )

    def restore(self, worker_id: str, how: str) -> int | None:
        """Put a worker's messages back ('dead' or 'leaving'); how many, or None where it lives or a peer was faster."""
        keys = self._keys
        names = [
            *(keys.workers, keys.unacked(worker_id), keys.started(worker_id), keys.fleet, keys.idle),
            keys.worker(worker_id),
            *lists_of(keys.direct(worker_id)),
            *lists_of(keys.inbox),
        ]
        # Tags sort by age; the oldest goes back last, and so to the very front.
        tags = sorted(tags_under(self._redis, keys.unacked(worker_id)), reverse=True)
        for first in range(0, len(tags), RESTORE_CHUNK):
            if self._restore(keys=names, args=[worker_id, how, *tags[first : first + RESTORE_CHUNK]]) < 0:
                return None
        return None if self._restore(keys=names, args=[worker_id, how]) < 0 else len(tags)

    def _run(self) -> None:
        while not self._is_ended:
            try:
                self._round()
            except RedisError as error:
                logger.warning("The fleet could not be looked after (%s); the next round follows.", error)
            except Exception:
                logger.exception("A round of the steward failed; the next one follows.")
            self._wake.wait(ROUND_SECONDS)
            self._wake.clear()

    def _round(self) -> None:
        self.members = self.read()
        for worker_id in self._dead():
            started_at = time.monotonic()
            count = self.restore(worker_id, "dead")
            if count is not None:
                seconds = time.monotonic() - started_at
                logger.warning("%s is dead; restored %d messages in %.2f s.", worker_id, count, seconds)
        # Restoring comes first, whatever becomes of the report.
        self._report()
        for function in self.on_round:
            function()

    def _report(self) -> None:
        report = self._describe()
        resident = report.pop("resident", [])
        pinned = sorted(report.get("pinned", []))
        name = self._keys.worker(self._worker_id)
        is_news = self._said not in (None, (self._is_draining, pinned))
        fields = {
            "report": json.dumps(report),
            "pinned": json.dumps(pinned),
            "resident": json.dumps(resident),
            "draining": "1" if self._is_draining else "",
        }
        values = [word for field in fields.items() for word in field]
        self._write_report(keys=[name, self._keys.fleet], args=[REPORT_EXPIRES_SECONDS, int(is_news), *values])
        self._said = (self._is_draining, pinned)
