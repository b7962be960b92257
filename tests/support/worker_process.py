"""A real worker process, as an operator starts it, on a Redis of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from lora_worker.client import Client
from lora_worker.embedded import EmbeddedServer

WAIT_SECONDS = 60.0


def wait_for(condition: Callable[[], Any], what: str, seconds: float = WAIT_SECONDS) -> Any:
    """Wait until a condition holds, and return what it gave."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        value = condition()
        if value:
            return value
        time.sleep(0.02)
    raise AssertionError(f"after {seconds} s still not: {what}")


class WorkerProcess:
    """`celery -A lora_worker worker` in a directory that holds another project's tasks.py."""

    app = "lora_worker"

    def __init__(self, server: EmbeddedServer, folder: Path, settings: dict[str, Any], *arguments: str) -> None:
        self.server = server
        self.folder = folder
        self._environment = {
            **os.environ,
            "LORA_WORKER_REDIS_URL": server.url,
            **{f"LORA_WORKER_{name.upper()}": str(value) for name, value in settings.items()},
        }
        self._arguments = arguments
        self._log = folder / "worker.log"
        self.process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        (self.folder / "tasks.py").write_text("raise SystemExit('the tasks.py of another project was imported')\n")
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    @property
    def log(self) -> str:
        return self._log.read_text()

    def start(self) -> None:
        command = [sys.executable, "-m", "celery", "-A", self.app, "worker", "-l", "INFO", *self._arguments]
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                command, cwd=self.folder, env=self._environment, stdout=log, stderr=subprocess.STDOUT
            )

    def wait_until_ready(self) -> None:
        def ready() -> bool:
            assert self.process is not None
            assert self.process.poll() is None, f"the worker ended:\n{self.log}"
            return " ready." in self.log

        wait_for(ready, f"worker ready\n{self.log}")

    @property
    def has_ended(self) -> bool:
        assert self.process is not None
        return self.process.poll() is not None

    def start_again(self) -> None:
        """After it has ended; returns when it is ready."""
        count = self.log.count(" ready.")
        self.start()
        wait_for(lambda: self.log.count(" ready.") > count, "the worker is ready again")

    def send_signal(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def wait_until_ended(self) -> int:
        assert self.process is not None
        return self.process.wait(WAIT_SECONDS)

    def client(self, **options: Any) -> Client:
        return Client(self.server.url, **options)

    def celery(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Another command of Celery's, as from a second terminal."""
        command = [sys.executable, "-m", "celery", "-A", self.app, *arguments]
        return subprocess.run(
            command, cwd=self.folder, env=self._environment, capture_output=True, text=True, check=False
        )
