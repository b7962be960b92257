"""How much a worker claims, and from where: the policy behind claim.lua, in plain numbers.

- From its own partitions it claims up to `max_waiting_requests` ahead of its rows, so that the scheduler sees enough of
  the queue to run one adapter's requests together.
- Others' partitions fill only rows that would stay empty: at once where more than a batch waits in one, else when the
  same message has waited there for `PATIENCE_SECONDS`, by which time an owner with room would have claimed it.
- Requests for the base model need no look-ahead: where there are peers to run them, they are claimed a little ahead
  while nothing else waits, and take turns with the partitions otherwise.
- Management tasks, as long as there are threads to run them at once, and what of the inbox is only to be forwarded, are
  claimed whatever the credit.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

# Messages that one claim brings at most, of each kind.
MOST_CLAIMED = 64
MOST_FORWARDED = 64
MOST_MANAGED = 16
# Beyond so many unwritten forwards the inbox is left alone.
MOST_UNSETTLED = 256
PATIENCE_SECONDS = 0.5
ANNOUNCE_SECONDS = 1.0
POLL_SECONDS = 0.03
# After so long without a message a worker asks less often, so that a large idle fleet doesn't keep Redis busy.
QUIET_AFTER_SECONDS, QUIET_POLL_SECONDS = 5.0, 0.1


class Load(NamedTuple):
    """What a worker has: messages in hand, rows in the engine, running or not, and whether some have not started.

    `free_managers`: how many management tasks it would run at once.
    """

    in_hand: int
    rows: int
    has_unstarted: bool
    unsettled: int
    is_paused: bool
    free_managers: int = MOST_MANAGED


class Limits(NamedTuple):
    """The counts that claim.lua takes; see there."""

    ahead: int
    near: int
    free: int
    spill: int
    inbox: int
    manage: int
    turn: int
    room: int
    listen: int


@dataclass
class Claims:
    """The policy and what it remembers; owned by Celery's loop.

    Args:
        rows: how many rows run at once.
    """

    rows: int
    turn: int = 0
    _hungry_since: float | None = None
    _quiet_since: float = 0.0
    _announced_at: float | None = None
    _next_at: float = 0.0
    # By the name of another's list: what it would give next, and since when.
    _watched: dict[str, tuple[bytes, float]] = field(default_factory=dict)

    @property
    def enough(self) -> int:
        """Rows that run, and a few to follow."""
        return self.rows + self.rows // 4

    def is_due(self, now: float) -> bool:
        return now >= self._next_at

    def takes_base(self, load: Load, credit: int, *, is_alone: bool) -> int:
        """How many more base requests are as well here as with a peer."""
        return max(0, credit - load.in_hand if is_alone else self.enough - load.rows)

    def limits(self, load: Load, credit: int, now: float, *, is_alone: bool) -> Limits:
        """`credit`: messages the worker may have in hand, as Celery counts it."""
        is_open = not load.is_paused
        ahead = max(0, min(credit - load.in_hand, MOST_CLAIMED)) if is_open else 0
        free = max(0, min(self.rows - load.rows, MOST_CLAIMED)) if is_open else 0
        return Limits(
            ahead=ahead,
            near=self.takes_base(load, credit, is_alone=is_alone),
            free=free,
            spill=self.rows,
            inbox=MOST_FORWARDED if load.unsettled < MOST_UNSETTLED else 0,
            manage=min(MOST_MANAGED, load.free_managers),
            turn=self.turn,
            room=self._room(load, now) if is_open else -1,
            listen=int(load.has_unstarted and is_open),
        )

    def note(self, load: Load, taken: int, now: float) -> None:
        """What a claim with this load has brought."""
        self.turn += taken
        if taken:
            self._quiet_since = now
        has_room = load.rows < self.enough and not load.is_paused
        if taken or not has_room:
            self._hungry_since = None
        elif self._hungry_since is None:
            self._hungry_since = now
        if taken and has_room:
            self._next_at = now
        else:
            is_quiet = now - self._quiet_since > QUIET_AFTER_SECONDS
            self._next_at = now + (QUIET_POLL_SECONDS if is_quiet else POLL_SECONDS)

    def watch(self, others: dict[str, bytes], now: float) -> None:
        """What others' lists would give next, as a claim found them while rows stayed empty."""
        before = self._watched
        self._watched = {
            name: before[name] if name in before and before[name][0] == message else (message, now)
            for name, message in others.items()
        }

    def stuck(self, now: float) -> list[str]:
        """Others' lists that their owner seems not to claim from."""
        return [name for name, (_, since) in self._watched.items() if now - since >= PATIENCE_SECONDS]

    def wait(self, now: float) -> None:
        """Nothing can be claimed now."""
        self._next_at = now + POLL_SECONDS

    def _room(self, load: Load, now: float) -> int:
        """What to tell the peers: rows to take over, 0 to take that back, -1 for nothing new."""
        if self._hungry_since is None:
            was_announced, self._announced_at = self._announced_at is not None, None
            return 0 if was_announced else -1
        if self._announced_at is not None and now - self._announced_at < ANNOUNCE_SECONDS:
            return -1
        self._announced_at = now
        return max(0, self.enough - load.rows)
