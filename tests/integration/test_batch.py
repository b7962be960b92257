"""Batch files through a real Redis and a real worker with a tiny model."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kombu.entity import Exchange, Queue
from redis import Redis
from support.batch_command import BatchCommand, read_rows, request, write_lines
from support.worker_process import wait_for

from lora_worker.batch.flight import FREED_SECONDS, Flight
from lora_worker.batch.lines import MAX_LINE_BYTES
from lora_worker.client import Client
from lora_worker.embedded import EmbeddedServer
from lora_worker.fleet.keys import Keys

from .conftest import ADAPTERS, LONG
from .test_tasks import SECONDS, figures, load_all, running_rows


@pytest.fixture(autouse=True)
def adapters(client: Client, connection: Redis) -> None:
    """All adapters are loaded, and Redis holds nothing of that."""
    load_all(client)
    connection.delete(*left_behind(connection) or ["none"])


def run(server: EmbeddedServer, folder: Path, *arguments: str) -> tuple[int, str]:
    ended = BatchCommand(server, folder, *arguments).end(seconds=300)
    assert "Traceback" not in ended.errors, ended.errors
    return ended.code, ended.output


def left_behind(connection: Redis) -> list[str]:
    """Keys of batches, and answers that Redis is not about to remove."""
    answers = [key for key in connection.scan_iter("celery-task-meta-*") if int(connection.ttl(key)) > FREED_SECONDS]
    return [*connection.scan_iter("lora:batch:*"), *answers]


def mixed_lines(count: int) -> list[dict[str, Any]]:
    models = [{"model": name} for name in ADAPTERS] + [{}]
    return [request(f"c{i}", f"w{i % 100} w{i % 7}", **models[(i * 5) % 7]) for i in range(count)]


def test_a_whole_file_is_answered_in_order_and_as_single_requests_are(
    server: EmbeddedServer, client: Client, connection: Redis, tmp_path: Path
) -> None:
    lines = mixed_lines(300)
    write_lines(tmp_path / "in.jsonl", lines)
    assert run(server, tmp_path, "--max-in-flight", "40") == (0, "300 lines: 300 answered, 0 failed.\n")
    rows = read_rows(tmp_path / "out.jsonl")
    assert [row["custom_id"] for row in rows] == [line["custom_id"] for line in lines]
    assert len({row["id"] for row in rows}) == 300
    for line, row in list(zip(lines, rows, strict=True))[:40]:
        alone = client.generate(**line["body"])
        assert row["error"] is None
        assert row["response"]["status_code"] == 200
        body = row["response"]["body"]
        assert body["choices"] == alone.get(timeout=SECONDS)["choices"]
        assert body["id"] == f"cmpl-{row['response']['request_id']}"
        assert body["lora_worker"]["adapter"] == line["body"].get("model")
        alone.forget()
    assert left_behind(connection) == []


def test_chats_bare_lines_and_a_default_adapter(server: EmbeddedServer, tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "w1 w2"}]
    chat = {"custom_id": "chat", "method": "POST", "url": "/v1/chat/completions"}
    options = {"max_tokens": 2, "temperature": 0}
    lines = [{**chat, "body": {"messages": messages, **options}}, {"prompt": "w1", **options}]
    (tmp_path / "in.jsonl").write_bytes(gzip.compress("\n".join(map(json.dumps, lines)).encode()))
    assert run(server, tmp_path, "--model", ADAPTERS[2])[0] == 0
    first, second = read_rows(tmp_path / "out.jsonl")
    assert first["response"]["body"]["object"] == "chat.completion"
    assert second["custom_id"] == "line-2"
    assert {row["response"]["body"]["model"] for row in (first, second)} == {ADAPTERS[2]}


NASTY: list[tuple[str, bytes | dict[str, Any], str | None]] = [
    ("a good line", request("good-1", "w1 w2", model=ADAPTERS[0]), None),
    ("broken JSON", b'{"custom_id": "broken", "body": {', "invalid_json"),
    ("not an object", b'["a", "list"]', "not_an_object"),
    ("missing fields", b'{"custom_id": "no-body", "method": "POST", "url": "/v1/completions"}', "missing_field"),
    ("no custom_id", b'{"method": "POST", "url": "/v1/completions", "body": {"prompt": "w1"}}', "missing_field"),
    ("wrong url", {**request("url", "w1"), "url": "/v1/embeddings"}, "wrong_url"),
    ("wrong method", {**request("method", "w1"), "method": "GET"}, "wrong_method"),
    ("byte order mark", b"\xef\xbb\xbf" + json.dumps(request("mark", "w1")).encode(), None),
    ("CRLF", json.dumps(request("crlf", "w1")).encode() + b"\r", None),
    ("blank", b"", "blank_line"),
    ("10 MB", b'{"custom_id": "long", "prompt": "' + b"w1 " * 3_500_000 + b'"}', "line_too_long"),
    ("unknown adapter", request("stranger", "w1", model="nobody"), "unknown_adapter"),
    ("duplicate id", request("good-1", "w3"), "duplicate_custom_id"),
    ("too many tokens", request("too-long", "w1 " * (LONG + 5)), "prompt_too_long"),
    ("prompt and answer too long", request("too-long-2", "w1", max_tokens=LONG), "prompt_too_long"),
    ("invalid UTF-8", b'{"custom_id": "bytes", "prompt": "\xff\xfe"}', "invalid_utf8"),
    ("unknown field", request("field", "w1", best_off=2), "invalid_request"),
    ("wrong value", request("value", "w1", temperature="hot"), "invalid_request"),
    ("token id out of range", request("token", [5000]), "invalid_request"),  # type: ignore[arg-type]
    ("half a surrogate pair", b'{"custom_id": "half", "prompt": "w1 \\ud800", "max_tokens": 2}', "generation"),
    ("a good line at the end, without a newline", json.dumps(request("good-2", "w5")).encode(), None),
]


def test_every_nasty_line_is_accounted_for_by_name(
    server: EmbeddedServer, client: Client, connection: Redis, tmp_path: Path
) -> None:
    raw = [line if isinstance(line, bytes) else json.dumps(line).encode() for _, line, _ in NASTY]
    assert max(map(len, raw)) > MAX_LINE_BYTES
    (tmp_path / "in.jsonl").write_bytes(b"\n".join(raw))
    before = figures(client)["generated_tokens"]
    code, output = run(server, tmp_path)
    rows = read_rows(tmp_path / "out.jsonl")
    assert len(rows) == len(NASTY)
    for number, ((name, _, kind), row) in enumerate(zip(NASTY, rows, strict=True), 1):
        assert (row["error"] or {}).get("code") == kind, (name, row)
        assert (row["response"] is None) == (kind is not None)
        if kind:
            assert row["error"]["line"] == number
    expected = Counter(kind for _, _, kind in NASTY if kind)
    assert code == 3
    assert f"{len(NASTY)} lines: {len(NASTY) - expected.total()} answered, {expected.total()} failed." in output
    for kind, count in expected.items():
        assert f"{kind}: {count} (" in output
    # Nothing was generated but for the good lines.
    assert figures(client)["generated_tokens"] - before == 4 * 4
    assert left_behind(connection) == []


def test_error_rows_apart_and_tried_again(
    server: EmbeddedServer, client: Client, adapter_root: Path, tmp_path: Path
) -> None:
    (adapter_root / "late").unlink(missing_ok=True)
    models = ["late", ADAPTERS[1], "late", ADAPTERS[0]]
    lines = [request(f"c{i}", f"w{i}", model=model) for i, model in enumerate(models)]
    write_lines(tmp_path / "in.jsonl", [*lines, {"custom_id": "bad"}])
    options = ("--errors", "errors.jsonl")
    assert run(server, tmp_path, *options)[0] == 3
    assert [row["custom_id"] for row in read_rows(tmp_path / "out.jsonl")] == ["c1", "c3"]
    assert [row["custom_id"] for row in read_rows(tmp_path / "errors.jsonl")] == ["c0", "c2", "bad"]
    answered = read_rows(tmp_path / "out.jsonl")
    (adapter_root / "late").symlink_to(adapter_root / ADAPTERS[3])
    client.load_lora_adapter("late", "late").get(timeout=SECONDS)
    code, output = run(server, tmp_path, *options, "--retry-errors")
    assert (code, "4 answered, 1 failed" in output) == (3, True)
    rows = read_rows(tmp_path / "out.jsonl")
    assert [row["custom_id"] for row in rows] == ["c0", "c1", "c2", "c3"]
    assert [row for row in rows if row["custom_id"] in ("c1", "c3")] == answered
    assert [row["custom_id"] for row in read_rows(tmp_path / "errors.jsonl")] == ["bad"]
    client.unload_lora_adapter("late").get(timeout=SECONDS)


def test_a_message_is_the_one_that_celery_would_send(client: Client, connection: Redis) -> None:
    body = {"model": ADAPTERS[0], "prompt": "w1", "max_tokens": 1}
    queue = Queue("nobody-listens", exchange=Exchange(""), routing_key="nobody-listens")
    job = "00000000-0000-0000-0000-00000000000a"
    flight = Flight(client.app, job, Keys("nobody", 64), queue_of=lambda _: queue, cancel=client.cancel)
    flight.send({"7.0": body, "8.0": body})
    flight.send({"7.0": body, "8.0": body})  # in flight already
    client.app.send_task(
        "lora_worker.generate",
        kwargs=body,
        queue=queue,
        task_id=flight.task_id("7.0"),
        priority=9,
        argsrepr="",
        kwargsrepr="",
    )
    (key,) = connection.scan_iter("nobody-listens*")
    sent = [json.loads(message) for message in connection.lrange(key, 0, -1)]
    assert len(sent) == 3
    by_celery, _, ours = sent
    for message in (by_celery, ours):
        assert message["properties"].pop("delivery_tag")
    assert ours == by_celery
    connection.delete(key)
    flight.revoke(flight.names)
    flight.close()


def test_client_batch_yields_as_they_finish_and_takes_no_more_than_there_is_room(
    client: Client, connection: Redis
) -> None:
    taken = 0
    seen = 0

    def rows() -> Iterator[Any]:
        nonlocal taken
        for i in range(200):
            taken += 1
            assert taken - seen <= 21
            yield "no request" if i == 50 else request(f"c{i}", f"w{i % 100}", model=ADAPTERS[i % 6])["body"]

    results = []
    for result in client.batch(rows(), max_in_flight=20):
        seen += 1
        results.append(result)
    assert sorted(result.index for result in results) == list(range(200))
    (bad,) = (result for result in results if result.error)
    assert (bad.index, bad.error and bad.error.code, bad.response) == (50, "not_an_object", None)
    for result in results:
        if result.response is not None:
            assert result.response["model"] == ADAPTERS[result.index % 6]
    assert left_behind(connection) == []


def test_leaving_a_client_batch_early_revokes_what_is_in_flight(client: Client, connection: Redis) -> None:
    endless = {"prompt": [1], "temperature": 0, "max_tokens": LONG - 10, "ignore_eos": True}
    quick = {"prompt": "w1", "max_tokens": 1}
    for result in client.batch([quick, endless, endless]):
        assert result.index == 0
        wait_for(lambda: running_rows(client) == 2, "the endless rows run")
        break
    wait_for(lambda: running_rows(client) == 0, "no row runs")
    assert not connection.exists(*[key for key in left_behind(connection) if "batch" in key] or ["none"])


def test_a_client_batch_holds_no_subscription_a_task(client: Client, connection: Redis) -> None:
    subscribed = []
    for _ in client.batch({"prompt": "w1", "max_tokens": 1} for _ in range(50)):
        subscribed.append(sum(str(channel).startswith("celery-task-meta") for channel in connection.pubsub_channels()))
    assert max(subscribed) == min(subscribed)
