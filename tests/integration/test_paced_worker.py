"""A real worker with the paced engine: what the tests of the fleet start."""

from __future__ import annotations

from pathlib import Path

from support.paced import PacedWorkerProcess, write_paced_adapter

from lora_worker.embedded import EmbeddedServer
from lora_worker.testing.adapters import digest_of
from lora_worker.testing.rows import POISON, answer_text

SECONDS = 60


def test_it_loads_generates_and_dies_of_poison(server: EmbeddedServer, tmp_path: Path) -> None:
    folder = write_paced_adapter(tmp_path / "adapters" / "a", "a")
    settings = {"adapter_roots": folder.parent, "queue_prefix": "paced-worker"}
    with PacedWorkerProcess(server, tmp_path, settings) as worker:
        worker.wait_until_ready()
        client = worker.client(queue_prefix="paced-worker")
        assert client.load_lora_adapter("a", "a").get(timeout=SECONDS)["success"]
        answer = client.generate(model="a", prompt="x").get(timeout=SECONDS)
        assert answer["choices"][0]["text"] == answer_text(digest_of(folder), "x")
        client.generate(model="a", prompt=f"please {POISON}")
        assert worker.wait_until_ended() == -9
