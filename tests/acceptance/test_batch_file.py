"""A hundred thousand lines through a fleet whose client, worker and Redis are killed on the way."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from redis import Redis
from support.batch_command import BatchCommand, read_rows, request, write_lines
from support.fleet import Fleet
from support.worker_process import WorkerProcess

from lora_worker.batch.flight import FREED_SECONDS
from lora_worker.demo.model import prepare_model
from lora_worker.demo.run import ADAPTERS as DEMO_ADAPTERS
from lora_worker.embedded import EmbeddedServer
from lora_worker.testing.adapters import digest_of
from lora_worker.testing.rows import answer_text

from .conftest import Say

ADAPTERS = 50
TOKENS = 8
ROWS = 64
LONGEST_SECONDS = 3000.0
LOOK_SECONDS = 1.0

_SUCCEEDED = re.compile(r"Task lora_worker\.generate\[([0-9a-f-]+)\] succeeded")


@pytest.fixture(autouse=True)
def pace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACED_TOKENS_PER_SECOND", "200")
    monkeypatch.setenv("PACED_LOAD_SECONDS", "0.05")


def write_input(path: Path, names: list[str], count: int) -> list[str]:
    """Lines of mixed adapters; returns the adapter of each."""
    chance = random.Random(3)
    models = [chance.choice(names) for _ in range(count)]
    write_lines(
        path, (request(f"c{i}", f"prompt {i}", model=model, max_tokens=TOKENS) for i, model in enumerate(models))
    )
    return models


def runs(fleet: Fleet) -> Counter[str]:
    """How often each task was run to its end, as the workers' logs tell."""
    counted: Counter[str] = Counter()
    for worker in fleet.workers:
        counted.update(_SUCCEEDED.findall(worker.log))
    return counted


def wait_until(condition: Callable[[], bool], batch: BatchCommand) -> None:
    """Wait without reading megabytes of log fifty times a second."""
    end = time.monotonic() + LONGEST_SECONDS
    while not condition():
        assert batch.process.poll() is None, f"the batch has ended:\n{batch.said}"
        assert time.monotonic() < end, f"the batch does not move:\n{batch.said}"
        time.sleep(LOOK_SECONDS)


def kill_redis(server: EmbeddedServer) -> None:
    """kill -9, and a start with what it had appended to its log."""
    with Redis(port=server.port) as connection:
        information: Any = connection.info("server")
    os.kill(information["process_id"], signal.SIGKILL)
    server.stop()
    server.start()


def peak_bytes(process: subprocess.Popen[Any] | None) -> int:
    """The most memory a process has had so far; 0 where it has ended."""
    assert process is not None
    status = Path(f"/proc/{process.pid}/status").read_text()
    return sum(int(size) * 1024 for size in re.findall(r"VmHWM:\s+(\d+) kB", status))


def peak_bytes_at_the_end(batch: BatchCommand) -> int:
    """Wait until the batch has ended, and return the most memory it had when it was last seen."""
    peak = 0
    end = time.monotonic() + LONGEST_SECONDS
    while batch.process.poll() is None and time.monotonic() < end:
        peak = max(peak, peak_bytes(batch.process))
        time.sleep(LOOK_SECONDS)
    return peak


