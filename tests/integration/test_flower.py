"""Flower, for real, on a running worker."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.worker_process import WorkerProcess, wait_for

from lora_worker.client import Client
from lora_worker.embedded import free_port

CONFIG = Path(__file__).parents[2] / "config" / "flowerconfig.py"
PASSWORD = "lora:open-sesame"

Get = Callable[..., str | None]


def start_flower(worker: WorkerProcess, folder: Path, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    shutil.copy(CONFIG, folder)
    command = [sys.executable, "-m", "celery", "-A", "lora_worker", "flower", "--conf=flowerconfig.py", *arguments]
    return subprocess.Popen(
        command,
        cwd=folder,
        env={**os.environ, "LORA_WORKER_REDIS_URL": worker.server.url, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.fixture
def get(worker: WorkerProcess, tmp_path: Path) -> Iterator[Get]:
    """Fetches a page of a running Flower; None where it does not answer."""
    port = free_port()
    process = start_flower(worker, tmp_path, f"--port={port}", "--address=127.0.0.1", FLOWER_BASIC_AUTH=PASSWORD)

    def fetch(path: str, *, password: str = PASSWORD) -> str | None:
        request = urllib.request.Request(f"http://127.0.0.1:{port}{path}")
        request.add_header("Authorization", f"Basic {base64.b64encode(password.encode()).decode()}")
        try:
            with urllib.request.urlopen(request, timeout=20) as response:
                text: str = response.read().decode()
                return text
        except urllib.error.HTTPError as error:
            return f"status {error.code}"
        except OSError:
            return None

    try:
        wait_for(lambda: fetch("/"), "Flower answers")
        yield fetch
    finally:
        process.terminate()
        process.communicate()


def test_it_shows_the_pool_and_no_prompt_and_asks_for_the_password(get: Get, client: Client) -> None:
    assert get("/", password="lora:wrong") == "status 401"
    client.load_lora_adapter("adapter-0", "adapter-0").get(timeout=60)
    secret = "w91 w92 w93"
    row = client.generate(model="adapter-0", prompt=secret, max_tokens=2)
    row.get(timeout=60)

    def seen() -> dict[str, Any] | None:
        tasks = json.loads(get("/api/tasks") or "{}")
        found: dict[str, Any] | None = tasks.get(row.id)
        return found if found and found["state"] == "SUCCESS" else None

    task = wait_for(seen, "Flower has seen the task succeed")
    name = wait_for(lambda: next(iter(resident(get)), None), "Flower has asked the worker for its statistics")
    wait_for(lambda: resident(get)[name] == {"0": "adapter-0"}, "Flower shows the adapter in its slot")
    pages = [str(task), str(get("/tasks")), str(get(f"/worker/{name}")), str(get(f"/task/{row.id}"))]
    assert "adapter-0" in pages[2]
    assert all(secret not in page for page in pages)


def resident(get: Get) -> dict[str, dict[str, str]]:
    """By worker, what is in its slots as Flower knows it."""
    workers = json.loads(get("/api/workers?refresh=1") or "{}")
    return {name: info["stats"]["pool"]["lora"]["pool"]["slots"] for name, info in workers.items() if "stats" in info}


def test_it_does_not_start_without_a_password(worker: WorkerProcess, tmp_path: Path) -> None:
    process = start_flower(worker, tmp_path)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "set FLOWER_BASIC_AUTH=user:password" in output
