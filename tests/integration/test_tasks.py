"""Tasks through a real Redis and a real worker process."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from celery.exceptions import SoftTimeLimitExceeded, TaskRevokedError, TimeLimitExceeded
from redis import Redis
from support.tiny_models import EOS, save_adapter
from support.worker_process import WorkerProcess, wait_for

from lora_worker import errors
from lora_worker.client import Client
from lora_worker.engine import Engine
from lora_worker.settings import Settings

from .conftest import ADAPTERS, LONG

SECONDS = 60
ENDLESS = {"prompt": [1, 2, 3], "temperature": 0, "max_tokens": LONG - 10, "ignore_eos": True}


def load_all(client: Client) -> None:
    for name in ADAPTERS:
        client.load_lora_adapter(name, name).get(timeout=SECONDS)


def stop(client: Client, *results: Any) -> None:
    for result in results:
        client.app.control.revoke(result.id, terminate=True)
    wait_for(lambda: all(result.state == "REVOKED" for result in results), "the rows are revoked")


def test_an_adapter_is_loaded_used_listed_pinned_and_unloaded(client: Client) -> None:
    name = ADAPTERS[0]
    loaded = client.load_lora_adapter(name, name).get(timeout=SECONDS)
    assert loaded["success"]
    assert loaded["lora_name"] == name
    assert loaded["report"]["modules"] == 4
    assert loaded["loaded_adapters"][name].endswith(name)

    answer = client.generate(model=name, prompt="w1 w2", max_tokens=4, temperature=0).get(timeout=SECONDS)
    assert answer["object"] == "text_completion"
    assert answer["model"] == answer["lora_worker"]["adapter"] == name
    assert answer["lora_worker"]["digest"] == loaded["report"]["digest"]
    assert answer["usage"]["prompt_tokens"] == 2

    client.pin_lora_adapter(name).get(timeout=SECONDS)
    listed = client.list_lora_adapters().get(timeout=SECONDS)[name]
    (on_worker,) = listed["workers"].values()
    assert listed["pinned"]
    assert on_worker["resident"]
    assert on_worker["held"] == 0

    with pytest.raises(errors.AdapterConflictError, match="pinned"):
        client.unload_lora_adapter(name).get(timeout=SECONDS)
    client.unpin_lora_adapter(name).get(timeout=SECONDS)
    assert name not in client.unload_lora_adapter(name).get(timeout=SECONDS)["loaded_adapters"]
    with pytest.raises(errors.UnknownAdapterError, match=name):
        client.generate(model=name, prompt="w1").get(timeout=SECONDS)
    assert "was not loaded" in client.unload_lora_adapter(name).get(timeout=SECONDS)["message"]


def test_inspect_stats_shows_the_pool(worker: WorkerProcess, client: Client) -> None:
    name = ADAPTERS[1]
    client.load_lora_adapter(name, name).get(timeout=SECONDS)
    client.generate(model=name, prompt="w1", max_tokens=1).get(timeout=SECONDS)
    client.pin_lora_adapter(name).get(timeout=SECONDS)
    printed = worker.celery("inspect", "stats").stdout
    for word in ('"policy": "lru"', f'"{name}"', '"pinned"', '"hits"', '"loads"', '"evictions"'):
        assert word in printed
    client.unload_lora_adapter(name, force=True).get(timeout=SECONDS)


def test_three_hundred_rows_over_six_adapters_and_the_base_equal_their_solo_answers(
    client: Client, worker_settings: dict[str, Any], adapter_root: Path
) -> None:
    load_all(client)
    chance = random.Random(11)
    bodies: list[dict[str, Any]] = []
    for i in range(300):
        adapter = [*ADAPTERS, None][i % 7]
        body: dict[str, Any] = {
            "prompt": [chance.randrange(EOS) for _ in range(chance.randrange(1, 40))],
            "max_tokens": chance.randrange(1, 24),
            "temperature": chance.choice([0, 0.9]),
            "seed": i,
        }
        bodies.append(body | ({"model": adapter} if adapter else {}))
    chance.shuffle(bodies)
    results = [client.generate(**body) for body in bodies]
    answers = [result.get(timeout=SECONDS) for result in results]
    paths = [{"lora_name": name, "lora_path": str(adapter_root / name)} for name in ADAPTERS]
    alone = {**worker_settings, "adapter_roots": [adapter_root], "lora_paths": paths, "max_running_requests": 1}
    with Engine(Settings(**alone)) as engine:
        for body, answer in zip(bodies, answers, strict=True):
            solo: Any = engine.generate([body])[0]
            assert answer["choices"] == solo["choices"]
            assert answer["usage"] == solo["usage"]


def test_a_plain_celery_app_gets_answers_and_errors(worker: WorkerProcess) -> None:
    app = Celery("somebody-else", broker=worker.server.url, backend=worker.server.url)
    messages = [{"role": "user", "content": "w1 w2"}]
    kwargs = {"messages": messages, "max_tokens": 3, "temperature": 0}
    answer = app.send_task("lora_worker.generate", kwargs=kwargs, queue="lora").get(timeout=SECONDS)
    assert answer["object"] == "chat.completion"
    assert answer["choices"][0]["message"]["role"] == "assistant"
    with pytest.raises(Exception, match="max_tokens") as caught:
        app.send_task("lora_worker.generate", kwargs={**kwargs, "max_tokens": -1}, queue="lora").get(timeout=SECONDS)
    assert type(caught.value).__name__ == "InvalidRequestError"
    app.close()


BAD_BODIES = [
    ({"prompt": "w1", "model": "nobody"}, errors.UnknownAdapterError, ["nobody", "base model"]),
    ({"prompt": "w1", "best_off": 3}, errors.InvalidRequestError, ["best_off", "max_tokens"]),
    ({"prompt": "w1", "messages": [{"role": "user", "content": "w1"}]}, errors.InvalidRequestError, ["both"]),
    ({"temperature": 0}, errors.InvalidRequestError, ["neither"]),
    ({"prompt": [1] * (LONG + 7)}, errors.PromptTooLongError, [str(LONG + 7), str(LONG)]),
    ({"prompt": "w1", "max_tokens": -5}, errors.InvalidRequestError, ["max_tokens", "-5"]),
    ({"prompt": [5000]}, errors.InvalidRequestError, ["5000", "128"]),
    ({"prompt": ""}, errors.InvalidRequestError, ["no tokens"]),
]


@pytest.mark.parametrize(("body", "kind", "words"), BAD_BODIES)
def test_a_bad_request_fails_alone_with_one_sentence(
    client: Client, body: dict[str, Any], kind: type[Exception], words: list[str]
) -> None:
    good = client.generate(prompt="w3 w4", max_tokens=20, temperature=0)
    with pytest.raises(kind) as caught:
        client.generate(**body).get(timeout=SECONDS)
    for word in words:
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)
    assert good.get(timeout=SECONDS)["usage"]["completion_tokens"] > 0


def test_a_bad_adapter_is_refused_and_the_worker_goes_on(client: Client, adapter_root: Path, long_model: Path) -> None:
    (adapter_root / "empty").mkdir(exist_ok=True)
    with pytest.raises(errors.InvalidAdapterError, match=r"empty.*adapter_config\.json"):
        client.load_lora_adapter("empty", "empty").get(timeout=SECONDS)
    for outside in ("../..", "/etc", "missing"):
        with pytest.raises(errors.InvalidAdapterError, match="adapter_roots"):
            client.load_lora_adapter("outside", outside).get(timeout=SECONDS)
    save_adapter(long_model, adapter_root / "wide", seed=1, r=32, target_modules=["q_proj"])
    with pytest.raises(errors.InvalidAdapterError, match=r"rank 32.*max_lora_rank"):
        client.load_lora_adapter("wide", "wide").get(timeout=SECONDS)
    assert client.generate(prompt="w1", max_tokens=2).get(timeout=SECONDS)["usage"]["completion_tokens"] > 0


@pytest.mark.parametrize(
    ("name", "kwargs", "word"),
    [
        ("load_lora_adapter", {"lora_name": "x"}, "lora_path"),
        ("load_lora_adapter", {"lora_name": 3, "lora_path": "x"}, "lora_name"),
        ("load_lora_adapter", {"lora_name": "x", "lora_path": "x", "pinned": "yes"}, "pinned"),
        ("load_lora_adapter", {"lora_name": "../x", "lora_path": "x"}, "no adapter name"),
        ("unload_lora_adapter", {"lora_name": "x", "timeout": 3}, "timeout"),
        ("unload_lora_adapter", {"lora_name": "x", "timeout_seconds": "soon"}, "timeout_seconds"),
        ("list_lora_adapters", {"of": "x"}, "of"),
    ],
)
def test_a_wrong_argument_of_an_adapter_task_is_named(
    client: Client, name: str, kwargs: dict[str, Any], word: str
) -> None:
    with pytest.raises((errors.InvalidRequestError, errors.InvalidAdapterError), match=word):
        client.app.send_task(f"lora_worker.{name}", kwargs=kwargs).get(timeout=SECONDS)


def test_a_message_that_no_celery_would_send_harms_nobody(client: Client, connection: Redis) -> None:
    """Arguments that are no mapping, limits and priorities that are no numbers."""
    producer = client.app.amqp.producer_pool.acquire()
    for i, (kwargs, limit) in enumerate([(["w1"], None), ({"prompt": "w1", "max_tokens": 1}, "soon")]):
        headers = {"id": f"odd-{i}", "task": "lora_worker.generate", "lang": "py", "timelimit": [limit, None]}
        producer.publish(([], kwargs, {}), routing_key="lora", serializer="json", headers=headers)
    producer.release()
    answer = client.generate(prompt="w1", max_tokens=1, temperature=0).get(timeout=SECONDS)
    assert answer["usage"]["completion_tokens"] == 1
    wait_for(lambda: not connection.keys("lora:unacked:*"), "all messages are acknowledged")


def test_time_limits_count_from_admission_and_end_the_row_alone(client: Client) -> None:
    soft = client.generate(**ENDLESS, soft_time_limit=1)
    hard = client.generate(**ENDLESS, time_limit=1)
    other = client.generate(prompt="w1", max_tokens=5, temperature=0, ignore_eos=True)
    with pytest.raises(SoftTimeLimitExceeded):
        soft.get(timeout=SECONDS)
    with pytest.raises(TimeLimitExceeded):
        hard.get(timeout=SECONDS)
    assert other.get(timeout=SECONDS)["usage"]["completion_tokens"] == 5


def test_revoke_ends_a_running_row_and_no_other(client: Client, connection: Redis) -> None:
    doomed, other = client.generate(**ENDLESS), client.generate(**ENDLESS)
    wait_for(lambda: running_rows(client) == 2, "both rows run")
    client.app.control.revoke(doomed.id, terminate=True)
    with pytest.raises(TaskRevokedError):
        doomed.get(timeout=SECONDS)
    wait_for(lambda: running_rows(client) == 1, "one row runs")
    assert other.state == "PENDING"
    stop(client, other)
    wait_for(lambda: not connection.keys("lora:unacked:*"), "everything is acknowledged")


def test_a_waiting_row_that_expires_or_is_revoked_never_runs(client: Client) -> None:
    running = [client.generate(**ENDLESS) for _ in range(16)]
    wait_for(lambda: running_rows(client) == 16, "all rows are taken")
    expiring = client.generate(prompt="w1", max_tokens=1, expires=0.5)
    revoked = client.generate(prompt="w1", max_tokens=1)
    terminated = client.generate(prompt="w1", max_tokens=1)
    wait_for(lambda: waiting_rows(client) == 3, "three rows wait")
    client.app.control.revoke(revoked.id)
    client.app.control.revoke(terminated.id, terminate=True)
    with pytest.raises(TaskRevokedError):
        terminated.get(timeout=SECONDS)
    time.sleep(0.6)  # past the expiry
    stop(client, *running)
    for result in (expiring, revoked):
        with pytest.raises(TaskRevokedError):
            result.get(timeout=SECONDS)


def test_an_unload_waits_for_the_rows_that_run(client: Client) -> None:
    name = ADAPTERS[2]
    client.load_lora_adapter(name, name).get(timeout=SECONDS)
    row = client.generate(model=name, **ENDLESS)
    wait_for(lambda: running_rows(client) == 1, "the row runs")
    with pytest.raises(errors.AdapterTimeoutError, match="still run"):
        client.unload_lora_adapter(name, timeout_seconds=0.2).get(timeout=SECONDS)
    with pytest.raises(errors.UnknownAdapterError):
        client.generate(model=name, prompt="w1").get(timeout=SECONDS)
    assert running_rows(client) == 1
    stop(client, row)
    assert client.unload_lora_adapter(name).get(timeout=SECONDS)["success"]


def test_prompts_are_in_no_log_event_or_inspection(client: Client, worker: WorkerProcess) -> None:
    secret = "w99 w98 w97"
    plain = Celery("somebody-else", broker=worker.server.url, backend=worker.server.url)
    with watched_events(plain) as seen:
        row = plain.send_task("lora_worker.generate", kwargs={**ENDLESS, "prompt": secret}, queue="lora")
        wait_for(lambda: running_rows(client) == 1, "the row runs")
        inspected = str(client.app.control.inspect(timeout=2).active())
        assert row.id in inspected
        plain.send_task("lora_worker.generat", kwargs={"prompt": secret}, queue="lora")
        refused = plain.send_task("lora_worker.generate", args=[secret], queue="lora")
        with pytest.raises(Exception, match="positional arguments"):
            refused.get(timeout=SECONDS)
        wait_for(lambda: "does not serve" in worker.log, "the unknown task is logged")
        stop(client, row)
        done = plain.send_task("lora_worker.generate", kwargs={"prompt": secret, "max_tokens": 2}, queue="lora")
        done.get(timeout=SECONDS)
        expected = {"task-received", "task-started", "task-succeeded", "task-failed", "task-revoked"}
        wait_for(lambda: expected <= {event["type"] for event in list(seen)}, "all kinds of events are seen")
    answer_text = done.get()["choices"][0]["text"].strip()
    for where in (inspected, str(seen), worker.log):
        assert secret not in where
        assert answer_text not in where
    plain.close()


@contextmanager
def watched_events(app: Celery) -> Iterator[list[dict[str, Any]]]:
    """The events that a monitor such as Flower sees while the block runs."""
    seen: list[dict[str, Any]] = []
    with app.connection() as connection:
        receiver = app.events.Receiver(connection, handlers={"*": seen.append})
        thread = threading.Thread(target=lambda: receiver.capture(limit=None, timeout=None, wakeup=False))
        thread.start()
        try:
            wait_for(lambda: seen, "the worker's heartbeat is seen")
            yield seen
        finally:
            receiver.should_stop = True  # seen at the next heartbeat
            thread.join(SECONDS)


def running_rows(client: Client) -> int:
    return int(figures(client)["running"])


def waiting_rows(client: Client) -> int:
    return int(figures(client)["waiting"])


def figures(client: Client) -> dict[str, Any]:
    stats = wait_for(lambda: client.app.control.inspect(timeout=1).stats(), "the worker answers")
    (info,) = stats.values()
    found: dict[str, Any] = info["pool"]["lora"]
    return found
