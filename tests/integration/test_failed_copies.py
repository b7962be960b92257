"""An adapter that can't be copied into a slot fails its own requests, and nothing is lost by it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.rows import Row
from support.tiny_models import save_adapter
from support.worker_process import wait_for

from lora_worker.engine import Engine
from lora_worker.errors import AdapterError
from lora_worker.lora.layer import LoraLinear


class Memory:
    """Of the device."""

    is_full = True


@pytest.fixture
def folders(paths: dict[str, Path], tiny_model: Callable[[str], Path], tmp_path: Path) -> dict[str, Path]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT says that it saves the output layer besides
        wide = save_adapter(tiny_model("llama"), tmp_path / "wide", seed=7, r=4, target_modules=["lm_head"])
    return {"small": paths["attention"], "wide": wide}


@pytest.fixture(params=["allocate", "_copy"])
def memory(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Memory:
    """Too full to allocate the output layer's weights, or to copy into them, until the test says otherwise."""
    found, real = Memory(), getattr(LoraLinear, request.param)

    def checked(layer: LoraLinear, *arguments: Any) -> Any:
        if found.is_full and layer.allocates_late:
            raise MemoryError("the device is full")
        return real(layer, *arguments)

    monkeypatch.setattr(LoraLinear, request.param, checked)
    return found


def body(name: str) -> dict[str, Any]:
    return {"model": name, "prompt": [1, 2], "max_tokens": 3}


def entries(folders: dict[str, Path], pinned: str | None = None) -> list[dict[str, Any]]:
    return [{"lora_name": n, "lora_path": str(path), "pinned": n == pinned} for n, path in folders.items()]


@pytest.mark.parametrize("slots", [1, 2])
def test_its_slot_and_pages_are_free_again(
    slots: int, memory: Memory, make_engine: Callable[..., Engine], folders: dict[str, Path]
) -> None:
    engine = make_engine(lora_paths=entries(folders), max_loras_per_batch=slots)
    for _ in range(3):
        with pytest.raises(AdapterError, match=r"'wide' could not be copied into a slot: .*the device is full"):
            engine.generate([body("wide")])
        assert engine.generate([body("small")])
        engine.check_integrity()
    here = engine.list_lora_adapters()["wide"]["workers"][engine.worker_name]
    assert "the device is full" in here["error"]
    memory.is_full = False
    assert engine.generate([body("wide")])
    assert engine.list_lora_adapters()["wide"]["workers"][engine.worker_name]["error"] is None


def test_a_pinned_one_is_said_and_holds_up_nobody(
    memory: Memory, make_engine: Callable[..., Engine], folders: dict[str, Path]
) -> None:
    engine = make_engine(lora_paths=entries(folders), max_loras_per_batch=2)
    running = Row(engine, prompt=[1])
    assert running.started.wait(60)
    engine.pin_lora_adapter("wide")

    def here() -> dict[str, Any]:
        found: dict[str, Any] = engine.list_lora_adapters()["wide"]["workers"][engine.worker_name]
        return found

    wait_for(lambda: "the device is full" in (here()["error"] or ""), "the error is told")
    assert engine.generate([body("small")])
    assert running.tokens()
    memory.is_full = False
    wait_for(lambda: here()["resident"], "it is copied once that can be")
    assert here()["error"] is None


@pytest.mark.usefixtures("memory")
def test_a_worker_does_not_start_without_what_its_settings_pin(
    make_engine: Callable[..., Engine], folders: dict[str, Path]
) -> None:
    with pytest.raises(AdapterError, match="'wide' could not be copied into a slot"):
        make_engine(lora_paths=entries(folders, pinned="wide"), max_loras_per_batch=2)
