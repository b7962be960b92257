"""How adapters are placed on the base model, beside whatever else runs in the process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from lora_worker.adapters.plan import AdapterPlanner
from lora_worker.lora.inject import targetable


def make_planner(folder: Path) -> AdapterPlanner:
    config = AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        paths = set(targetable(AutoModelForCausalLM.from_config(config), ["all-linear"]))
    return AdapterPlanner(
        config,
        targetable=paths,
        max_rank=64,
        dtype=torch.float32,
        page_locked=False,
        base_parameter=lambda _: None,
    )


def test_a_load_leaves_the_default_dtype_alone(
    tiny_model: Callable[[str], Path],
    tiny_adapters: Callable[[str], dict[str, Path]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is the whole process's, and rows are generated meanwhile."""
    planner, folder = make_planner(tiny_model("llama")), tiny_adapters("llama")["everything"]
    set_dtypes: list[torch.dtype] = []
    monkeypatch.setattr(torch, "set_default_dtype", set_dtypes.append)
    assert planner.load("a", folder).report.ranks == [8]
    assert not set_dtypes


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_an_adapter_leaves_no_trace_on_the_next_one(
    family: str, tiny_model: Callable[[str], Path], tiny_adapters: Callable[[str], dict[str, Path]]
) -> None:
    planner = make_planner(tiny_model(family))
    for name, folder in tiny_adapters(family).items():
        alone = make_planner(tiny_model(family)).load(name, folder)
        beside = planner.load(name, folder)
        assert beside.adapter.digest == alone.adapter.digest
        assert set(beside.adapter.pairs) == set(alone.adapter.pairs)
