"""The command, as far as it needs no Redis: checks, refusals, summaries, exit codes."""

from __future__ import annotations

import gzip
import json
import random
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from lora_worker.batch.output import Output, OutputFile
from lora_worker.batch.store import FinishedRow
from lora_worker.cli import cli
from lora_worker.errors import BatchError


def run(*arguments: str, text: str | None = None) -> Result:
    return CliRunner().invoke(cli, ["batch", *arguments], input=text)


def refused(*arguments: str, text: str | None = None) -> str:
    error = run(*arguments, text=text).exception
    assert isinstance(error, BatchError), error
    return str(error)


@pytest.fixture(autouse=True)
def bad_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of which no line can be sent, so that nobody is asked anything."""
    monkeypatch.chdir(tmp_path)
    Path("in").write_text('{"prompt": ""\n[]\n{"x": 1}\n')


def rows(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(name).read_text().splitlines()]


def test_a_batch_whose_rows_all_failed_says_so() -> None:
    ran = run("in", "-o", "out")
    assert ran.exit_code == 3
    assert ran.stdout.splitlines() == [
        "All 3 rows failed.",
        "  invalid_json: 1 (line 1)",
        "  missing_field: 1 (line 3)",
        "  not_an_object: 1 (line 2)",
    ]
    assert [(row["error"]["line"], row["response"]) for row in rows("out")] == [(1, None), (2, None), (3, None)]


def test_the_same_command_again_changes_nothing() -> None:
    run("in", "-o", "out")
    before = Path("out").read_bytes()
    assert run("in", "-o", "out").exit_code == 3
    assert Path("out").read_bytes() == before


def test_error_rows_go_apart_and_files_may_be_packed() -> None:
    ran = run("in", "-o", "out.gz", "--errors", "errors.gz")
    assert ran.exit_code == 3
    assert Path("out.gz").read_bytes() == b""
    assert len(gzip.decompress(Path("errors.gz").read_bytes()).splitlines()) == 3


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_retrying_keeps_the_rows_that_are_not_sent_again(suffix: str) -> None:
    files = ["-o", f"out{suffix}", "--errors", f"errors{suffix}"]
    run("in", *files)
    before = Path(f"errors{suffix}").read_bytes()
    with Path(f"errors{suffix}").open("ab") as file:
        file.write(before[:20])  # torn by a kill
    assert run("in", *files, "--retry-errors").exit_code == 3
    unpack = gzip.decompress if suffix else bytes
    assert unpack(Path(f"errors{suffix}").read_bytes()) == unpack(before)


def test_an_empty_input_is_a_batch_of_nothing() -> None:
    Path("in").write_text("\n\n")
    ran = run("in", "-o", "out")
    assert (ran.exit_code, ran.stdout) == (0, "0 lines: 0 answered, 0 failed.\n")
    assert Path("out").read_bytes() == b""


@pytest.mark.parametrize(
    ("change", "options", "words"),
    [
        ('{"prompt": ""\n', [], ["the input had 26 bytes of other content and now has 14"]),
        (None, ["--model", "a"], ["--model was not given and is now a"]),
        (None, ["--order", "completion"], ["--order was input and is now completion"]),
        (None, ["--errors", "errors"], ["--errors was not given and is now", "errors"]),
    ],
)
def test_another_batch_under_the_same_output_is_refused_with_what_differs(
    change: str | None, options: list[str], words: list[str]
) -> None:
    run("in", "-o", "out")
    before = Path("out").read_bytes()
    if change:
        Path("in").write_text(change)
    sentence = refused("in", "-o", "out", *options)
    for word in ("out belongs to another batch", "out.batch", *words):
        assert word in sentence
    assert Path("out").read_bytes() == before


def test_files_that_would_be_overwritten_are_refused() -> None:
    Path("mine").write_text("my notes\n")
    assert "mine is there, but not mine.batch" in refused("in", "-o", "mine")
    assert Path("mine").read_text() == "my notes\n"
    assert "different files" in refused("in", "-o", "in")
    assert "different files" in refused("in", "-o", "out", "--errors", "./out")
    assert "does not exist" in refused("in", "-o", "nowhere/out")
    Path("x.batch").write_text('{"prompt": "p"}\n')
    assert "different files" in refused("x.batch", "-o", "x")
    assert "different files" in refused("in", "-o", "out", "--errors", "out.batch")
    assert "no earlier run" in refused("in", "-o", "out", "--retry-errors")
    assert "cannot be read" in refused("nothing", "-o", "out")


def test_rows_that_somebody_edited_are_not_tried_again() -> None:
    run("in", "-o", "out")
    written = Path("out").read_bytes()
    for torn in (written.replace(b'"error"', b'"errxr"'), written.replace(b"}\n", b"]\n"), b"[]" + written[2:]):
        Path("out").write_bytes(torn)
        assert "out holds what this batch has not written" in refused("in", "-o", "out", "--retry-errors")
        assert Path("out").read_bytes() == torn


@contextmanager
def no_file_over(limit_bytes: int) -> Iterator[None]:
    """Whoever writes more into a file gets an error, as on a disk that is full."""
    before, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, most))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (before, most))


@pytest.mark.parametrize("name", ["out", "out.gz"])
def test_an_output_without_room_is_said_in_one_sentence_and_can_be_gone_on_with(name: str) -> None:
    rows = [FinishedRow(i, None, random.randbytes(4000).hex().encode() + b"\n") for i in range(3)]
    path = Path(name)
    output = Output(OutputFile(path, 0), None)
    limit = 10_000 if path.suffix else 20_000
    with no_file_over(limit):
        output.append(rows[:2])
        with pytest.raises(BatchError, match="cannot be written"):
            output.append(rows[2:])
        output.close()
    assert path.stat().st_size == limit
    with Output(OutputFile(path, output.lengths_bytes[0]), None) as again:
        again.append(rows[2:])
    found = path.read_bytes()
    assert (gzip.decompress(found) if path.suffix else found) == b"".join(row.row for row in rows)


def test_a_copy_of_the_input_without_room_or_folder_is_said_in_one_sentence() -> None:
    text = json.dumps({"prompt": "p" * 100_000})
    Path("in.gz").write_bytes(gzip.compress(text.encode()))
    for source in ("-", "in.gz"):
        with no_file_over(50_000):
            sentence = refused(source, "-o", "out", "--dry-run", text=text)
        assert "cannot be copied to" in sentence
        assert "nowhere" in refused(source, "-o", "nowhere/out", "--dry-run", text=text)


def test_a_dry_run_counts_and_writes_nothing() -> None:
    lines = [{"prompt": "p", "model": "a"}, {"prompt": "p"}, {"prompt": "p", "model": "a"}, {"prompt": 3}]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    ran = run("-", "-o", "out", "--dry-run", text=text)
    assert ran.stdout.splitlines() == [
        "4 lines: 3 can be sent, 1 cannot.",
        "  a: 2",
        "  (base): 1",
        "  invalid_request: 1 (line 4)",
    ]
    assert ran.exit_code == 3
    assert [path.name for path in Path().iterdir()] == ["in"]
    assert run("-", "-o", "out", "--dry-run", text=json.dumps(lines[0])).exit_code == 0


def test_a_local_run_without_a_model_says_what_is_missing() -> None:
    Path("in").write_text('{"prompt": "p"}\n')
    assert "LORA_WORKER_MODEL" in str(run("in", "-o", "out", "--local").exception)
