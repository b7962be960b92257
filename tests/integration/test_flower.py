"""Flower, for real, on a running worker."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.flower import PASSWORD, fetch_page, start_flower
from support.worker_process import WorkerProcess, wait_for

from lora_worker.client import Client
from lora_worker.embedded import free_port

Get = Callable[..., str | None]


@pytest.fixture
def get(worker: WorkerProcess, tmp_path: Path) -> Iterator[Get]:
    """Fetches a page of a running Flower; None where it does not answer."""
    port = free_port()
    process = start_flower(worker, tmp_path, f"--port={port}", "--address=127.0.0.1", FLOWER_BASIC_AUTH=PASSWORD)
    fetch = partial(fetch_page, port)
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
