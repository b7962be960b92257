"""The output files: rows are appended, and what a kill tore is cut off."""

from __future__ import annotations

import gzip
import json
import os
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

from lora_worker.batch.rows import number_of
from lora_worker.batch.store import FinishedRow
from lora_worker.errors import BatchError


class OutputFile:
    """A file of rows, gzip where its name ends with .gz; each append is a gzip member, so it can be cut between them.

    Args:
        length_bytes: how long it was when its state was last kept. What is beyond was torn by a kill, or is known to
            the state as unwritten, and is cut off; BatchError where the file is shorter.
    """

    def __init__(self, path: Path, length_bytes: int) -> None:
        self.path = path
        self._is_gzip = path.suffix == ".gz"
        try:
            self._file = path.open("ab", buffering=0)  # so that closing it writes nothing, and can't fail
        except OSError as error:
            raise BatchError(f"the output {path} cannot be written: {error.strerror}") from None
        found = self._file.tell()
        if found < length_bytes:
            self._file.close()
            raise BatchError(
                f"{path} has {found} bytes, but {length_bytes} were written; somebody has changed it. Give another "
                f"output, or remove it and its state to begin again"
            )
        self._file.truncate(length_bytes)
        self.length_bytes = length_bytes

    def append(self, rows: Iterable[bytes]) -> None:
        """Write rows, down to the disk."""
        data = b"".join(rows)
        if not data:
            return
        try:
            left = memoryview(gzip.compress(data, 6) if self._is_gzip else data)
            while left:
                left = left[self._file.write(left) :]
            os.fsync(self._file.fileno())
        except OSError as error:
            raise BatchError(
                f"the output {self.path} cannot be written: {error.strerror}; the batch can go on"
            ) from None
        self.length_bytes = self._file.tell()

    def close(self) -> None:
        self._file.close()


class Output:
    """OUT, and ERR where error rows go apart."""

    def __init__(self, rows: OutputFile, errors: OutputFile | None) -> None:
        self._rows = rows
        self._errors = errors

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        self._rows.close()
        if self._errors is not None:
            self._errors.close()

    def append(self, rows: Iterable[FinishedRow]) -> None:
        if self._errors is None:
            self._rows.append(row.row for row in rows)
            return
        rows = list(rows)
        self._rows.append(row.row for row in rows if row.code is None)
        self._errors.append(row.row for row in rows if row.code is not None)

    @property
    def lengths_bytes(self) -> tuple[int, int]:
        return self._rows.length_bytes, 0 if self._errors is None else self._errors.length_bytes


def read_rows(path: Path) -> Iterator[FinishedRow]:
    """The rows of an output that nothing tore, one at a time; BatchError where it is not as it was written."""
    try:
        with path.open("rb") as file:
            for line in gzip.GzipFile(fileobj=file) if path.suffix == ".gz" else file:
                row = json.loads(line)
                error = row["error"]
                yield FinishedRow(number_of(row["id"]), None if error is None else error["code"], line)
    except (KeyError, TypeError, AttributeError, ValueError, EOFError, OSError, zlib.error) as error:
        raise BatchError(
            f"{path} holds what this batch has not written ({error}); somebody has changed it. Give another output, or "
            f"remove it and its state to begin again"
        ) from None
