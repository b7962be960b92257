"""The loop of a batch: send, collect, write, again and again, whatever happens to Redis and the workers meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable

from lora_worker.batch.flight import STALL_SECONDS
from lora_worker.batch.interrupts import Interrupts
from lora_worker.batch.progress import Progress
from lora_worker.batch.redis_errors import is_passing
from lora_worker.batch.window import Window
from lora_worker.batch.writer import Writer
from lora_worker.errors import BatchError
from lora_worker.fleet.connection import REDIS_ERRORS

# How long to wait for answers when none were there, and when some were.
IDLE_SECONDS = 0.1
BUSY_SECONDS = 0.02
AWAY_SECONDS = 1.0


class Runner:
    """Runs what is left of a batch to its end, or until it is interrupted twice.

    `living` says which workers there are. `check` is called in every turn, and raises where waiting is in vain.
    """

    def __init__(
        self,
        window: Window,
        writer: Writer,
        progress: Progress,
        *,
        living: Callable[[], list[str]],
        check: Callable[[], None],
    ) -> None:
        self._window = window
        self._writer = writer
        self._progress = progress
        self._living = living
        self._check = check
        self._interrupts = Interrupts()
        self._told_interrupts = 0
        self._told_stall_at = 0.0
        self._is_redis_away = False
        self._is_given_up = False

    def run(self) -> None:
        with self._interrupts:
            while not self._is_over:
                has_moved = self._move()
                self._check()
                self._writer.write_now_and_then()
                self._progress.update()
                time.sleep(BUSY_SECONDS if has_moved else IDLE_SECONDS)

    @property
    def _is_over(self) -> bool:
        is_empty = not len(self._window) and (self._window.is_exhausted or self._interrupts.count > 0)
        return is_empty or self._is_given_up

    def _move(self) -> bool:
        """One turn of the loop; whether anything was sent or collected."""
        try:
            if self._interrupts.count >= 2:
                self._give_up()
                return False
            return self._step()
        except REDIS_ERRORS as error:
            if not is_passing(error):
                raise BatchError(
                    f"Redis refuses what the batch asks of it ({error}); docs/redis.md says what an account needs. The "
                    f"batch can go on later"
                ) from None
            self._wait_for_redis(error)
            return False

    def _step(self) -> bool:
        self._tell_interrupt()
        self._window.begin()
        has_collected = self._window.collect()
        has_sent = not self._interrupts.count and self._window.send()
        lost = self._window.send_lost()
        if lost:
            self._progress.say(f"Redis no longer knew of {lost:,} rows that were in flight; they are sent again.")
        if self._is_redis_away:
            self._is_redis_away = False
            self._progress.say("Redis answers again.")
        self._tell_stall()
        return has_collected or has_sent

    def _give_up(self) -> None:
        self._is_given_up = True
        try:
            self._window.collect()
            self._progress.say(f"{self._window.revoke():,} rows are revoked; the same command goes on later.")
        except REDIS_ERRORS as error:
            self._progress.say(f"Redis does not answer ({error}), so what is in flight could not be revoked.")

    def _wait_for_redis(self, error: Exception) -> None:
        if not self._is_redis_away:
            self._is_redis_away = True
            self._progress.say(f"Redis does not do its work ({error}); the batch waits for it.")
        time.sleep(AWAY_SECONDS)

    def _tell_interrupt(self) -> None:
        if self._interrupts.count > self._told_interrupts:
            self._told_interrupts = self._interrupts.count
            self._progress.say(
                f"No more lines are sent; {len(self._window):,} in flight are collected. Ctrl-C again revokes them."
            )

    def _tell_stall(self) -> None:
        now = time.monotonic()
        if not len(self._window) or min(self._window.stalled_seconds, now - self._told_stall_at) < STALL_SECONDS:
            return
        self._told_stall_at = now
        self._progress.say(
            f"Nothing has come back for {self._window.stalled_seconds:.0f} s; {len(self._living())} workers live, "
            f"{len(self._window):,} rows wait for them."
        )
