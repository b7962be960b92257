"""The lines that are in flight, and the loop's three moves with them: send, collect, look for what was lost."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from lora_worker.batch.flight import Answer, Flight
from lora_worker.batch.lines import Line, read_line
from lora_worker.batch.roster import Roster
from lora_worker.batch.rows import error_row, response_row, row_id
from lora_worker.batch.source import Source
from lora_worker.batch.store import FinishedRow, Store, WaitingLine
from lora_worker.batch.tally import Tally

PUBLISH_LINES = 250
PUBLISH_BYTES = 4 * 1024 * 1024
# Prompts in flight; with short ones the number of lines is the bound.
MOST_BYTES = 64 * 1024 * 1024


class _Sent(NamedTuple):
    line: WaitingLine
    custom_id: str


class Window:
    """Lines on their way between store and workers; what is in flight is bounded in lines and in bytes.

    Args:
        default_model: the adapter of lines that name none.
        max_in_flight: the most lines that are sent and not collected.
    """

    def __init__(
        self,
        store: Store,
        source: Source,
        flight: Flight,
        tally: Tally,
        *,
        roster: Roster,
        default_model: str | None,
        max_in_flight: int,
    ) -> None:
        self._store = store
        self._source = source
        self._flight = flight
        self._tally = tally
        self._roster = roster
        self._job = store.job
        self._default_model = default_model
        self._max_in_flight = max_in_flight
        self._sent: dict[str, _Sent] = {}
        self._bytes = 0
        self._turn = -1
        self._has_begun = False
        self.is_exhausted = False

    def __len__(self) -> int:
        """Tasks in flight, and those whose answers are kept and not yet freed."""
        return len(self._flight)

    @property
    def stalled_seconds(self) -> float:
        """How long nothing has come back."""
        return self._flight.stalled_seconds

    def begin(self) -> None:
        """Once: await what an earlier run had published when it ended.

        What it had kept already, or given up while Redis was away, is revoked.
        """
        if self._has_begun:
            return
        published = list(self._flight.published())
        stale = [name for name in published if not self._store.is_waiting(*_parts(name))]
        self._flight.revoke(stale)
        self._publish_all(name for name in published if name not in set(stale))
        self._has_begun = True

    def send(self) -> bool:
        """Publish what there is room for; whether that was anything."""
        has_sent = False
        while not self.is_exhausted and len(self._sent) < self._max_in_flight and self._bytes < MOST_BYTES:
            room = min(self._max_in_flight - len(self._sent), PUBLISH_LINES)
            waiting = self._store.waiting(self._turn, room)
            self.is_exhausted = not waiting
            lines = self._with_room_in_slots(_within(waiting, PUBLISH_BYTES))
            if not lines:
                break
            self._publish(self._sendable(lines))
            self._turn = lines[-1].turn
            has_sent = True
        return has_sent

    def collect(self) -> bool:
        """Keep the answers that are there in the store, and free them; whether there were any."""
        has_collected = False
        for answers in self._flight.collect():
            # One that is no longer here was kept before, and Redis was away when it was to be freed.
            new = [answer for answer in answers if answer.name in self._sent]
            with self._store.transaction():
                self._store.finish(self._row(answer) for answer in new)
            for answer in new:
                line = self._sent.pop(answer.name).line
                self._bytes -= line.length
                self._tally.landed(line.model)
            self._flight.free([answer.name for answer in answers])
            has_collected = True
        return has_collected

    def send_lost(self) -> int:
        """Publish again what Redis no longer knows of; returns how many lines that were."""
        lost = self._flight.lost()
        # One that is no longer here was answered, and Redis was away when it was to be freed.
        self._flight.free([name for name in lost if name not in self._sent])
        unanswered = [name for name in lost if name in self._sent]
        self._publish_all(unanswered)
        return len(unanswered)

    def revoke(self) -> int:
        """Take back all that is in flight; what is sent for these lines later are other tasks."""
        count = len(self._sent)
        with self._store.transaction():
            self._store.next_attempt(sent.line.number for sent in self._sent.values())
        self._flight.revoke(self._flight.names)
        self._sent.clear()
        self._bytes = 0
        return count

    def _publish_all(self, names: Iterable[str]) -> None:
        """Publish tasks by name; for those that are in flight already, nothing but what Redis lost is pushed."""
        lines = self._store.waiting_among(_parts(name)[0] for name in names)
        while lines:
            part = _within(lines[:PUBLISH_LINES], PUBLISH_BYTES)
            self._publish(part)
            lines = lines[len(part) :]

    def _publish(self, lines: Iterable[WaitingLine]) -> None:
        sent = {}
        bodies = {}
        for line in lines:
            read = self._read(line)
            sent[line.name] = _Sent(line, read.custom_id)
            bodies[line.name] = read.body
        if not bodies:
            return
        self._flight.send(bodies)
        for name in sent.keys() - self._sent.keys():
            self._bytes += sent[name].line.length
            self._tally.sent(sent[name].line.model)
        self._sent |= sent

    def _with_room_in_slots(self, lines: list[WaitingLine]) -> list[WaitingLine]:
        """As many of the lines as bring no more adapters into flight than there are slots for.

        An adapter whose rows lie in a queue beside others' would be evicted and loaded again between them.
        """
        models = {sent.line.model for sent in self._sent.values()}
        for i, line in enumerate(lines):
            models.add(line.model)
            if len(models) > self._roster.most_models and len(self._sent) + i >= self._roster.enough_lines:
                return lines[:i]
        return lines

    def _sendable(self, lines: list[WaitingLine]) -> list[WaitingLine]:
        """Without those that are in flight, and those whose adapter nobody has, which get their error row here."""
        known, refused = [], []
        for line in lines:
            if line.name in self._sent:
                continue
            read = self._read(line)
            if not self._roster.is_unknown(read.model):
                known.append(line)
                continue
            message = f"line {line.number}: {read.model!r} is no loaded adapter and not the base model's name"
            refused.append(self._error(line.number, read.custom_id, "unknown_adapter", message))
            self._tally.answered(line.model, response=None)
        if refused:
            with self._store.transaction():
                self._store.finish(refused)
        return known

    def _read(self, line: WaitingLine) -> Line:
        read = read_line(self._source.read(line.offset, line.length), line.number, default_model=self._default_model)
        assert isinstance(read, Line), f"line {line.number} was good when it was scanned"
        return read

    def _row(self, answer: Answer) -> FinishedRow:
        line, custom_id = self._sent[answer.name]
        self._tally.answered(line.model, response=answer.response)
        if answer.response is None:
            return self._error(line.number, custom_id, answer.code or "error", answer.message)
        row = response_row(row_id(self._job, line.number), custom_id, task_id=answer.task_id, body=answer.response)
        return FinishedRow(line.number, None, row)

    def _error(self, number: int, custom_id: str, code: str, message: str) -> FinishedRow:
        row = error_row(row_id(self._job, number), custom_id, code=code, message=message, number=number)
        return FinishedRow(number, code, row)


def _parts(name: str) -> tuple[int, int]:
    """Line and attempt of a task's name."""
    number, _, attempt = name.partition(".")
    return int(number), int(attempt)


def _within(lines: list[WaitingLine], limit_bytes: int) -> list[WaitingLine]:
    """As many of the lines as fit, and at least one."""
    taken: list[WaitingLine] = []
    for line in lines:
        if taken and limit_bytes < line.length:
            break
        taken.append(line)
        limit_bytes -= line.length
    return taken
