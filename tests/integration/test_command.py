"""`lora-worker` as an operator runs it, on workers that take their time, on two fleets, and without a Redis."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from redis import Redis
from support.batch_command import COMMAND, BatchCommand
from support.paced import PacedWorkerProcess, write_paced_adapter
from support.worker_process import wait_for

from lora_worker.embedded import EmbeddedServer

from .test_tasks import running_rows

# With less patience than the command has.
IMPATIENT = """
from lora_worker import cli, cli_redis
cli_redis.ANSWER_SECONDS = 1.0
cli.main()
"""


@pytest.fixture
def own_server() -> Iterator[EmbeddedServer]:
    with EmbeddedServer() as started:
        yield started


def start(redis_url: str, *arguments: str, program: str | None = None, **settings: Any) -> subprocess.Popen[str]:
    given = {"redis_url": redis_url, **settings}
    environment = {f"LORA_WORKER_{name.upper()}": str(value) for name, value in given.items()}
    command = [sys.executable, "-c", program] if program else [str(COMMAND)]
    return subprocess.Popen(
        [*command, *arguments],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(redis_url: str, *arguments: str, **options: Any) -> tuple[int, str, str]:
    process = start(redis_url, *arguments, **options)
    output, errors = process.communicate()
    return process.returncode, output, errors


def test_an_answer_is_awaited_while_workers_live(own_server: EmbeddedServer, tmp_path: Path) -> None:
    (tmp_path / "worker").mkdir()
    folder = write_paced_adapter(tmp_path / "adapters" / "a", "a")
    with PacedWorkerProcess(
        own_server, tmp_path / "worker", {"lora_paths": f"a={folder}", "lease_seconds": 2}
    ) as worker:
        worker.wait_until_ready()
        client = worker.client()
        endless = client.generate(model="a", prompt="x", max_tokens=10**6)
        wait_for(lambda: running_rows(client) == 1, "a row runs")
        unload = start(own_server.url, "adapters", "unload", "a", program=IMPATIENT)
        assert unload.stderr is not None
        for _ in range(2):
            assert "has not answered yet; 1 workers live" in unload.stderr.readline()
        client.cancel(endless.id)
        output, _ = unload.communicate()
        assert (unload.returncode, json.loads(output)["success"]) == (0, True)
        client.close()
        worker.send_signal(signal.SIGKILL)
        worker.wait_until_ended()
        code, _, errors = run(own_server.url, "adapters", "list", program=IMPATIENT)
        assert (code, "no worker answered within" in errors, "Traceback" in errors) == (1, True, False)


@pytest.mark.parametrize(
    "arguments",
    [
        ["status"],
        ["adapters", "list"],
        ["adapters", "load", "a", "a"],
        ["adapters", "unload", "a"],
        ["adapters", "pin", "a"],
        ["batch", "in.jsonl", "-o", "out.jsonl"],
    ],
    ids=" ".join,
)
def test_without_a_redis_every_command_ends_with_one_sentence(arguments: list[str]) -> None:
    Path("in.jsonl").write_text('{"prompt": "p"}\n')
    code, output, errors = run("redis://:secret@127.0.0.1:1/0", *arguments)
    assert (code, output) == (1, "")
    assert errors.startswith("lora-worker: Redis at redis://***@127.0.0.1:1/0 does not answer (")
    assert len(errors.splitlines()) == 1


def test_a_redis_that_goes_while_an_answer_is_awaited_ends_the_command_with_one_sentence(
    own_server: EmbeddedServer,
) -> None:
    waiting = start(own_server.url, "adapters", "list")
    with Redis(port=own_server.port) as connection:
        wait_for(lambda: connection.llen("lora.manage"), "the command has asked")
    own_server.stop()
    _, errors = waiting.communicate()
    assert (waiting.returncode, "does not answer" in errors, len(errors.splitlines())) == (1, True, 1), errors
    own_server.start()


def test_of_two_fleets_on_one_redis_each_command_sees_its_own(own_server: EmbeddedServer, tmp_path: Path) -> None:
    (tmp_path / "worker").mkdir()
    with PacedWorkerProcess(own_server, tmp_path / "worker", {"queue_prefix": "other"}) as worker:
        worker.wait_until_ready()
        code, output, _ = run(own_server.url, "status")
        assert (code, "No worker answers." in output) == (1, True)
        code, output, _ = run(own_server.url, "status", queue_prefix="other")
        assert (code, "No worker answers." in output) == (0, False)
        (tmp_path / "in.jsonl").write_text('{"prompt": "p", "max_tokens": 1}\n')
        batch = BatchCommand(own_server, tmp_path)
        wait_for(lambda: "No worker answers; the lines wait" in batch.said, "no other fleet's worker is counted")
        batch.kill()
        (tmp_path / "out.jsonl").unlink()
        (tmp_path / "out.jsonl.batch").unlink()
        assert BatchCommand(own_server, tmp_path, queue_prefix="other").end().code == 0
