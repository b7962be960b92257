"""`lora-worker batch --local`: a Redis and a worker of the command's own, which end with it and not before."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from support.batch_command import BatchCommand, read_rows, request, write_lines
from support.worker_process import wait_for

LINES = 200


@pytest.fixture
def settings(worker_settings: dict[str, Any]) -> dict[str, Any]:
    root = worker_settings["adapter_roots"]
    return {
        "model": worker_settings["model"],
        "lora_paths": f"adapter-0={root / 'adapter-0'}",
        "dtype": "float32",
        "max_running_requests": 4,
        "drain_seconds": 0,
    }


@pytest.fixture
def running(settings: dict[str, Any], tmp_path: Path) -> BatchCommand:
    """A batch that has written a row and is far from its end."""
    lines = (request(f"c{i}", f"w{i % 100}", max_tokens=200, ignore_eos=True) for i in range(LINES))
    write_lines(tmp_path / "in.jsonl", lines)
    batch = BatchCommand(None, tmp_path, "--local", "--max-in-flight", "20", **settings)
    wait_for(lambda: (tmp_path / "out.jsonl").exists() and read_rows(tmp_path / "out.jsonl"), "a row is written")
    assert batch.process.poll() is None, batch.said
    return batch


def children(batch: BatchCommand) -> dict[str, int]:
    """The processes that a command has started, by their command lines."""
    found = subprocess.run(
        ["ps", "-o", "pid=,args=", "--ppid", str(batch.process.pid)], capture_output=True, text=True, check=True
    )
    return {line.split(maxsplit=1)[1]: int(line.split(maxsplit=1)[0]) for line in found.stdout.splitlines()}


def test_local_starts_a_redis_and_a_worker_of_its_own(settings: dict[str, Any], tmp_path: Path) -> None:
    models = [{"model": "adapter-0"}, {}]
    write_lines(tmp_path / "in.jsonl", [request(f"c{i}", f"w{i}", **models[i % 2]) for i in range(20)])
    ended = BatchCommand(None, tmp_path, "--local", **settings).end(seconds=300)
    assert (ended.code, ended.output) == (0, "20 lines: 20 answered, 0 failed.\n"), ended.errors
    assert [row["custom_id"] for row in read_rows(tmp_path / "out.jsonl")] == [f"c{i}" for i in range(20)]


def test_ctrl_c_in_the_terminal_collects_what_is_in_flight(running: BatchCommand, tmp_path: Path) -> None:
    running.interrupt()
    ended = running.end()
    assert ended.code == 130, ended.errors
    assert "No more lines are sent" in ended.errors
    rows = read_rows(tmp_path / "out.jsonl")
    assert 20 <= len(rows) < LINES
    assert all(row["error"] is None for row in rows)


def test_a_worker_that_dies_ends_the_command_with_the_end_of_its_log(running: BatchCommand) -> None:
    (worker,) = (pid for command, pid in children(running).items() if "celery" in command)
    os.kill(worker, signal.SIGKILL)
    ended = running.end()
    assert ended.code == 1
    assert "the worker has ended with code -9; the end of its log:" in ended.errors
    assert "INFO" in ended.errors
    assert "Traceback" not in ended.errors
