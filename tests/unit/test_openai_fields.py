"""Every field of OpenAI's own types has a decision, and the documentation says which."""

from __future__ import annotations

from pathlib import Path
from typing import get_type_hints

import pytest
from openai.types import completion_create_params as completion
from openai.types.chat import completion_create_params as chat

from lora_worker.errors import InvalidRequestError
from lora_worker.messages import GenerateRequest, parse_generate
from lora_worker.openai_fields import CHAT_ALONE, REFUSED, SERVED, WITHOUT_EFFECT, decisions_table

DOCUMENT = Path(__file__).parents[2] / "docs" / "requests.md"
COMPLETION = set(get_type_hints(completion.CompletionCreateParamsNonStreaming))
CHAT = set(get_type_hints(chat.CompletionCreateParamsNonStreaming))


def test_every_field_of_openais_types_has_one_decision() -> None:
    decided = [*SERVED, *WITHOUT_EFFECT, *REFUSED]
    assert (COMPLETION | CHAT) - set(decided) == set()
    assert len(decided) == len(set(decided))
    assert set(WITHOUT_EFFECT) | set(REFUSED) <= COMPLETION | CHAT
    # OpenAI's newer name for max_tokens, and what is a chat's alone.
    assert set(CHAT_ALONE) == (CHAT - COMPLETION) & set(SERVED) - {"messages"}


def test_the_served_fields_are_those_of_the_contract() -> None:
    assert set(SERVED) == set(GenerateRequest.model_fields)


@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_field_is_named_with_its_reason_unless_it_asks_for_nothing(name: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        parse_generate({"prompt": "a", name: "something"})
    assert name in str(caught.value)
    assert REFUSED[name].reason in str(caught.value)
    for value in (None, *REFUSED[name].harmless):
        assert parse_generate({"prompt": "a", name: value})


@pytest.mark.parametrize(("name", "value"), [("best_of", True), ("best_of", 1.0), ("stream", 0), ("stream", 0.0)])
def test_a_value_of_another_type_asks_for_something(name: str, value: object) -> None:
    with pytest.raises(InvalidRequestError, match=f"'{name}' is not served"):
        parse_generate({"prompt": "a", name: value})


def test_the_name_of_an_unknown_field_is_not_repeated_at_length() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        parse_generate({"prompt": "a", "x" * 10_000: 1})
    assert "x" * 80 in str(caught.value)
    assert "x" * 81 not in str(caught.value)


def test_the_documentation_has_the_table_of_the_code() -> None:
    assert decisions_table() in DOCUMENT.read_text()
