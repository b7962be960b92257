"""What a batch asks Redis: publishing once, noticing losses, finding messages that went nowhere. No worker runs."""

from __future__ import annotations

import json
from base64 import b64decode
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from redis import Redis
from redis.exceptions import RedisError
from support.worker_process import WAIT_SECONDS

from lora_worker.batch import flight as flight_module
from lora_worker.batch.flight import FREED_SECONDS, Flight
from lora_worker.batch.lost import find_messages
from lora_worker.batch.roster import Roster
from lora_worker.batch.scan import Scan, take_turns
from lora_worker.batch.source import open_source
from lora_worker.batch.store import Store
from lora_worker.batch.tally import Tally
from lora_worker.batch.window import Window
from lora_worker.client import Client
from lora_worker.embedded import EmbeddedServer

JOB = "00000000-0000-0000-0000-00000000000b"
BODY = {"prompt": "p"}


@pytest.fixture
def connection(server: EmbeddedServer) -> Iterator[Redis]:
    with Redis(port=server.port, decode_responses=True) as made:
        made.flushdb()
        yield made


@pytest.fixture
def flight(server: EmbeddedServer, connection: Redis) -> Iterator[Flight]:  # noqa: ARG001 - emptied before
    client = Client(server.url)
    made = client.flight(JOB)
    yield made
    made.close()
    client.close()


def messages(connection: Redis) -> list[str]:
    """The ids of the tasks that wait, in the order in which they are taken."""
    (queue,) = connection.keys("lora*\x06*") or ["none"]
    return [json.loads(message)["headers"]["id"] for message in reversed(connection.lrange(queue, 0, -1))]


def answer(connection: Redis, flight: Flight, name: str) -> None:
    meta = {"status": "SUCCESS", "result": {"id": name}}
    connection.set(f"celery-task-meta-{flight.task_id(name)}", json.dumps(meta))


def test_what_is_in_flight_is_not_published_again_by_anybody(
    flight: Flight, server: EmbeddedServer, connection: Redis
) -> None:
    flight.send({"1.0": BODY, "2.0": BODY})
    flight.send({"2.0": BODY, "3.0": BODY})
    other = Client(server.url)
    again = other.flight(JOB)
    again.send(dict.fromkeys(("1.0", "2.0", "3.0", "4.0"), BODY))
    assert messages(connection) == [flight.task_id(name) for name in ("1.0", "2.0", "3.0", "4.0")]
    assert sorted(flight.published()) == ["1.0", "2.0", "3.0", "4.0"]
    assert len(again) == 4
    again.close()
    other.close()


def test_an_answer_stays_until_it_is_freed(flight: Flight, connection: Redis) -> None:
    flight.send({"1.0": BODY, "2.0": BODY})
    key = f"celery-task-meta-{flight.task_id('1.0')}"
    connection.set(key, json.dumps({"status": "SUCCESS", "result": {"id": "x"}}))
    for _ in range(2):
        ((answer,),) = flight.collect()
        assert (answer.name, answer.response) == ("1.0", {"id": "x"})
    flight.free(["1.0"])
    assert list(flight.collect()) == []
    assert 0 < int(connection.ttl(key)) <= FREED_SECONDS
    assert list(flight.published()) == ["2.0"]


def test_errors_and_states_of_celery_are_told_apart(flight: Flight, connection: Redis) -> None:
    flight.send(dict.fromkeys(("1", "2", "3"), BODY))
    failure = {"exc_type": "PromptTooLongError", "exc_message": ["the prompt"], "exc_module": "lora_worker.errors"}
    revoked = {"exc_type": "TaskRevokedError", "exc_message": ["revoked"], "exc_module": "celery.exceptions"}
    for name, status, result in (("1", "FAILURE", failure), ("2", "REVOKED", revoked), ("3", "STARTED", None)):
        meta = {"status": status, "result": result}
        connection.set(f"celery-task-meta-{flight.task_id(name)}", json.dumps(meta))
    ((first, second),) = flight.collect()
    assert (first.code, first.message, first.response) == ("prompt_too_long", "the prompt", None)
    assert (second.code, second.message) == ("task_revoked", "revoked")


def test_a_redis_that_came_back_empty_is_noticed(
    flight: Flight, connection: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flight_module, "LOOK_SECONDS", -1.0)
    flight.send({"1.0": BODY, "2.0": BODY})
    assert flight.lost() == []
    connection.flushall()
    assert flight.lost() == ["1.0", "2.0"]
    flight.send({"1.0": BODY})
    assert flight.lost() == ["2.0"]
    assert messages(connection) == [flight.task_id("1.0")]


