"""The wire contract of a generate request."""

from __future__ import annotations

from typing import Any

import pytest

from lora_worker import errors
from lora_worker.errors import InvalidRequestError, LoraWorkerError
from lora_worker.messages import parse_generate

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}]}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]


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
        ({"prompt": "a", "stream": True}, ["'stream' is not served", "leave it out"]),
        ({"prompt": "a", "response_format": {"type": "json_object"}}, ["'response_format' is not served", "grammar"]),
        ({"prompt": "a", "best_off": 2}, ["'best_off' is no field", "max_tokens"]),
        ({"prompt": "a", "best_off": None}, ["'best_off' is no field"]),
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
        ({"prompt": "a", "n": 0}, ["n has", "0"]),
        ({"prompt": "a", "n": 129}, ["n has", "129", "128"]),
        ({"prompt": "a", "min_tokens": 17}, ["min_tokens", "17", "16"]),
        ({"prompt": "a", "min_p": 1.1}, ["min_p"]),
        ({"prompt": "a", "presence_penalty": 2.5}, ["presence_penalty", "2.5"]),
        ({"prompt": "a", "frequency_penalty": -2.5}, ["frequency_penalty", "-2.5"]),
        ({"prompt": "a", "repetition_penalty": 0}, ["repetition_penalty", "0"]),
        ({"prompt": "a", "logit_bias": {"x": 1}}, ["logit_bias", "token ids"]),
        ({"prompt": "a", "logit_bias": {"1": 101}}, ["logit_bias", "100"]),
        ({"prompt": "a", "logit_bias": {str(i): 1 for i in range(1025)}}, ["logit_bias", "1024"]),
        ({"prompt": "a", "stop_token_ids": ["x"]}, ["stop_token_ids", "token ids"]),
        ({"prompt": "a", "stop_token_ids": list(range(1025))}, ["stop_token_ids", "1024"]),
        ({"prompt": "a", "logprobs": True}, ["logprobs", "integer", "0 to 20"]),
        ({"prompt": "a", "logprobs": 21}, ["logprobs", "0 to 20"]),
        ({"prompt": "a", "top_logprobs": 2}, ["top_logprobs belongs to a chat"]),
        ({"prompt": "a", "tools": TOOLS}, ["tools belongs to a chat"]),
        ({**CHAT, "logprobs": 2}, ["logprobs", "true or false"]),
        ({**CHAT, "top_logprobs": 2}, ["top_logprobs", "logprobs"]),
        ({**CHAT, "tools": []}, ["tools", "non-empty"]),
        ({**CHAT, "tools": [{"type": "custom", "custom": {"name": "f"}}]}, ["tools", "function"]),
        ({**CHAT, "tools": [{"type": "function", "function": {"name": "f", "strict": True}}]}, ["not strict"]),
        ({**CHAT, "tools": TOOLS, "tool_choice": "required"}, ["tool_choice", "'auto' or 'none'"]),
        ({"messages": [{"role": "user"}]}, ["message 0", "no content"]),
        (
            {"messages": [*CHAT["messages"], {"role": "user", "content": [{"type": "image_url"}]}]},
            ["message 1", "text"],
        ),
    ],
)
def test_a_wrong_body_is_one_sentence(body: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        parse_generate(body)
    for word in words:
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)


def test_null_is_absence_and_values_that_ask_for_nothing_are_accepted() -> None:
    plain = parse_generate({"prompt": "a"})
    nothing = {"stream": False, "best_of": 1, "suffix": None, "user": "me", "temperature": None, "logit_bias": None}
    assert parse_generate({"prompt": "a", **nothing}) == plain


def test_a_tool_and_a_message_keep_what_else_they_carry() -> None:
    messages = [*CHAT["messages"], {"role": "tool", "content": "rain", "tool_call_id": "7"}]
    request = parse_generate({"messages": messages, "tools": TOOLS})
    assert request.model_dump(include={"messages", "tools"}, exclude_unset=True) == {
        "messages": messages,
        "tools": TOOLS,
    }


def test_token_ids_of_a_bias_are_strings_or_integers() -> None:
    request = parse_generate({"prompt": "a", "logit_bias": {"5": -100, 6: 1.5}})
    assert request.logit_bias == {5: -100, 6: 1.5}


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


FLOATS = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")


@pytest.mark.parametrize("name", [*FLOATS, "ignore_eos"])
@pytest.mark.parametrize("value", [True, "0.5", "yes", 1, 0.5])
def test_a_value_is_taken_as_it_is_and_never_as_what_it_could_mean(name: str, value: Any) -> None:
    right = type(value) is bool if name == "ignore_eos" else type(value) in (int, float)
    if right:
        assert getattr(parse_generate({"prompt": "a", name: value}), name) == value
        return
    with pytest.raises(InvalidRequestError, match=f"the field {name} has the wrong value '{value}'"):
        parse_generate({"prompt": "a", name: value})


@pytest.mark.parametrize("bias", [True, "1"])
def test_a_bias_is_a_number(bias: Any) -> None:
    with pytest.raises(InvalidRequestError, match="the field logit_bias must be"):
        parse_generate({"prompt": "a", "logit_bias": {"1": bias}})
    assert parse_generate({"prompt": "a", "logit_bias": {"1": 2, 3: 0.5}}).logit_bias == {1: 2.0, 3: 0.5}


@pytest.mark.parametrize("strict", [0, 0.0, "false", True])
def test_a_tool_is_strict_or_not_by_a_boolean(strict: Any) -> None:
    tool = {"type": "function", "function": {"name": "f", "strict": strict}}
    with pytest.raises(InvalidRequestError, match="the field tools must be"):
        parse_generate({"messages": [{"role": "user", "content": "a"}], "tools": [tool]})
