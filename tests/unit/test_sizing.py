"""How many tokens the KV cache holds, and how many a row may have, by the settings."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from lora_worker.engine import Engine
from lora_worker.errors import PromptTooLongError, SettingsError
from lora_worker.settings import Settings


def test_a_cache_too_small_for_the_rows_asked_for_is_refused(tiny_model: Callable[[str], Path]) -> None:
    with pytest.raises(SettingsError, match=r"holds 64 tokens.*max_model_len 128"):
        Engine(Settings(model=tiny_model("llama"), device="cpu", max_total_tokens=64, max_model_len=128))


def test_a_cache_smaller_than_the_model_s_rows_makes_them_shorter(
    tiny_model: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    with Engine(Settings(model=tiny_model("llama"), device="cpu", max_total_tokens=64)) as engine:
        (answer,) = engine.generate([{"prompt": [1] * 4, "max_tokens": 60, "ignore_eos": True}])
        assert isinstance(answer, dict)
        assert answer["usage"]["total_tokens"] == 64
        with pytest.raises(PromptTooLongError, match="64 together"):
            engine.generate([{"prompt": [1] * 5, "max_tokens": 60}])
    assert "a row may have 64 and not the model's 256" in caplog.text
