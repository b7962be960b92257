"""A Redis a session, and a worker with tiny models that most tests share."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from support.engines import engines
from support.tiny_models import save_adapter, save_model
from support.worker_process import WorkerProcess

from lora_worker.client import Client
from lora_worker.embedded import EmbeddedServer
from lora_worker.engine import Engine
from lora_worker.settings_sources import PREFIX

ADAPTERS = [f"adapter-{i}" for i in range(6)]
# Room for rows that run until they are stopped.
LONG = 60_000


@pytest.fixture(scope="session")
def server() -> Iterator[EmbeddedServer]:
    with EmbeddedServer() as started:
        yield started


@pytest.fixture(scope="session")
def long_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with room for very long rows."""
    folder = save_model("llama", tmp_path_factory.mktemp("long-llama"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": LONG}))
    return folder


@pytest.fixture(scope="session")
def adapter_root(tmp_path_factory: pytest.TempPathFactory, long_model: Path) -> Path:
    """Six adapters of different ranks and targets."""
    root = tmp_path_factory.mktemp("adapters")
    targets = [["q_proj", "v_proj"], ["down_proj"], ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj"]]
    for i, name in enumerate(ADAPTERS):
        save_adapter(long_model, root / name, seed=i, r=2 ** (i % 4), target_modules=targets[i % 3])
    return root


@pytest.fixture(scope="session")
def worker_settings(long_model: Path, adapter_root: Path) -> dict[str, Any]:
    return {
        "model": long_model,
        "adapter_roots": adapter_root,
        "dtype": "float64",
        "device": "cpu",
        "max_loras_per_batch": 3,
        "max_running_requests": 16,
        "max_lora_rank": 16,
        "drain_seconds": 1,
    }


@pytest.fixture(scope="module")
def worker(
    server: EmbeddedServer, worker_settings: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[WorkerProcess]:
    """One worker for the tests of a module; the environment is that of the session, so it is cleaned here too."""
    for variable in [name for name in os.environ if name.startswith(PREFIX)]:
        del os.environ[variable]
    with redis.Redis(port=server.port) as connection:
        connection.flushdb()
    with WorkerProcess(server, tmp_path_factory.mktemp("worker"), worker_settings) as process:
        process.wait_until_ready()
        yield process


@pytest.fixture
def client(worker: WorkerProcess) -> Iterator[Client]:
    made = worker.client()
    yield made
    made.close()


@pytest.fixture
def connection(server: EmbeddedServer) -> Iterator[redis.Redis]:
    with redis.Redis(port=server.port, decode_responses=True) as made:
        yield made


@pytest.fixture
def paths(tiny_adapters: Callable[[str], dict[str, Path]]) -> dict[str, Path]:
    return tiny_adapters("llama")


@pytest.fixture
def make_engine(tiny_model: Callable[[str], Path]) -> Iterator[Callable[..., Engine]]:
    with engines(tiny_model("llama")) as make:
        yield make
