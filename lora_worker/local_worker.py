"""A worker process of one's own, as an operator starts it, for as long as a command runs."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from celery.exceptions import TimeoutError as ResultTimeoutError

from lora_worker.client import Client
from lora_worker.embedded import end_with_parent
from lora_worker.errors import LocalWorkerError

START_SECONDS = 120.0
STOP_SECONDS = 30.0


@contextmanager
def local_worker(
    name: str,
    redis_url: str,
    environment: Mapping[str, str],
    *,
    folder: Path | None = None,
    start_seconds: float = START_SECONDS,
) -> Iterator[subprocess.Popen[bytes]]:
    """A worker on `redis_url`, ready to answer; ends with the block.

    LocalWorkerError where it doesn't start within `start_seconds`.

    `folder` is the directory it runs in, whose `.env` it reads; the caller's where it is left out.
    """
    command = [sys.executable, "-m", "celery", "-A", "lora_worker", "worker", "-n", f"{name}@%h", "-l", "INFO"]
    with tempfile.TemporaryFile("w+") as log:
        # In a session of its own, so that Ctrl-C reaches the command alone, which then stops the worker.
        process = subprocess.Popen(
            command,
            cwd=folder,
            env={**environment, "LORA_WORKER_REDIS_URL": redis_url},
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=end_with_parent,
        )
        try:
            _wait_until_ready(process, redis_url, log, start_seconds)
            yield process
        finally:
            process.terminate()
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait_until_ready(process: subprocess.Popen[bytes], redis_url: str, log: Any, seconds: float) -> None:
    client = Client(redis_url)
    result = client.list_lora_adapters()
    end = time.monotonic() + seconds
    try:
        while time.monotonic() < end and process.poll() is None:
            try:
                result.get(timeout=1)
                return
            except ResultTimeoutError:
                continue
    finally:
        client.close()
    log.seek(0)
    raise LocalWorkerError(f"the worker did not start; the end of its log:\n{log.read()[-2000:]}")
