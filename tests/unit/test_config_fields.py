"""Every field of the installed PEFT has a decision, and the documentation says which."""

from __future__ import annotations

from pathlib import Path

from lora_worker.adapters.config_fields import REFUSED, SERVED, WITHOUT_EFFECT, decisions, decisions_table

DOCUMENT = Path(__file__).parents[2] / "docs" / "adapters.md"


def test_every_field_has_one_decision_with_its_reason() -> None:
    assert not set(SERVED) & set(WITHOUT_EFFECT)
    assert not set(REFUSED) & (set(SERVED) | set(WITHOUT_EFFECT))
    assert {name for name, _, reason in decisions() if reason == "not known to this worker"} == set()


def test_the_documentation_has_the_table_of_the_code() -> None:
    assert decisions_table() in DOCUMENT.read_text()
