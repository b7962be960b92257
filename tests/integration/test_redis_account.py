"""The account that config/redis.conf proposes is enough for workers, clients and Flower, and opens nothing else."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from redis import Redis
from redis.exceptions import NoPermissionError
from support.flower import PASSWORD, fetch_page, start_flower
from support.paced import PacedWorkerProcess, write_paced_adapter
from support.worker_process import wait_for

from lora_worker.client import Client
from lora_worker.embedded import EmbeddedServer, free_port

CONFIG = Path(__file__).parents[2] / "config" / "redis.conf"
SECONDS = 60


class GuardedServer(EmbeddedServer):
    """A server that knows the account of the configuration, and one for the test to look with."""

    @property
    def url(self) -> str:
        return f"redis://lora:open-sesame@127.0.0.1:{self.port}/0"

    def guard(self) -> Redis:
        (line,) = [line for line in CONFIG.read_text().splitlines() if line.startswith("# user lora ")]
        rules = line.removeprefix("# user lora ").replace(">PASSWORD", ">open-sesame").split()
        with Redis(port=self.port) as connection:
            connection.execute_command("ACL", "SETUSER", "lora", *rules)
            connection.execute_command("ACL", "SETUSER", "admin", "on", ">secret", "~*", "&*", "+@all")
            connection.execute_command("ACL", "SETUSER", "default", "off")
        return Redis(port=self.port, username="admin", password="secret", decode_responses=True)


@pytest.fixture
def guarded() -> Iterator[GuardedServer]:
    with GuardedServer() as server:
        yield server


def test_everything_works_and_nothing_is_refused(guarded: GuardedServer, tmp_path: Path) -> None:
    admin = guarded.guard()
    folder = write_paced_adapter(tmp_path / "adapters" / "a", "a")
    settings = {"adapter_roots": folder.parent, "lease_seconds": 2}
    workers = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        workers.append(PacedWorkerProcess(guarded, tmp_path / name, settings, "-n", f"{name}@here"))
    port = free_port()
    flower = start_flower(workers[0], tmp_path, f"--port={port}", "--address=127.0.0.1", FLOWER_BASIC_AUTH=PASSWORD)
    client = Client(guarded.url)
    try:
        with workers[0] as one, workers[1] as two:
            for worker in (one, two):
                worker.wait_until_ready()
            client.load_lora_adapter("a", "a").get(timeout=SECONDS)
            endless = [client.generate(prompt="x", max_tokens=10**6) for _ in range(8)]
            assert client.generate(model="a", prompt="x", priority=3).get(timeout=SECONDS)["choices"]
            assert client.app.control.inspect(timeout=5).stats()
            wait_for(
                lambda: "one@here" in (fetch_page(port, "/api/workers?refresh=1") or ""), "Flower shows the worker"
            )
            two.send_signal(signal.SIGKILL)
            wait_for(lambda: "dead; restored" in one.log, "the other restores what it had")
            client.cancel(*(row.id for row in endless))
            wait_for(lambda: all(row.state == "REVOKED" for row in endless), "all are revoked")
            client.unload_lora_adapter("a").get(timeout=SECONDS)
    finally:
        flower.terminate()
        flower.wait(SECONDS)
        flower.communicate()
        client.close()
    assert [(entry["reason"], entry["object"]) for entry in admin.acl_log()] == []
    with Redis.from_url(guarded.url) as account:
        for command in (("GET", "another's"), ("CONFIG", "GET", "*"), ("FLUSHALL",), ("KEYS", "*")):
            with pytest.raises(NoPermissionError):
                account.execute_command(*command)
    admin.close()
    assert "open-sesame" not in workers[0].log
    assert "redis://lora:**@127.0.0.1" in workers[0].log