@pytest.mark.parametrize("count", [2_000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_a_batch_survives_its_client_a_worker_and_redis(
    server: EmbeddedServer, tmp_path: Path, say: Say, count: int
) -> None:
    with Fleet(server, tmp_path, 2, ADAPTERS, max_running_requests=ROWS) as fleet:
        models = write_input(tmp_path / "in.jsonl", fleet.adapters, count)
        # So few that the workers do not come to the next kill without the command.
        in_flight = ("--max-in-flight", str(count // 20))
        started = time.monotonic()

        batch = BatchCommand(server, tmp_path, *in_flight)
        wait_until(lambda: runs(fleet).total() > count * 0.2, batch)
        killed_bytes = peak_bytes(batch.process)
        batch.kill()
        batch = BatchCommand(server, tmp_path, *in_flight)
        wait_until(lambda: runs(fleet).total() > count * 0.4, batch)
        fleet.kill(fleet.workers[0])
        fleet.add()
        wait_until(lambda: runs(fleet).total() > count * 0.6, batch)
        with Redis(port=server.port) as connection:
            before: Any = connection.info("memory")
        kill_redis(server)
        client_bytes = max(killed_bytes, peak_bytes_at_the_end(batch))
        ended = batch.end()

        seconds = time.monotonic() - started
        assert (ended.code, ended.output) == (0, f"{count:,} lines: {count:,} answered, 0 failed.\n"), ended.errors
        check_rows(tmp_path, fleet, models)
        fleet.check_nothing_is_left()
        with Redis(port=server.port) as connection:
            after: Any = connection.info("memory")
            assert not list(connection.scan_iter("lora:batch:*"))
            answers = list(connection.scan_iter("celery-task-meta-*"))
            unfreed = sum(int(connection.ttl(answer)) > FREED_SECONDS for answer in answers)
        counted = runs(fleet)
        twice = sum(times - 1 for times in counted.values())
        # A row that ran once more after its answer was taken leaves an answer that nobody takes.
        assert max(unfreed, twice) <= 2 * ROWS
        redis_bytes = max(before["used_memory_peak"], after["used_memory_peak"])
        workers_bytes = [peak_bytes(worker.process) for worker in fleet.workers[1:]]
        say(
            f"{count} lines in {seconds:.0f} s, in order, each once; run to the end twice "
            f"{twice}, untaken {unfreed}; peak memory in MB: client {client_bytes / 1e6:.0f}, "
            f"workers {[round(size / 1e6) for size in workers_bytes]}, Redis {redis_bytes / 1e6:.0f}; "
            f"state left {(tmp_path / 'out.jsonl.batch').stat().st_size / 1e6:.1f} MB"
        )


def check_rows(folder: Path, fleet: Fleet, models: list[str]) -> None:
    """Every line has its row, once, in order, with the answer of its own adapter."""
    digests = {name: digest_of(folder / "adapters" / name) for name in fleet.adapters}
    with (folder / "out.jsonl").open() as rows:
        for i, (model, line) in enumerate(zip(models, rows, strict=True)):
            row = json.loads(line)
            assert row["custom_id"] == f"c{i}"
            assert row["response"]["body"]["choices"][0]["text"] == answer_text(digests[model], f"prompt {i}")


@pytest.mark.parametrize("count", [2_000, pytest.param(10_000, marks=pytest.mark.slow)])
def test_each_adapter_is_loaded_about_once_for_a_whole_file(
    server: EmbeddedServer, tmp_path: Path, say: Say, count: int
) -> None:
    with Fleet(server, tmp_path, 1, ADAPTERS, max_loras_per_batch=8) as fleet:
        write_input(tmp_path / "in.jsonl", fleet.adapters, count)
        ended = BatchCommand(server, tmp_path).end(LONGEST_SECONDS)
        assert ended.code == 0, ended.errors
        (stats,) = fleet.client.app.control.inspect(timeout=3).stats().values()
        loads = stats["pool"]["lora"]["pool"]["loads"]
        say(f"{count} shuffled lines, {ADAPTERS} adapters, 8 slots: {loads} loads, {loads / ADAPTERS:.2f} an adapter")
        assert loads <= 3 * ADAPTERS, "in their own order the lines would make about one load each"


@pytest.mark.parametrize("count", [pytest.param(5_000, marks=pytest.mark.slow)])
def test_thousands_of_lines_through_the_small_real_model(
    server: EmbeddedServer, tmp_path: Path, say: Say, count: int
) -> None:
    names = ["pirate", "json", "sentiment"]
    settings = {
        "model": prepare_model(),
        "lora_paths": ",".join(f"{name}={DEMO_ADAPTERS / name}" for name in names),
        "max_model_len": 256,
        "lease_seconds": 5,
    }
    lines: list[dict[str, Any]] = [
        {
            "custom_id": f"c{i}",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {"messages": [{"role": "user", "content": f"Say {i}."}], "max_tokens": 2, "temperature": 0}
            | ({"model": name} if (name := [*names, None][i * 7 % 4]) else {}),
        }
        for i in range(count)
    ]
    write_lines(tmp_path / "in.jsonl", lines)
    (tmp_path / "worker").mkdir()
    with WorkerProcess(server, tmp_path / "worker", settings) as worker:
        worker.wait_until_ready()
        started = time.monotonic()
        batch = BatchCommand(server, tmp_path)
        client_bytes = peak_bytes_at_the_end(batch)
        ended = batch.end()
        seconds = time.monotonic() - started
        assert (ended.code, ended.output) == (0, f"{count:,} lines: {count:,} answered, 0 failed.\n"), ended.errors
        say(
            f"{count} lines in {seconds:.0f} s; peak memory in MB: client {client_bytes / 1e6:.0f}, "
            f"worker {peak_bytes(worker.process) / 1e6:.0f}"
        )
    rows = read_rows(tmp_path / "out.jsonl")
    assert [row["custom_id"] for row in rows] == [line["custom_id"] for line in lines]
    for line, row in zip(lines, rows, strict=True):
        assert row["response"]["body"]["lora_worker"]["adapter"] == line["body"].get("model")
