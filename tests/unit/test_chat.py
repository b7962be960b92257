"""What reaches a chat template, and what a template does not take is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.tiny_models import ids_of, make_tokenizer

from lora_worker.engine.chat import ChatTemplate
from lora_worker.errors import InvalidRequestError
from lora_worker.messages import parse_generate

TOOLS = [{"type": "function", "function": {"name": "w9", "parameters": {"type": "object"}}}]
CALL = {"id": "7", "type": "function", "function": {"name": "w9", "arguments": '{"w5": "w6"}'}}
CALLED: list[dict[str, Any]] = [
    {"role": "w1", "content": "w2"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "7", "content": "w8"},
]

PLAIN = "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} {% endfor %}"
JOINING = "{% for m in messages %}{{ m['role'] + ' ' + m['content'] + ' ' }}{% endfor %}"
PARTS = (
    "{% for m in messages %}{{ m.role }} {% if m.content is string %}{{ m.content }} {% else %}"
    "{% for part in m.content %}{{ part.text }} {% endfor %}{% endif %}{% endfor %}"
)
FIRST_SYSTEM_PART = (  # as Gemma 3's
    "{% if messages[0].role == 'system' %}{% if messages[0].content is string %}{{ messages[0].content + ' ' }}"
    "{% else %}{{ messages[0].content[0].text + ' ' }}{% endif %}{% set messages = messages[1:] %}{% endif %}"
    "{% for m in messages %}{% if m.content is string %}{{ m.content | trim }} {% else %}"
    "{% for part in m.content %}{{ part.text | trim }} {% endfor %}{% endif %}{% endfor %}"
)
SYSTEM_AS_A_STRING = (  # as that of Llama 3.2 with pictures
    "{% if messages[0].role == 'system' %}{{ messages[0].content | trim }} {% set messages = messages[1:] %}{% endif %}"
    + PARTS
)
WITH_TOOLS = (
    "{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}"
    "{% for m in messages %}{{ m.content }} {% for call in m.tool_calls or [] %}"
    "{% for name, value in call.function.arguments.items() %}{{ name }} {{ value }} {% endfor %}{% endfor %}"
    "{% endfor %}"
)


def words(template: str, messages: list[dict[str, Any]], **more: Any) -> list[int]:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template
    return ChatTemplate(tokenizer).ids(parse_generate({"messages": messages, **more}))


def test_tools_and_calls_reach_the_template_and_arguments_as_objects() -> None:
    assert words(WITH_TOOLS, CALLED, tools=TOOLS) == ids_of("w9 w2 w5 w6 w8")
    assert words(WITH_TOOLS, CALLED, tools=TOOLS, tool_choice="none") == ids_of("w2 w5 w6 w8")


@pytest.mark.parametrize(
    ("messages", "more", "word"), [(CALLED[:1], {"tools": TOOLS}, "no tools"), (CALLED, {}, "no tool_calls")]
)
def test_what_the_template_drops_is_refused(messages: list[dict[str, Any]], more: dict[str, Any], word: str) -> None:
    with pytest.raises(InvalidRequestError, match=word):
        words(PLAIN, messages, **more)


def test_arguments_that_are_no_json_are_refused_without_repeating_them() -> None:
    broken = {**CALL, "function": {"name": "w9", "arguments": "secret"}}
    with pytest.raises(InvalidRequestError, match=r"message 0 .*not JSON") as caught:
        words(WITH_TOOLS, [{"role": "assistant", "tool_calls": [broken]}])
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("template", [PLAIN, JOINING, PARTS])
def test_one_text_part_is_its_string(template: str) -> None:
    assert words(template, [{"role": "w1", "content": [{"type": "text", "text": "w2 w3"}]}]) == [1, 2, 3]


def test_several_text_parts_are_for_templates_that_take_lists() -> None:
    messages = [{"role": "w1", "content": [{"type": "text", "text": "w2"}, {"type": "text", "text": "w3"}]}]
    assert words(PARTS, messages) == [1, 2, 3]
    for template in (PLAIN, JOINING):
        with pytest.raises(InvalidRequestError, match="string alone"):
            words(template, messages)


@pytest.mark.parametrize(
    ("template", "word"),
    [(FIRST_SYSTEM_PART, "leaves out part 1 of message 0"), (SYSTEM_AS_A_STRING, "all their fields")],
)
def test_no_part_is_dropped_in_silence(template: str, word: str) -> None:
    parts = [{"type": "text", "text": " w2 "}, {"type": "text", "text": "w3"}]
    user, system = {"role": "user", "content": parts}, {"role": "system", "content": parts}
    with pytest.raises(InvalidRequestError, match=word):
        words(template, [system, user])
    assert words(template, [{"role": "system", "content": "w1"}, user])[-2:] == [2, 3]


def test_a_template_that_stumbles_is_one_sentence_without_the_text() -> None:
    with pytest.raises(InvalidRequestError, match=r"cannot be filled .*\(TypeError\)") as caught:
        words("{{ messages[0].content + 1 }}", [{"role": "w1", "content": json.dumps("secret")}])
    assert "secret" not in str(caught.value)
