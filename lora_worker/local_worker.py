"""A worker process of one's own, as an operator starts it, for as long as a command runs."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import IO, NamedTuple

from celery.exceptions import TimeoutError as ResultTimeoutError

from lora_worker.client import Client
from lora_worker.embedded import end_with_parent
from lora_worker.errors import LocalWorkerError

LOOK_SECONDS = 1.0
LOG_CHARACTERS = 2000
STOP_SECONDS = 30.0


class LocalWorker(NamedTuple):
    """A worker that runs, and the file that it writes its log to."""

    process: subprocess.Popen[bytes]
    log: IO[str]

    def check(self) -> None:
        """Raise LocalWorkerError, with the end of its log, where it has ended."""
        if self.process.poll() is None:
            return
        self.log.seek(0)
        end = self.log.read()[-LOG_CHARACTERS:]
        raise LocalWorkerError(f"the worker has ended with code {self.process.returncode}; the end of its log:\n{end}")


@contextmanager
def local_worker(
    name: str, redis_url: str, environment: Mapping[str, str], *, folder: Path | None = None
) -> Iterator[LocalWorker]:
    """A worker on `redis_url`, ready to answer; ends with the block. LocalWorkerError where it ends before that.

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
        worker = LocalWorker(process, log)
        try:
            _wait_until_ready(worker, redis_url)
            yield worker
        finally:
            process.terminate()
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait_until_ready(worker: LocalWorker, redis_url: str) -> None:
    """However long that takes: a large model, or a thousand adapters, on a slow disk."""
    with closing(Client(redis_url)) as client:
        result = client.list_lora_adapters()
        while True:
            try:
                result.get(timeout=LOOK_SECONDS)
                return
            except ResultTimeoutError:
                worker.check()
