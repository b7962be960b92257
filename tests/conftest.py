"""Fixtures of all tiers: tiny models and their adapters, made once a session."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from support.tiny_models import save_adapter, save_model
from transformers.utils.logging import disable_progress_bar

from lora_worker.engine.core import EngineCore
from lora_worker.settings_sources import PREFIX

# `make test` runs three processes on two cores; more threads would only wait for each other.
torch.set_num_threads(1)
disable_progress_bar()

MakeModel = Callable[[str], Path]
MakeAdapters = Callable[[str], dict[str, Path]]

_ATTENTION = {"llama": ["q_proj", "v_proj"], "qwen2": ["q_proj", "v_proj"], "gpt2": ["c_attn"]}
_ALL = {
    "llama": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    "qwen2": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    "gpt2": ["c_attn", "c_proj", "c_fc"],
}
_MLP = {"llama": ["down_proj"], "qwen2": ["gate_proj", "up_proj"], "gpt2": ["c_fc"]}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA card"))


@pytest.fixture(autouse=True)
def integrity_after_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every engine of a test compares its counts after each step; a count that drifts fails the rows that run."""
    step = EngineCore.step

    def checked(core: EngineCore) -> bool:
        progressed = step(core)
        core.check_integrity()
        return progressed

    monkeypatch.setattr(EngineCore, "step", checked)


@pytest.fixture(autouse=True)
def clean_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """No test sees the settings of whoever runs it."""
    for variable in list(os.environ):
        if variable.startswith(PREFIX):
            monkeypatch.delenv(variable)
    before = Path.cwd()
    os.chdir(tmp_path)
    yield
    os.chdir(before)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> MakeModel:
    """The folder of a tiny random model of a family."""
    folders: dict[str, Path] = {}

    def make(family: str) -> Path:
        if family not in folders:
            folders[family] = save_model(family, tmp_path_factory.mktemp(family))
        return folders[family]

    return make


@pytest.fixture(scope="session")
def tiny_adapters(tmp_path_factory: pytest.TempPathFactory, tiny_model: MakeModel) -> MakeAdapters:
    """Four adapters of different ranks and targets for a family, by name."""
    made: dict[str, dict[str, Path]] = {}

    def make(family: str) -> dict[str, Path]:
        if family not in made:
            base, root = tiny_model(family), tmp_path_factory.mktemp(f"{family}-adapters")
            made[family] = {
                "attention": save_adapter(base, root / "attention", seed=1, r=4, target_modules=_ATTENTION[family]),
                "everything": save_adapter(
                    base, root / "everything", seed=2, r=8, lora_alpha=4, target_modules=_ALL[family]
                ),
                "narrow": save_adapter(base, root / "narrow", seed=3, r=1, target_modules=_ATTENTION[family]),
                "mlp": save_adapter(
                    base, root / "mlp", seed=4, r=16, lora_alpha=8, use_rslora=True, target_modules=_MLP[family]
                ),
            }
        return made[family]

    return make
