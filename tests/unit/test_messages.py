"""The wire contract of a generate request."""

from __future__ import annotations

from typing import Any

import pytest

from lora_worker import errors
from lora_worker.errors import InvalidRequestError, LoraWorkerError
from lora_worker.messages import parse_generate


def test_defaults_are_openais() -> None:
    completion = parse_generate({"prompt": "hello"})
    assert (completion.temperature, completion.top_p, completion.token_limit) == (1.0, 1.0, 16)
    chat = parse_generate({"messages": [{"role": "user", "content": "hello"}]})
    assert chat.token_limit is None
    assert parse_generate({**chat.model_dump(exclude_none=True), "max_completion_tokens": 5}).token_limit == 5


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({}, ["neither", "prompt", "messages"]),
        ({"prompt": "a", "messages": [{"role": "user"}]}, ["both"]),
        ({"prompt": "a", "stream": True}, ["'stream'", "max_tokens"]),
        ({"prompt": "a", "max_tokens": -1}, ["max_tokens", "-1"]),
        ({"prompt": "a", "max_tokens": 1.5}, ["max_tokens", "1.5"]),
        ({"prompt": "a", "max_tokens": True}, ["max_tokens"]),
        ({"prompt": "a", "temperature": -0.1}, ["temperature", "-0.1"]),
        ({"prompt": "a", "temperature": float("nan")}, ["temperature"]),
        ({"prompt": "a", "top_p": 0}, ["top_p"]),
        ({"prompt": "a", "top_k": -1}, ["top_k"]),
        ({"prompt": "a", "stop": ["", "x"]}, ["stop", "empty"]),
        ({"prompt": "a", "stop": ["x"] * 17}, ["stop", "17", "16"]),
        ({"prompt": [1, -2]}, ["prompt", "token ids"]),
        ({"prompt": [1, "two"]}, ["prompt", "token ids"]),
        ({"prompt": ["a", "b"]}, ["prompt", "token ids"]),
        ({"messages": []}, ["messages", "non-empty"]),
        ({"messages": "hello"}, ["messages", "list"]),
        ({"prompt": "a", "max_completion_tokens": 4}, ["max_completion_tokens", "max_tokens"]),
    ],
)
def test_a_wrong_body_is_one_sentence(body: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        parse_generate(body)
    for word in words:
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_error_never_repeats_the_prompt() -> None:
    for body in ({"prompt": {"secret": 1}}, {"messages": [{"secret": 1}]}, {"prompt": "a", "stop": {"secret": 1}}):
        with pytest.raises(InvalidRequestError) as caught:
            parse_generate(body)
        assert "secret" not in str(caught.value)


def test_every_error_survives_the_journey_to_a_client() -> None:
    """Celery rebuilds an error as its class over its arguments, which travel as JSON."""
    classes = [e for e in vars(errors).values() if isinstance(e, type) and issubclass(e, LoraWorkerError)]
    assert len(classes) > 10
    for error_class in classes:
        error = error_class("what was wrong, and what would be right")
        again = error_class(*error.args)
        assert str(again) == str(error)
        assert error_class.__doc__
