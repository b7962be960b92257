"""Inputs: plain, gzip, pipes, long lines, and files that somebody changes."""

from __future__ import annotations

import gzip
import os
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest

from lora_worker.batch.lines import MAX_LINE_BYTES
from lora_worker.batch.source import open_source
from lora_worker.errors import BatchError

CONTENT = b"first\r\n\nsecond\nlast"


def lines_of(path: Path) -> list[tuple[int, bytes | None, bytes]]:
    """Number and data of each line, and the data again by its place."""
    with open_source(str(path), spool_folder=path.parent) as source:
        return [(line.number, line.data, source.read(line.offset, line.length)) for line in list(source.lines())]


@pytest.mark.parametrize(
    "content",
    [CONTENT, gzip.compress(CONTENT), gzip.compress(b"first\r\n\nsec") + gzip.compress(b"ond\nlast")],
    ids=["plain", "gz", "two-gz"],
)
def test_lines_are_the_same_however_they_are_packed(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "in").write_bytes(content)
    whole = [b"first\r\n", b"\n", b"second\n", b"last"]
    assert lines_of(tmp_path / "in") == [(i, line, line) for i, line in enumerate(whole, 1)]


@pytest.mark.parametrize("content", [CONTENT, gzip.compress(CONTENT)], ids=["plain", "gz"])
def test_the_standard_input_and_pipes_can_be_read_again(tmp_path: Path, content: bytes) -> None:
    script = (
        "import sys, pathlib\nfrom lora_worker.batch.source import open_source\n"
        "with open_source(sys.argv[1], spool_folder=pathlib.Path()) as source:\n"
        "    print(source.fingerprint(), source.size_bytes, [line.data for line in source.lines()])"
    )
    for name in ("-", "/dev/stdin"):
        ran = subprocess.run([sys.executable, "-c", script, name], input=content, capture_output=True, cwd=tmp_path)
        assert str(CONTENT.splitlines(keepends=True)).encode() in ran.stdout, ran.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_long_line_is_never_held_in_memory(tmp_path: Path) -> None:
    with (tmp_path / "in").open("wb") as file:
        file.write(b"first\n" + b"x" * MAX_LINE_BYTES + b"\n")
        for _ in range(12):
            file.write(b"x" * MAX_LINE_BYTES)
        file.write(b"\nlast\n")
    tracemalloc.start()
    with open_source(str(tmp_path / "in"), spool_folder=tmp_path) as source:
        found = [(line.number, line.length, line.data and line.data[:5]) for line in source.lines()]
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert found == [
        (1, 6, b"first"),
        (2, MAX_LINE_BYTES + 1, b"xxxxx"),
        (3, 12 * MAX_LINE_BYTES + 1, None),
        (4, 5, b"last\n"),
    ]
    assert peak < 5 * MAX_LINE_BYTES


def test_a_file_that_is_changed_meanwhile_ends_the_batch(tmp_path: Path) -> None:
    path = tmp_path / "in"
    path.write_bytes(CONTENT)
    with open_source(str(path), spool_folder=tmp_path) as source:
        with path.open("ab") as file:
            file.write(b"more\n")
        with pytest.raises(BatchError, match="changed"):
            source.read(0, 5)


def test_what_cannot_be_read_is_said(tmp_path: Path) -> None:
    (tmp_path / "torn.gz").write_bytes(gzip.compress(os.urandom(5000))[:-200])
    for name, word in (("missing", "No such file"), (".", "directory"), ("torn.gz", "damaged gzip")):
        with pytest.raises(BatchError, match=word), open_source(str(tmp_path / name), spool_folder=tmp_path):
            pass
