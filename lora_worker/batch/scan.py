"""The first look at an input: which lines there are, which are bad, and in which order they are sent."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from lora_worker.batch.lines import BadLine, is_blank, read_line
from lora_worker.batch.rows import error_row, row_id
from lora_worker.batch.source import RawLine, Source
from lora_worker.batch.store import FINISHED, WAITING, IndexedLine, ModelCount, Store

BATCH_LINES = 1000
# The model of a line that can't be sent.
NO_MODEL = 0


class Scan:
    """Puts every line of a source into a store, in one transaction.

    A blank line is a bad line, unless nothing but blank lines comes after it: those are how files end.
    """

    def __init__(self, store: Store, *, job: str, default_model: str | None) -> None:
        self._store = store
        self._job = job
        self._default_model = default_model
        self._models: dict[str | None, int] = {}

    def run(self, source: Source) -> None:
        self._store.begin_index()
        batch: list[IndexedLine] = []
        for raw in self._without_blank_end(source.lines()):
            batch.append(self._index(raw))
            if len(batch) == BATCH_LINES:
                self._store.add_lines(batch)
                batch = []
        self._store.add_lines(batch)
        self._store.end_index()

    def _without_blank_end(self, lines: Iterable[RawLine]) -> Iterator[RawLine]:
        first_blank, count, end = 0, 0, 0
        for raw in lines:
            if is_blank(raw.data):
                first_blank, count = first_blank if count else raw.number, count + 1
                end = raw.offset
                continue
            for number in range(first_blank, first_blank + count):
                yield RawLine(number, end, 0, b"")
            count = 0
            yield raw

    def _index(self, raw: RawLine) -> IndexedLine:
        line = read_line(raw.data, raw.number, default_model=self._default_model)
        if not isinstance(line, BadLine) and not self._store.is_first(line.custom_id):
            message = f"line {raw.number} has the custom_id of an earlier line; each may stand there once"
            line = BadLine("duplicate_custom_id", message, line.custom_id)
        place = (raw.number, raw.offset, raw.length)
        if isinstance(line, BadLine):
            return IndexedLine(*place, NO_MODEL, FINISHED, line.code, self._row(line, raw.number))
        if line.model not in self._models:
            self._models[line.model] = self._store.add_model(line.model)
        return IndexedLine(*place, self._models[line.model], WAITING)

    def _row(self, line: BadLine, number: int) -> bytes:
        return error_row(row_id(self._job, number), line.custom_id, code=line.code, message=line.message, number=number)


def take_turns(models: Iterable[ModelCount], lane_count: int) -> list[tuple[int, int, int]]:
    """Where each model's lines stand in the order of sending: (model, lane, its first place in the lane).

    The lines of a model follow each other, so that its adapter is loaded once. They go in several lanes side by side,
    so that the workers that hold different adapters all have work; the lanes are about equally long.
    """
    lengths = [0] * lane_count
    turns = []
    for model in sorted(models, key=lambda model: (model.done - model.lines, model.id)):
        lane = lengths.index(min(lengths))
        turns.append((model.id, lane, lengths[lane]))
        lengths[lane] += model.lines - model.done
    return turns
