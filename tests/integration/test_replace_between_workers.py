"""Two real workers with a tiny model: replace and unload across them, token for token."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from celery.result import AsyncResult
from redis import Redis
from support.oracle import Oracle
from support.tiny_models import ids_of, save_adapter
from support.worker_process import WorkerProcess

from lora_worker import errors
from lora_worker.client import Client
from lora_worker.embedded import EmbeddedServer

SECONDS = 60
PROMPT = [1, 2, 3]
ROW = {"model": "changing", "prompt": PROMPT, "temperature": 0, "ignore_eos": True}
TOKENS, LONG_ROW = 40, 1500
TARGETS = ["q_proj", "v_proj", "down_proj"]


@pytest.fixture
def two_workers(
    server: EmbeddedServer, connection: Redis, worker_settings: dict[str, Any], tmp_path: Path
) -> Iterator[list[WorkerProcess]]:
    connection.flushdb()
    settings = {**worker_settings, "adapter_roots": tmp_path, "max_running_requests": 4}
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    workers = [WorkerProcess(server, tmp_path / name, settings, "-n", f"{name}@here") for name in ("first", "second")]
    with workers[0], workers[1]:
        for worker in workers:
            worker.wait_until_ready()
        yield workers


def test_all_workers_answer_with_the_new_weights_once_a_replace_has_returned(
    two_workers: list[WorkerProcess], long_model: Path, tmp_path: Path
) -> None:
    folder = save_adapter(long_model, tmp_path / "changing", seed=1, r=4, target_modules=TARGETS)
    client = two_workers[0].client()
    loaded = client.load_lora_adapter("changing", "changing").get(timeout=SECONDS)
    old_tokens = expected(long_model, folder)
    before = fill_both(client)

    save_adapter(long_model, folder, seed=2, r=8, target_modules=TARGETS)
    replaced = client.load_lora_adapter("changing", "changing", replace=True).get(timeout=2 * SECONDS)
    assert all(result.ready() for result in before)
    new_tokens = expected(long_model, folder)
    assert new_tokens != old_tokens
    after = [client.generate(**ROW, max_tokens=TOKENS) for _ in range(12)]
    for result in before:
        found = result.get()
        assert found["lora_worker"]["digest"] == loaded["report"]["digest"]
        assert tokens_of(found)[:TOKENS] == old_tokens
    for result in after:
        found = result.get(timeout=SECONDS)
        assert found["lora_worker"]["digest"] == replaced["report"]["digest"]
        assert tokens_of(found) == new_tokens
    assert client.unload_lora_adapter("changing").get(timeout=SECONDS)["loaded_adapters"] == {}
    for result in [client.generate(**ROW, max_tokens=1) for _ in range(4)]:
        with pytest.raises(errors.UnknownAdapterError):
            result.get(timeout=SECONDS)
    client.close()


def expected(model: Path, adapter: Path) -> list[int]:
    oracle = Oracle(model, {"changing": adapter}, torch.float64)
    return oracle.generate("changing", PROMPT, TOKENS, ignore_eos=True).tokens


def tokens_of(answer: dict[str, Any]) -> list[int]:
    tokens: list[int] = ids_of(answer["choices"][0]["text"])
    return tokens


def fill_both(client: Client) -> list[AsyncResult[Any]]:
    """Long rows, four on each worker; sent anew where some had ended before all had begun."""
    for _ in range(5):
        rows = [client.generate(**ROW, max_tokens=LONG_ROW) for _ in range(8)]
        are_full = False
        while not are_full and not any(row.ready() for row in rows):
            are_full = sorted(held(client)) == [4, 4]
        if are_full:
            return rows
        for row in rows:
            row.get(timeout=SECONDS)
    raise AssertionError("the workers were never full at the same time")


def held(client: Client) -> list[int]:
    listed = client.list_lora_adapters().get(timeout=SECONDS)
    return [here["held"] for here in listed["changing"]["workers"].values()]
