"""Which base models are served, and which are refused by name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import BloomConfig, BloomForCausalLM, PreTrainedModel

from lora_worker.engine import Engine
from lora_worker.errors import UnsupportedModelError
from lora_worker.models.loading import load_model
from lora_worker.settings import Settings


def start(folder: Path, **more: Any) -> None:
    Engine(Settings(model=folder, device="cpu", dtype="float32", **more)).close()


def test_a_family_that_never_calls_the_attention_function_is_refused(tmp_path: Path) -> None:
    model: PreTrainedModel = BloomForCausalLM(BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=4))
    model.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="Bloom"):
        start(tmp_path)


def test_rope_that_looks_at_the_longest_row_is_bounded_to_where_it_does_not(
    tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    for file in tiny_model("llama").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0, "original_max_position_embeddings": 100}
    (tmp_path / "config.json").write_text(json.dumps(config | {"rope_parameters": rope}))
    start(tmp_path)
    with pytest.raises(UnsupportedModelError, match=r"max_model_len is 101.*up to 100"):
        start(tmp_path, max_model_len=101)


def test_an_end_of_sequence_of_the_generation_config_counts_also_where_it_is_zero(
    tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    shutil.copytree(tiny_model("llama"), tmp_path, dirs_exist_ok=True)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 0}))
    loaded = load_model(Settings(model=tmp_path, device="cpu", dtype="float32"))
    loaded.attention.close()
    assert loaded.eos_ids == {0}