def test_a_message_is_found_in_a_queue_and_in_a_worker_s_hands(
    flight: Flight, server: EmbeddedServer, connection: Redis
) -> None:
    flight.send({str(i): BODY for i in range(1200)})
    ids = {flight.task_id(name): name for name in flight.names}

    raw = Redis(port=server.port)

    def missing() -> set[str]:
        found = find_messages(raw, "lora", ids)
        assert found is not None
        return {ids[task_id] for task_id in ids.keys() - found}

    assert missing() == set()
    (queue,) = connection.keys("lora*\x06*")
    claimed = connection.rpop(queue)
    assert missing() == {"0"}
    connection.hset("lora:unacked:w@h:1", "tag", json.dumps([claimed, "", queue]))
    assert missing() == set()
    for _ in range(3):
        connection.lpop(queue)
    assert missing() == {"1197", "1198", "1199"}
    raw.close()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """A batch of five lines of which nothing is sent."""
    (tmp_path / "in").write_text("".join(json.dumps(BODY) + "\n" for _ in range(5)))
    with open_source(str(tmp_path / "in"), spool_folder=tmp_path) as source, closing(Store(None)) as store:
        with store.transaction():
            store.set(job=JOB)
            Scan(store, job=JOB, default_model=None).run(source)
            store.set_turns(take_turns(store.models(), 1), 1)
        yield store


@pytest.fixture
def window(flight: Flight, store: Store, tmp_path: Path) -> Iterator[Window]:
    tally = Tally(store.models(), total=5, done=0, failed=0)
    roster = Roster(None, 0, 0, 0)
    with open_source(str(tmp_path / "in"), spool_folder=tmp_path) as source:
        yield Window(store, source, flight, tally, roster=roster, default_model=None, max_in_flight=100)


def test_a_message_that_is_nowhere_twice_is_published_again(
    connection: Redis, flight: Flight, window: Window, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flight_module, "LOOK_SECONDS", -1.0)
    monkeypatch.setattr(flight_module, "STALL_SECONDS", -1.0)
    window.begin()
    window.send()
    assert window.send_lost() == 0
    (queue,) = connection.keys("lora*\x06*")
    connection.lpop(queue)
    assert [window.send_lost(), window.send_lost(), window.send_lost()] == [0, 1, 0]
    assert sorted(messages(connection)) == sorted(flight.task_id(f"{i}.0") for i in range(1, 6))
    assert len(window) == 5


def test_the_last_answers_are_let_go_of_where_redis_lost_its_data_before_they_were_freed(
    connection: Redis, flight: Flight, window: Window, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flight_module, "LOOK_SECONDS", -1.0)
    window.begin()
    window.send()
    for name in flight.names:
        answer(connection, flight, name)
    connection.execute_command("ACL", "SETUSER", "default", "-srem")  # what frees them fails
    with pytest.raises(RedisError):
        window.collect()
    connection.execute_command("ACL", "SETUSER", "default", "+srem")
    connection.flushall()
    assert (window.collect(), window.send_lost(), len(window)) == (False, 0, 0)
    assert messages(connection) == []


def test_tasks_that_could_not_be_revoked_are_when_the_batch_goes_on(
    connection: Redis, server: EmbeddedServer, flight: Flight, store: Store, window: Window
) -> None:
    with closing(Client(server.url)) as client, closing(client.flight(JOB)) as earlier:
        earlier.send({"1.0": BODY, "2.0": BODY})
    with store.transaction():
        store.next_attempt([1])
    window.begin()
    window.send()
    assert connection.zrange("lora:revoked", 0, -1) == [flight.task_id("1.0")]
    assert sorted(flight.published()) == ["1.1", "2.0", "3.0", "4.0", "5.0"]


def test_an_answer_is_kept_for_messages_that_come_back_after_a_long_lease(
    connection: Redis, server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LORA_WORKER_LEASE_SECONDS", "100")
    with closing(Client(server.url)) as client, closing(client.flight(JOB)) as flight:
        flight.send({"1.0": BODY})
        answer(connection, flight, "1.0")
        flight.free(["1.0"])
        assert 190 < int(connection.ttl(f"celery-task-meta-{flight.task_id('1.0')}")) <= 200


def test_any_number_of_tasks_is_revoked_by_messages_of_bounded_length(
    connection: Redis, server: EmbeddedServer
) -> None:
    ids = [str(i) for i in range(2500)]
    with closing(Client(server.url)) as client, connection.pubsub(ignore_subscribe_messages=True) as subscription:
        subscription.psubscribe("*pidbox*")
        subscription.get_message(timeout=WAIT_SECONDS)  # that it is subscribed
        client.cancel(*ids)
        sent: list[list[str]] = []
        while sum(map(len, sent)) < len(ids):
            message = subscription.get_message(timeout=WAIT_SECONDS)
            assert message is not None
            body = json.loads(b64decode(json.loads(message["data"])["body"]))
            sent.append(body["arguments"]["task_id"])
    assert [len(part) for part in sent] == [1000, 1000, 500]
    assert [task_id for part in sent for task_id in part] == ids
