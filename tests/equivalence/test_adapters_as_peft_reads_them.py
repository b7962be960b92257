"""What an adapter means is what PEFT makes of it; what can't be served exactly is refused in one sentence."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.oracle import Oracle
from support.tiny_models import ids_of, save_adapter

from lora_worker.engine import Engine
from lora_worker.errors import InvalidAdapterError
from lora_worker.settings import Settings

SERVED: dict[str, dict[str, Any]] = {
    "rslora": {"r": 8, "use_rslora": True, "target_modules": ["q_proj"]},
    "rank-pattern": {"r": 4, "rank_pattern": {"v_proj": 2}, "target_modules": ["q_proj", "v_proj"]},
    "alpha-pattern": {"r": 4, "alpha_pattern": {"layers.1.mlp.up_proj": 32}, "target_modules": ["up_proj"]},
    "regex": {"r": 4, "target_modules": r".*layers\.1\..*(q|k)_proj"},
    "all-linear": {"r": 2, "target_modules": "all-linear"},
    "one-layer": {"r": 4, "target_modules": ["o_proj", "down_proj"], "layers_to_transform": [1]},
    "excluded": {"r": 4, "target_modules": ["q_proj", "gate_proj"], "exclude_modules": ["layers.0.self_attn.q_proj"]},
    "rank-64": {"r": 64, "lora_alpha": 3, "target_modules": ["k_proj"]},
}


def engine_of(base: Path, **more: Any) -> Engine:
    return Engine(Settings(model=base, dtype="float64", device="cpu", **more))


def greedy(adapter: str) -> dict[str, Any]:
    prompt = [5, 17, 80, 3, 9]
    return {"model": adapter, "prompt": prompt, "temperature": 0, "max_tokens": 20, "ignore_eos": True}


@pytest.mark.parametrize("name", SERVED)
def test_it_equals_peft(name: str, tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    base = tiny_model("llama")
    folder = save_adapter(base, tmp_path / name, seed=9, **SERVED[name])
    body = greedy(name)
    expected = Oracle(base, {name: folder}, torch.float64).generate(name, body["prompt"], 20, ignore_eos=True).tokens
    with engine_of(base, lora_paths=[f"{name}={folder}"]) as engine:
        (answer,) = engine.generate([body])
    assert isinstance(answer, dict)
    assert ids_of(answer["choices"][0]["text"]) == [token for token in expected if token != 127]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_another_dtype_is_cast_and_said(dtype: torch.dtype, tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    folder = save_adapter(tiny_model("llama"), tmp_path / "cast", seed=9, r=4, target_modules=["q_proj"])
    file = folder / "adapter_model.safetensors"
    save_file({key: tensor.to(dtype) for key, tensor in load_file(file).items()}, file)
    with engine_of(tiny_model("llama")) as engine:
        report = engine.load_lora_adapter("cast", str(folder))["report"]
    assert f"cast from {str(dtype).removeprefix('torch.')} to float64" in report["warnings"][-1]


def test_the_same_weights_as_bin_are_the_same_adapter(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    folder = save_adapter(tiny_model("llama"), tmp_path / "safe", seed=9, r=4, target_modules=["q_proj"])
    pickled = tmp_path / "pickled"
    shutil.copytree(folder, pickled)
    torch.save(load_file(pickled / "adapter_model.safetensors"), pickled / "adapter_model.bin")
    (pickled / "adapter_model.safetensors").unlink()
    with engine_of(tiny_model("llama")) as engine:
        first = engine.load_lora_adapter("safe", str(folder))["report"]
        second = engine.load_lora_adapter("pickled", str(pickled))["report"]
        assert first["digest"] == second["digest"]
        assert engine.info()["pool"]["cached_adapters"] == 1


class Executed:
    def __reduce__(self) -> Any:
        return Path("executed").touch, ()


def change_config(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        file = folder / "adapter_config.json"
        config = json.loads(file.read_text()) | changes
        file.write_text(json.dumps({key: value for key, value in config.items() if value != "REMOVED"}))

    return change


def change_tensors(edit: Callable[[dict[str, torch.Tensor]], None]) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        tensors = load_file(folder / "adapter_model.safetensors")
        edit(tensors)
        save_file(tensors, folder / "adapter_model.safetensors")

    return change


def replace_by_pickle(folder: Path) -> None:
    (folder / "adapter_model.safetensors").unlink()
    torch.save({"weights": Executed()}, folder / "adapter_model.bin")


KEY = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"

REFUSED: dict[str, tuple[Callable[[Path], None], list[str]]] = {
    "another-type": (change_config(peft_type="IA3"), ["IA3", "LORA", "adapter_config.json"]),
    "no-rank": (change_config(r="REMOVED"), ["'r'", "adapter_config.json"]),
    "no-json": (lambda folder: (folder / "adapter_config.json").write_text("{"), ["adapter_config.json", "JSON"]),  # type: ignore[dict-item]
    "dora": (change_config(use_dora=True), ["use_dora"]),
    "bias": (change_config(bias="all"), ["bias", "all"]),
    "lora-bias": (change_config(lora_bias=True), ["lora_bias"]),
    "saved-modules": (change_config(modules_to_save=["lm_head"]), ["modules_to_save", "lm_head"]),
    "pissa": (change_config(init_lora_weights="pissa"), ["pissa", "path_initial_model_for_weight_conversion"]),
    "experts": (change_config(target_parameters=["mlp.experts.up"]), ["target_parameters"]),
    "replicated-layers": (change_config(layer_replication=[[0, 2]]), ["layer_replication"]),
    "future-field": (change_config(use_quantum=True), ["use_quantum"]),
    "no-match": (change_config(target_modules=["query_key_value"]), ["query_key_value"]),
    "output-layer": (change_config(target_modules=["lm_head"]), ["lm_head", "q_proj"]),
    "wide": (change_config(r=65), ["rank 65", "max_lora_rank 64"]),
    "missing-tensor": (change_tensors(lambda tensors: tensors.pop(KEY)), [KEY]),  # type: ignore[arg-type]
    "extra-tensor": (change_tensors(lambda t: t.update(stranger=torch.ones(1))), ["1 tensors", "stranger"]),
    "other-shape": (change_tensors(lambda t: t.update({KEY: torch.ones(4, 31)})), [KEY, "[4, 31]", "[4, 32]"]),
    "nan": (change_tensors(lambda t: t[KEY][0, 0].fill_(float("nan"))), ["NaN", "layers.0.self_attn.q_proj"]),  # type: ignore[arg-type]
    "integers": (change_tensors(lambda t: t.update({KEY: torch.ones(4, 32).int()})), [KEY, "int32"]),
    "no-weights": (lambda folder: (folder / "adapter_model.safetensors").unlink(), ["adapter_model.safetensors"]),
    "code": (replace_by_pickle, ["adapter_model.bin", "more than tensors"]),
}


@pytest.fixture(scope="module")
def plain_engine(tiny_model: Callable[[str], Path]) -> Any:
    with engine_of(tiny_model("llama")) as engine:
        yield engine


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused_in_one_sentence_that_names_what_is_wrong(
    name: str, plain_engine: Engine, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = save_adapter(tiny_model("llama"), tmp_path / name, seed=9, r=4, target_modules=["q_proj", "v_proj"])
    spoil, words = REFUSED[name]
    spoil(folder)
    with pytest.raises(InvalidAdapterError) as caught:
        plain_engine.load_lora_adapter(name, str(folder))
    for word in words:
        assert word in str(caught.value)
    assert not Path("executed").exists()
    assert name not in plain_engine.loaded_adapters()
