"""Messages of every malformed kind among good ones: they harm nobody, and whoever can be told is told."""

from __future__ import annotations

import base64
import copy
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from redis import Redis
from support.fleet import KEYS, Fleet
from support.worker_process import wait_for

from lora_worker.embedded import EmbeddedServer

SECONDS = 90
RANDOM_MESSAGES = 200
ODD_VALUES: list[Any] = [None, 5, 1e999, "x", "", ["a"], [1, 2, 3], {}, {"a": 1}, True]


@pytest.fixture(autouse=True)
def emptied(server: EmbeddedServer) -> None:
    """Other tests leave workers behind that nobody will ever take off the books."""
    with Redis(port=server.port) as redis:
        redis.flushall()


def template(fleet: Fleet, redis: Redis) -> dict[str, Any]:
    body = {"prompt": "x", "max_tokens": 2, "model": fleet.adapters[0]}
    fleet.plain.send_task("lora_worker.generate", kwargs=body, queue="template")
    found: dict[str, Any] = json.loads(str(redis.lpop("template")))
    return found


def encoded(body: Any) -> str:
    return base64.b64encode(json.dumps(body).encode()).decode()


def with_field(message: dict[str, Any], path: tuple[str, ...], value: Any) -> dict[str, Any]:
    made = copy.deepcopy(message)
    *way, last = path
    part = made
    for step in way:
        part = part[step]
    part[last] = value
    return made


def without_field(message: dict[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
    made = copy.deepcopy(message)
    *way, last = path
    part = made
    for step in way:
        part = part[step]
    del part[last]
    return made


def paths_of(message: dict[str, Any]) -> list[tuple[str, ...]]:
    parts = ("headers", "properties")
    return [(key,) for key in message] + [(part, key) for part in parts for key in message[part]]


BODIES: list[Any] = [
    *([], {}, 5, "x", None, [[], {}], [[], None, {}], [[], [], {}], [{}, {"prompt": "x"}, {}]),
    [[], {"prompt": "x"}, None],
    [[], {"prompt": "x", "max_tokens": 2}, {"callbacks": [5]}],
    [[], {"prompt": "x", "max_tokens": 2}, {"errbacks": [5], "callbacks": None, "chain": None, "chord": None}],
    [[], {"prompt": "x", "max_tokens": 2}, {"chain": [5]}],
    [[], {"prompt": "x", "max_tokens": 2}, {"chord": 5}],
    [[], {"model": ["x"], "prompt": "x"}, {}],
    [[], {"model": "\ud800", "prompt": "x"}, {}],
]


def malformed(message: dict[str, Any]) -> Iterator[Any]:
    """Each field missing, or of a wrong kind; bodies of wrong shapes; what is no JSON."""
    for path in paths_of(message):
        yield without_field(message, path)
        for value in ODD_VALUES:
            yield with_field(message, path, value)
    odd: dict[str, list[Any]] = {
        "timelimit": [5, ["a", "b"], [1, 2, 3], [1e999, None]],
        "eta": [5, {}, "garbage", "0001-01-01T00:00:00"],
        "expires": [1e999, "9999-12-31T23:59:59-12:00"],
        "compression": ["x", "bzip2", "zlib"],
        "stamped_headers": [5, ["a"]],
        "callbacks": [[5]],
    }
    for name, values in odd.items():
        for value in values:
            yield with_field(message, ("headers", name), value)
    for body in BODIES:
        yield with_field(message, ("body",), encoded(body))
        yield with_field(with_field(message, ("body",), encoded(body)), ("headers",), {})
    raw = json.dumps(message)
    yield '{"lora_restored": 1, "lora_deaths": 1e999, ' + raw[1:]
    yield '{"lora_restored": "x", "lora_deaths": [1], ' + raw[1:]
    yield from ("", "\0", "[" * 100_000, '{"a":' * 100_000, '{"headers": ' + "9" * 5000 + "}", raw[:-20], "[]", "5")


def at_random(message: dict[str, Any], chance: random.Random) -> Any:
    """Several fields at once, or bytes lost or changed."""
    if chance.random() < 0.3:
        raw = json.dumps(message)
        at = chance.randrange(len(raw))
        return raw[:at] + chance.choice(["", "\0", '"', "}", "9"]) + raw[at + chance.randrange(20) :]
    for path in chance.sample(paths_of(message), chance.randint(1, 4)):
        if path[0] in message and (len(path) == 1 or isinstance(message[path[0]], dict)):
            message = with_field(message, path, chance.choice(ODD_VALUES))
    return message


def numbered(message: Any, number: int) -> str:
    """As it goes out, under an id of its own where it has one."""
    if not isinstance(message, dict):
        return str(message)
    headers = message.get("headers")
    if isinstance(headers, dict) and isinstance(headers.get("id"), str) and headers["id"] not in ("", "x"):
        message = with_field(message, ("headers", "id"), f"odd-{number}")
    return json.dumps(message)


@pytest.mark.parametrize("transport", ["atomic", "stock"])
def test_malformed_messages_end_no_worker_and_hold_up_no_good_one(
    server: EmbeddedServer, tmp_path: Path, transport: str
) -> None:
    chance = random.Random(11)
    with (
        Fleet(server, tmp_path, 2, 2, transport=transport, max_running_requests=8, max_waiting_requests=32) as fleet,
        Redis(port=server.port, decode_responses=True) as redis,
    ):
        good = template(fleet, redis)
        messages = [*malformed(good), *(at_random(good, chance) for _ in range(RANDOM_MESSAGES))]
        partition = KEYS.partitions[15]
        for number, message in enumerate(messages):
            redis.lpush(chance.choice([KEYS.inbox, partition, KEYS.base, KEYS.manage]), numbered(message, number))
            if number % 20 == 0:
                fleet.send(2, chance, max_tokens=4)
        fleet.wait_for_answers(SECONDS)
        assert not [worker for worker in fleet.workers if worker.has_ended]
        fleet.check_answers()
        fleet.wait_until_nothing_is_left(SECONDS)
        fleet.check_nothing_is_left()
        assert all("Frequent restarts" not in worker.log for worker in fleet.workers)


def test_who_sent_a_malformed_message_under_an_id_is_told(server: EmbeddedServer, tmp_path: Path) -> None:
    with Fleet(server, tmp_path, 1, 2) as fleet, Redis(port=server.port, decode_responses=True) as redis:
        message = template(fleet, redis)
        task_id = message["headers"]["id"]
        redis.lpush(KEYS.inbox, json.dumps(with_field(message, ("headers", "timelimit"), 5)))
        result = fleet.plain.AsyncResult(task_id)
        wait_for(result.ready, "it is answered")
        assert result.state == "FAILURE"
        assert f"the message of the task {task_id} is malformed (TypeError" in str(result.result)
        (line,) = [line for line in fleet.workers[0].log.splitlines() if "malformed" in line]
        assert task_id in line
