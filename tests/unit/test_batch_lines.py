"""Lines of batch files: what is taken, and what is said of the others."""

from __future__ import annotations

import json
from typing import Any

import pytest

from lora_worker.batch.lines import BadLine, Line, is_blank, read_line

BODY = {"model": "a", "prompt": "a secret"}
CHAT = {"model": "a", "messages": [{"role": "user", "content": "a secret"}]}


def openai(**changes: Any) -> dict[str, Any]:
    line = {"custom_id": "x", "method": "POST", "url": "/v1/completions", "body": BODY} | changes
    return {name: value for name, value in line.items() if value is not ...}


def read(line: Any, **options: Any) -> Line | BadLine:
    raw = line if isinstance(line, bytes) else json.dumps(line).encode()
    return read_line(raw, 17, **options)


def test_both_forms_of_openai_are_read() -> None:
    assert read(openai()) == Line("x", BODY)
    assert read(openai(url="/v1/chat/completions", body=CHAT)) == Line("x", CHAT)
    with_null = {**CHAT, "prompt": None}
    assert read(openai(url="/v1/chat/completions", body=with_null)) == Line("x", with_null)


def test_a_bare_line_is_named_after_its_number() -> None:
    assert read({"prompt": "p"}) == Line("line-17", {"prompt": "p"})
    assert read({"messages": CHAT["messages"], "custom_id": "own"}) == Line("own", {"messages": CHAT["messages"]})


def test_the_default_model_is_for_lines_that_name_none() -> None:
    for line, model in (({"prompt": "p"}, "b"), ({"prompt": "p", "model": None}, "b"), (openai(), "a")):
        found = read(line, default_model="b")
        assert isinstance(found, Line)
        assert found.model == model


@pytest.mark.parametrize("ending", [b"", b"\n", b"\r\n"])
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_endings_and_byte_order_marks_do_not_matter(mark: bytes, ending: bytes) -> None:
    assert read(mark + json.dumps(openai()).encode() + ending) == Line("x", BODY)


BAD: list[tuple[Any, str, str | None, list[str]]] = [
    (b"", "blank_line", None, ["blank"]),
    (b" \t\r\n", "blank_line", None, ["blank"]),
    (b'{"prompt": "a secret', "invalid_json", None, ["column 12"]),
    (b'{"prompt": "a secret"} x', "invalid_json", None, ["column 24", "Extra data"]),
    (b'{"prompt": NaN}', "invalid_json", None, ["NaN"]),
    (b'{"seed": ' + b"1" * 5000 + b"}", "invalid_json", None, ["digits"]),
    (b"[" * 100_000, "invalid_json", None, ["nested"]),
    (b'{"prompt": "\xff"}', "invalid_utf8", None, ["byte 13"]),
    (["a secret"], "not_an_object", None, ["array"]),
    ("a secret", "not_an_object", None, ["string"]),
    (7, "not_an_object", None, ["number"]),
    (True, "not_an_object", None, ["boolean"]),
    (None, "not_an_object", None, ["null"]),
    ({}, "missing_field", "line-17", ["prompt", "messages", "body"]),
    (openai(custom_id=...), "missing_field", None, ["custom_id"]),
    (openai(method=...), "missing_field", "x", ["method"]),
    (openai(url=...), "missing_field", "x", ["url"]),
    (openai(body=...), "missing_field", "x", ["body"]),
    (openai(custom_id=5), "invalid_custom_id", None, ["string"]),
    (openai(custom_id=""), "invalid_custom_id", None, ["string"]),
    (openai(custom_id="\ud800"), "invalid_custom_id", None, ["surrogate"]),
    (openai(body={**BODY, "model": "\ud800"}), "invalid_request", "x", ["surrogate"]),
    (openai(priority=1), "unknown_field", "x", ["'priority'", "custom_id, method, url, body"]),
    (openai(method="GET"), "wrong_method", "x", ["'GET'", "'POST'"]),
    (openai(url="/v1/embeddings"), "wrong_url", "x", ["'/v1/embeddings'", "/v1/chat/completions"]),
    (openai(body=CHAT), "wrong_url", "x", ["takes prompt", "has messages"]),
    (openai(url="/v1/chat/completions"), "wrong_url", "x", ["takes messages", "has prompt"]),
    (openai(body="a secret"), "invalid_request", "x", ["string"]),
    (openai(body={**BODY, "best_off": 2}), "invalid_request", "x", ["best_off"]),
    (openai(body={**BODY, "max_tokens": -1}), "invalid_request", "x", ["max_tokens", "-1"]),
    (openai(body={**BODY, "model": ["a"]}), "invalid_request", "x", ["model"]),
    ({"prompt": "a secret", "messages": CHAT["messages"]}, "invalid_request", "line-17", ["both"]),
    ({"prompt": "a secret", "stop": [""]}, "invalid_request", "line-17", ["stop"]),
]


@pytest.mark.parametrize(("line", "code", "custom_id", "words"), BAD)
def test_a_bad_line_is_named_with_its_number_and_what_is_wrong(
    line: Any, code: str, custom_id: str | None, words: list[str]
) -> None:
    found = read(line)
    assert isinstance(found, BadLine)
    assert (found.code, found.custom_id) == (code, custom_id)
    assert found.message.startswith("line 17")
    for word in words:
        assert word in found.message
    assert "secret" not in found.message
    assert "\n" not in found.message


def test_a_line_that_is_too_long_says_how_long_one_may_be() -> None:
    found = read_line(None, 17)
    assert isinstance(found, BadLine)
    assert (found.code, "8388608 bytes" in found.message) == ("line_too_long", True)


def test_what_is_blank() -> None:
    assert is_blank(b"\xef\xbb\xbf \r\n")
    assert not is_blank(b"{}")
    assert not is_blank(None)
