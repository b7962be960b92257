"""A worker process on an embedded Redis, as an operator starts it."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lora_worker.client import Client
from lora_worker.embedded import EmbeddedServer
from lora_worker.settings_sources import PREFIX

START_SECONDS = 300.0
LOOK_SECONDS = 0.1


@contextmanager
def running_worker(**settings: Any) -> Iterator[Client]:
    """A client of a worker that is ready; both end with the block."""
    with EmbeddedServer() as server, tempfile.TemporaryDirectory(prefix="lora-worker-bench-") as folder:
        environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(PREFIX)},
            f"{PREFIX}REDIS_URL": server.url,
            **{f"{PREFIX}{name.upper()}": str(value) for name, value in settings.items()},
        }
        log_path = Path(folder) / "worker.log"
        command = [sys.executable, "-m", "celery", "-A", "lora_worker", "worker", "-l", "INFO"]
        with log_path.open("wb") as log:
            process = subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=subprocess.STDOUT)
        client = Client(server.url)
        try:
            _wait_until_ready(process, log_path)
            yield client
        finally:
            client.close()
            process.terminate()
            process.wait()


def _wait_until_ready(process: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + START_SECONDS
    while " ready." not in log.read_text():
        assert process.poll() is None, f"the worker ended:\n{log.read_text()[-2000:]}"
        assert time.monotonic() < end, f"the worker did not start:\n{log.read_text()[-2000:]}"
        time.sleep(LOOK_SECONDS)
