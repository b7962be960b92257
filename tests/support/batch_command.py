"""`lora-worker batch` as a user runs it: a process of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from lora_worker.embedded import EmbeddedServer
from support.worker_process import WAIT_SECONDS

COMMAND = Path(sys.executable).parent / "lora-worker"


class Ended(NamedTuple):
    """How the command ended."""

    code: int
    output: str
    errors: str


class BatchCommand:
    """One run of the command; `arguments` follow IN and OUT."""

    def __init__(self, server: EmbeddedServer | None, folder: Path, *arguments: str, **settings: Any) -> None:
        self.folder = folder
        given = settings | ({"redis_url": server.url} if server else {})
        environment = {f"LORA_WORKER_{name.upper()}": str(value) for name, value in given.items()}
        with (folder / "batch.log").open("w") as log:
            self.process = subprocess.Popen(
                [str(COMMAND), "batch", "in.jsonl", "-o", "out.jsonl", *arguments],
                cwd=folder,
                env={**os.environ, **environment},
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                # As a terminal starts it: Ctrl-C goes to all of its group.
                process_group=0,
            )

    def end(self, seconds: float = WAIT_SECONDS) -> Ended:
        """Wait until it has ended."""
        try:
            output, _ = self.process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.communicate()
            raise AssertionError(f"the batch does not end; it said:\n{self.said}") from None
        return Ended(self.process.returncode, output, self.said)

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()

    def interrupt(self) -> None:
        """Ctrl-C in its terminal."""
        os.killpg(self.process.pid, signal.SIGINT)

    @property
    def said(self) -> str:
        """Its standard error so far."""
        return (self.folder / "batch.log").read_text()


def request(custom_id: str, prompt: str, **body: Any) -> dict[str, Any]:
    """A line in OpenAI's form."""
    body = {"prompt": prompt, "max_tokens": 4, "temperature": 0, **body}
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": body}


def write_lines(path: Path, lines: Iterable[Any]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def read_rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]
