"""Where the lines come from: a file, a gzip file or the standard input, as one file that can be read again."""

from __future__ import annotations

import gzip
import hashlib
import os
import shutil
import stat
import sys
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, Any, NamedTuple

from lora_worker.batch.lines import MAX_LINE_BYTES
from lora_worker.errors import BatchError

STANDARD_INPUT = "-"
HASH_BYTES = 1024 * 1024
_GZIP_MAGIC = b"\x1f\x8b"


class RawLine(NamedTuple):
    """A line as it stands in the file; `data` is None where it is longer than MAX_LINE_BYTES."""

    number: int
    offset: int
    length: int
    data: bytes | None


class Source:
    """A seekable file of lines; BatchError where it is changed by somebody while it is read."""

    def __init__(self, file: IO[bytes], name: str) -> None:
        self._file = file
        self._name = name
        self._state = self._look()

    def fingerprint(self) -> str:
        """SHA-256 of the content, in hexadecimal."""
        self._file.seek(0)
        digest = hashlib.sha256()
        while part := self._file.read(HASH_BYTES):
            digest.update(part)
        return digest.hexdigest()

    @property
    def size_bytes(self) -> int:
        return os.fstat(self._file.fileno()).st_size

    def lines(self) -> Iterator[RawLine]:
        """All lines in order; no more than one is held in memory, and none that is too long."""
        self._file.seek(0)
        number = offset = 0
        while data := self._file.readline(MAX_LINE_BYTES + 1):
            number += 1
            length = len(data)
            is_whole = data.endswith(b"\n") or length <= MAX_LINE_BYTES
            while not is_whole:
                rest = self._file.readline(MAX_LINE_BYTES)
                length += len(rest)
                is_whole = rest.endswith(b"\n") or not rest
                data = b""
            yield RawLine(number, offset, length, data or None)
            offset += length
        self._check_unchanged()

    def read(self, offset: int, length: int) -> bytes:
        """A line of which the place is known."""
        self._file.seek(offset)
        data = self._file.read(length)
        self._check_unchanged()
        return data

    def _check_unchanged(self) -> None:
        if self._look() != self._state:
            raise BatchError(
                f"{self._name} was changed while it was being read; let nobody write to it and start again"
            )

    def _look(self) -> tuple[int, int]:
        found = os.fstat(self._file.fileno())
        return found.st_size, found.st_mtime_ns


@contextmanager
def open_source(path: str, *, spool_folder: Path) -> Iterator[Source]:
    """Open IN. What can't be read twice is copied to a nameless file in `spool_folder`, which is gone at the end."""
    with ExitStack() as files:
        file: IO[bytes] = sys.stdin.buffer
        if path != STANDARD_INPUT:
            try:
                file = files.enter_context(Path(path).open("rb"))
            except OSError as error:
                raise BatchError(f"the input {path} cannot be read: {error.strerror}") from None
        name = "the standard input" if path == STANDARD_INPUT else path
        if path == STANDARD_INPUT or not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            file = files.enter_context(_copy(file, name, spool_folder))
        if _is_gzip(file):
            file = files.enter_context(_copy(gzip.GzipFile(fileobj=file), name, spool_folder))
        yield Source(file, name)


def _is_gzip(file: IO[bytes]) -> bool:
    file.seek(0)
    is_gzip = file.read(len(_GZIP_MAGIC)) == _GZIP_MAGIC
    file.seek(0)
    return is_gzip


def _copy(file: Any, name: str, folder: Path) -> IO[bytes]:
    try:
        spool = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - the caller closes it
    except OSError as error:
        raise BatchError(f"{name} cannot be copied to {folder}: {error.strerror}") from None
    try:
        shutil.copyfileobj(file, spool)
        spool.flush()
    except BaseException as error:
        with suppress(OSError):  # it tries once more to write what there is no room for
            spool.close()
        if isinstance(error, EOFError | gzip.BadGzipFile | zlib.error):
            raise BatchError(f"{name} is a damaged gzip file: {error}") from None
        if isinstance(error, OSError):
            raise BatchError(f"{name} cannot be copied to {folder}: {error.strerror}") from None
        raise
    return spool
