"""The transport in a real worker with the paced engine: what it sends to Redis, and messages of unusual kinds."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import kombu
import pytest
from kombu.transport import redis as kombu_redis
from redis import Redis
from support.paced import PacedWorkerProcess, write_paced_adapter
from support.worker_process import wait_for

from lora_worker.client import Client
from lora_worker.embedded import EmbeddedServer
from lora_worker.errors import SettingsError
from lora_worker.fleet.backlog import read_backlog
from lora_worker.fleet.keys import Keys, list_of
from lora_worker.fleet.transport.atomic import check_contract

SECONDS = 60
PREFIX = "transport"
KEYS = Keys(PREFIX, 64)
LONG = 100_000


@pytest.fixture(scope="module")
def paced(server: EmbeddedServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PacedWorkerProcess]:
    folder = tmp_path_factory.mktemp("paced")
    write_paced_adapter(folder / "adapters" / "a", "a")
    settings = {"lora_paths": f"a={folder / 'adapters' / 'a'}", "queue_prefix": PREFIX, "max_running_requests": 2}
    with PacedWorkerProcess(server, folder, settings) as worker:
        worker.wait_until_ready()
        yield worker


@pytest.fixture
def client(paced: PacedWorkerProcess) -> Iterator[Client]:
    made = paced.client(queue_prefix=PREFIX)
    yield made
    made.close()


@pytest.fixture
def redis(server: EmbeddedServer) -> Iterator[Redis]:
    with Redis(port=server.port, decode_responses=True) as connection:
        yield connection


def calls(redis: Redis) -> dict[str, int]:
    stats: dict[str, Any] = redis.info("commandstats")
    return {name: stats.get(f"cmdstat_{name}", {}).get("calls", 0) for name in ("brpop", "eval")}


def cut_claims(redis: Redis) -> None:
    """Cut the connection that the worker claims by."""
    connections: list[dict[str, str]] = redis.client_list()
    claiming = [connection["id"] for connection in connections if connection["cmd"] == "eval"]
    assert claiming
    for connection_id in claiming:
        redis.execute_command("CLIENT", "KILL", "ID", connection_id)


def test_the_installed_kombu_is_as_the_transport_needs_it() -> None:
    """Where this fails after an upgrade, read kombu's changes to what CONTRACT and CALLS name before adapting them."""
    check_contract()
    assert kombu.__version__.startswith("5.7.")


@pytest.mark.parametrize("name", ["_brpop_start", "_brpop_read", "_flush_brpop_reauth"])
def test_a_kombu_without_what_is_needed_is_refused_with_a_sentence(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(kombu_redis.Channel, name, lambda: None)
    with pytest.raises(SettingsError, match=rf"{name}.*transport = \"stock\""):
        check_contract()


def test_the_worker_sends_no_brpop(client: Client, redis: Redis) -> None:
    redis.config_resetstat()
    answers = [client.generate(prompt="x", model=model, max_tokens=2) for model in ("a", None) for _ in range(5)]
    assert all(answer.get(timeout=SECONDS) for answer in answers)
    found = calls(redis)
    assert found["eval"] > 0
    assert found["brpop"] == 0


def test_messages_that_are_none_of_celery_s_are_discarded_and_harm_nobody(
    client: Client, redis: Redis, paced: PacedWorkerProcess
) -> None:
    odd = ["not json", "[]", "{}", '{"properties": 3}', json.dumps({"properties": {}, "headers": {}, "body": "!"})]
    for queue in (KEYS.inbox, KEYS.manage, KEYS.base, KEYS.partitions[5]):
        for message in odd:
            redis.lpush(list_of(queue, 3), message)
    assert client.generate(prompt="x", max_tokens=2, priority=9).get(timeout=SECONDS)
    wait_for(lambda: sum(read_backlog(redis, KEYS)) == 0, "all are gone")
    assert "Discarded a malformed message" in paced.log


def test_urgent_requests_come_first_and_the_last_have_their_share(client: Client) -> None:
    blocking = [client.generate(prompt="x", max_tokens=100) for _ in range(2)]
    batch = [client.generate(prompt="x", max_tokens=1, priority=9) for _ in range(200)]
    urgent = [client.generate(prompt="x", max_tokens=1, priority=0) for _ in range(40)]
    results = [result.get(timeout=SECONDS) and result for result in (*blocking, *batch, *urgent)]
    ends = sorted(results[2:], key=lambda result: result.date_done)
    last_urgent = max(ends.index(result) for result in urgent)
    assert last_urgent < 120  # forty of them, and some batch rows that were in the engine or had their turn


def test_a_request_that_expires_in_the_queue_never_runs(client: Client, redis: Redis) -> None:
    blocking = [client.generate(prompt="x", model="a", max_tokens=200) for _ in range(2)]
    expiring = client.generate(prompt="x", model="a", max_tokens=2, expires=1)
    with pytest.raises(Exception, match="expired"):
        expiring.get(timeout=SECONDS)
    assert all(result.get(timeout=SECONDS) for result in blocking)
    wait_for(lambda: sum(read_backlog(redis, KEYS)) == 0, "nothing is left")


def test_a_task_that_is_for_later_survives_a_cut_connection(client: Client, redis: Redis) -> None:
    later = client.generate(prompt="x", max_tokens=2, eta=datetime.now(UTC) + timedelta(seconds=5))
    wait_for(lambda: read_backlog(redis, KEYS).in_hand == 1, "the worker keeps it")
    cut_claims(redis)
    assert later.get(timeout=SECONDS)
    wait_for(lambda: sum(read_backlog(redis, KEYS)) == 0, "nothing is left")


def test_what_got_lost_on_its_way_from_redis_goes_back(client: Client, redis: Redis, paced: PacedWorkerProcess) -> None:
    """The script has recorded it, and its answer never came: found when the worker connects again."""
    done = client.generate(prompt="x", max_tokens=2)
    assert done.get(timeout=SECONDS)
    wait_for(lambda: sum(read_backlog(redis, KEYS)) == 0, "it is acknowledged")
    lost = client.generate(prompt="x", max_tokens=2, countdown=3600)
    wait_for(lambda: read_backlog(redis, KEYS).in_hand == 1, "the worker keeps it")
    (key,) = redis.keys(KEYS.unacked("*"))
    record = str(redis.hvals(key)[0])
    name, _, raw = record.partition("\n")
    message = json.loads(raw)
    message["headers"] |= {"id": "00000000-lost", "eta": None}
    redis.hset(key, "999999999999-0000", f"{name}\n{json.dumps(message)}")
    client.app.control.revoke(lost.id)
    cut_claims(redis)
    wait_for(lambda: redis.exists("celery-task-meta-00000000-lost"), "it was found and run")
    assert "got lost on their way" in paced.log
