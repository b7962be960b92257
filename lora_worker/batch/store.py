"""The state of a batch on disk, beside its output: which lines there are, which are answered, and the rows to write.

An SQLite file, so that a hundred thousand lines or ten million take the same memory, and a kill at any moment leaves
either all of a change or nothing of it. A line is WAITING until its row is in the store (FINISHED), and WRITTEN when
the row is in the output file; the store knows how long the output was then. What is in flight is known to Redis alone.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from lora_worker.batch.manifest import Manifest
from lora_worker.errors import BatchError

WAITING, FINISHED, WRITTEN = 0, 1, 2

_SCHEMA = """
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS models (id INTEGER PRIMARY KEY, name TEXT);
CREATE TABLE IF NOT EXISTS lines (
    number INTEGER PRIMARY KEY, offset INTEGER NOT NULL, length INTEGER NOT NULL, model INTEGER NOT NULL,
    turn INTEGER NOT NULL DEFAULT 0, attempt INTEGER NOT NULL DEFAULT 0, state INTEGER NOT NULL,
    code TEXT, row BLOB);
CREATE INDEX IF NOT EXISTS waiting ON lines (turn) WHERE state = 0;
CREATE INDEX IF NOT EXISTS finished ON lines (number) WHERE state = 1;
"""


class IndexedLine(NamedTuple):
    """A line as it is found when the input is scanned; a bad one brings its row and code along."""

    number: int
    offset: int
    length: int
    model: int
    state: int
    code: str | None = None
    row: bytes | None = None


class WaitingLine(NamedTuple):
    """A line to be sent. `attempt` counts how often its task was revoked, or its error is to be tried again."""

    number: int
    offset: int
    length: int
    model: int
    turn: int
    attempt: int

    @property
    def name(self) -> str:
        """The name of its task within the batch."""
        return f"{self.number}.{self.attempt}"


class FinishedRow(NamedTuple):
    """A row for the output, with the kind of its error."""

    number: int
    code: str | None
    row: bytes


class ModelCount(NamedTuple):
    """How many lines name a model (None: the bare base), and how many of them have been answered."""

    id: int
    name: str | None
    lines: int
    done: int


class Store:
    """One batch's state. One process at a time may have it open; BatchError for a second one."""

    def __init__(self, path: Path | None) -> None:
        """`path` None: a state that is needed for a moment only, in a temporary file."""
        self.path = path
        # An empty name is SQLite's word for a temporary file, unlike ':memory:'.
        self._db = sqlite3.connect(path or "", timeout=0, isolation_level=None)
        try:
            self._db.execute("PRAGMA locking_mode = EXCLUSIVE")
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = NORMAL")
            with self.transaction():
                for statement in _SCHEMA.split(";\n"):
                    self._db.execute(statement)
        except sqlite3.OperationalError as error:
            self._db.close()
            if "locked" in str(error):
                raise BatchError(
                    f"another lora-worker batch is writing {path and path.stem}; wait for its end"
                ) from None
            raise BatchError(f"the state {path} cannot be written: {error}") from None
        except sqlite3.DatabaseError as error:
            self._db.close()
            raise BatchError(f"{path} is no state of a batch ({error}); give another output, or remove it") from None

    def close(self) -> None:
        self._db.close()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """All of the block or nothing of it."""
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._db.execute("COMMIT")
        except sqlite3.OperationalError as error:
            self._roll_back()
            name = self.path or "in a temporary file"
            raise BatchError(f"the state {name} cannot be written: {error}; the batch can go on later") from None
        except BaseException:
            self._roll_back()
            raise

    def _roll_back(self) -> None:
        # SQLite has rolled back by itself where the disk was full; and a signal may come when all is committed.
        if self._db.in_transaction:
            self._db.execute("ROLLBACK")

    # What it is a batch of -----------------------------------------------------------------------

    @property
    def manifest(self) -> Manifest | None:
        found = {field: self.get(field) for field in Manifest._fields}
        if any(value is None for value in found.values()):
            return None
        return Manifest(**{field: str(value) for field, value in found.items()})

    def get(self, key: str) -> str | None:
        found = self._db.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
        return None if found is None else str(found[0])

    def set(self, **values: str) -> None:
        self._db.executemany("INSERT OR REPLACE INTO meta VALUES (?, ?)", values.items())

    @property
    def job(self) -> str:
        """The batch's id, a UUID that is drawn when the batch is begun."""
        job = self.get("job")
        assert job is not None, "a batch has its id from its beginning"
        return job

    @property
    def lengths_bytes(self) -> tuple[int, int]:
        """How long output and error file were when their rows were last marked as written."""
        return int(self.get("output_bytes") or 0), int(self.get("errors_bytes") or 0)

    def set_lengths(self, output_bytes: int, errors_bytes: int) -> None:
        self.set(output_bytes=str(output_bytes), errors_bytes=str(errors_bytes))

    # The lines -----------------------------------------------------------------------------------

    def begin_index(self) -> None:
        self._db.execute("DELETE FROM lines")
        self._db.execute("DELETE FROM models")
        self._db.execute("CREATE TEMP TABLE IF NOT EXISTS seen (custom_id TEXT PRIMARY KEY) WITHOUT ROWID")

    def end_index(self) -> None:
        self._db.execute("DROP TABLE seen")

    def is_first(self, custom_id: str) -> bool:
        """Whether the index has met this custom_id for the first time."""
        return self._db.execute("INSERT OR IGNORE INTO seen VALUES (?)", (custom_id,)).rowcount == 1

    def add_model(self, name: str | None) -> int:
        return int(self._db.execute("INSERT INTO models (name) VALUES (?)", (name,)).lastrowid or 0)

    def add_lines(self, lines: Iterable[IndexedLine]) -> None:
        statement = "INSERT INTO lines (number, offset, length, model, state, code, row) VALUES (?, ?, ?, ?, ?, ?, ?)"
        self._db.executemany(statement, lines)

    def set_turns(self, lanes: Iterable[tuple[int, int, int]], lane_count: int) -> None:
        """Put the waiting lines in the order in which they are sent; each lane is (model, lane, its first place)."""
        self._db.execute("CREATE TEMP TABLE lanes (model INTEGER PRIMARY KEY, lane INTEGER, start INTEGER)")
        self._db.executemany("INSERT INTO lanes VALUES (?, ?, ?)", lanes)
        self._db.execute(
            "WITH ranked AS (SELECT number AS line, model AS of_model, "
            "row_number() OVER (PARTITION BY model ORDER BY number) - 1 AS place FROM lines WHERE state = 0) "
            "UPDATE lines SET turn = (start + place) * ? + lane FROM ranked JOIN lanes ON lanes.model = of_model "
            "WHERE number = line",
            (lane_count,),
        )
        self._db.execute("DROP TABLE lanes")

    def waiting(self, after_turn: int, limit: int) -> list[WaitingLine]:
        """Lines without a row, in the order of their turns."""
        return self._waiting("turn > ? ORDER BY turn LIMIT ?", after_turn, limit)

    def waiting_among(self, numbers: Iterable[int]) -> list[WaitingLine]:
        return [line for number in numbers for line in self._waiting("number = ?", number)]

    def _waiting(self, condition: str, *values: int) -> list[WaitingLine]:
        columns = ", ".join(WaitingLine._fields)
        found = self._db.execute(f"SELECT {columns} FROM lines WHERE state = 0 AND {condition}", values)
        return [WaitingLine(*row) for row in found]

    # Rows ----------------------------------------------------------------------------------------

    def finish(self, rows: Iterable[FinishedRow]) -> None:
        """Keep the rows of lines that were waiting."""
        self._db.executemany(
            "UPDATE lines SET state = 1, code = ?, row = ? WHERE number = ? AND state = 0",
            ((code, row, number) for number, code, row in rows),
        )

    def unwritten(self, *, after: int | None, limit_bytes: int) -> list[FinishedRow]:
        """Rows for the output: any (`after` None), or those that follow the line `after` without a gap."""
        if after is None:
            found = self._db.execute("SELECT number, code, row, state FROM lines WHERE state = 1 ORDER BY number")
        else:
            found = self._db.execute(
                "SELECT number, code, row, state FROM lines WHERE number > ? ORDER BY number", (after,)
            )
        rows: list[FinishedRow] = []
        for number, code, row, state in found:
            if state != FINISHED or limit_bytes <= 0:
                break
            rows.append(FinishedRow(number, code, row))
            limit_bytes -= len(row)
        found.close()
        return rows

    def mark_written(self, numbers: Iterable[int]) -> None:
        self._db.executemany(
            "UPDATE lines SET state = 2, row = NULL WHERE number = ?", ((number,) for number in numbers)
        )

    def next_attempt(self, numbers: Iterable[int]) -> None:
        """These lines were taken back: what is sent next is another task."""
        self._db.executemany(
            "UPDATE lines SET attempt = attempt + 1 WHERE number = ? AND state = 0", ((number,) for number in numbers)
        )

    def reopen_errors(self) -> None:
        """Let the lines wait again of which a worker said that they failed."""
        self._db.execute(
            "UPDATE lines SET state = 0, attempt = attempt + 1, code = NULL, row = NULL "
            "WHERE code IS NOT NULL AND model > 0"
        )

    def put_back(self, rows: Iterable[FinishedRow]) -> None:
        """Rows that were written are to be written again."""
        self._db.executemany(
            "UPDATE lines SET state = 1, code = ?, row = ? WHERE number = ? AND state = 2",
            ((code, row, number) for number, code, row in rows),
        )

    # Figures -------------------------------------------------------------------------------------

    def is_waiting(self, number: int, attempt: int) -> bool:
        found = self._db.execute("SELECT state, attempt FROM lines WHERE number = ?", (number,)).fetchone()
        return bool(found == (WAITING, attempt))

    def last_written(self) -> int:
        """The last line of those that are written without a gap from the first one on."""
        found = self._db.execute("SELECT number FROM lines WHERE state != 2 ORDER BY number LIMIT 1").fetchone()
        return self.count() if found is None else int(found[0]) - 1

    def count(self) -> int:
        return int(self._one("SELECT count(*) FROM lines"))

    def count_done(self) -> int:
        return int(self._one("SELECT count(*) FROM lines WHERE state > 0"))

    def errors(self) -> dict[str, int]:
        """How many rows there are of each kind of error, the most frequent first."""
        found = self._db.execute(
            "SELECT code, count(*) FROM lines WHERE code IS NOT NULL GROUP BY code ORDER BY count(*) DESC, code"
        )
        return dict(found.fetchall())

    def first_errors(self, code: str, limit: int) -> list[int]:
        """The first lines with an error of a kind."""
        found = self._db.execute("SELECT number FROM lines WHERE code = ? ORDER BY number LIMIT ?", (code, limit))
        return [int(number) for (number,) in found]

    def models(self) -> list[ModelCount]:
        """The models that lines name, by id."""
        found = self._db.execute(
            "SELECT models.id, name, count(*), sum(state > 0) FROM lines JOIN models ON model = models.id "
            "GROUP BY models.id ORDER BY models.id"
        )
        return [ModelCount(*row) for row in found]

    def shrink(self) -> None:
        """Give the room of rows that are written back to the disk."""
        self._db.execute("VACUUM")

    def _one(self, statement: str) -> Any:
        return self._db.execute(statement).fetchone()[0]
