"""What an adapter means is what PEFT makes of it; what can't be served exactly is refused in one sentence."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from support.oracle import Oracle, engine_logits
from support.tiny_models import EOS, ids_of, save_adapter
from transformers import AutoModelForCausalLM

from lora_worker.adapters.tensor_files import read_tensors
from lora_worker.engine import Engine
from lora_worker.errors import InvalidAdapterError
from lora_worker.settings import Settings

# What the adapter table of the documentation calls served, as configurations.
SERVED: dict[str, dict[str, Any]] = {
    "rslora-1": {"r": 1, "use_rslora": True, "target_modules": ["q_proj"]},
    "rslora-8": {"r": 8, "use_rslora": True, "target_modules": ["q_proj"]},
    "rslora-64": {"r": 64, "use_rslora": True, "target_modules": ["q_proj"]},
    "rank-pattern": {"r": 4, "rank_pattern": {"v_proj": 2}, "target_modules": ["q_proj", "v_proj"]},
    "alpha-pattern": {"r": 4, "alpha_pattern": {"layers.1.mlp.up_proj": 32}, "target_modules": ["up_proj"]},
    "both-patterns": {
        "r": 4,
        "rank_pattern": {r"layers\.0\..*": 8},
        "alpha_pattern": {"v_proj": 1},
        "target_modules": ["q_proj", "v_proj"],
    },
    "suffixes": {"r": 4, "target_modules": ["q_proj", "mlp.down_proj"]},
    "full-paths": {"r": 4, "target_modules": ["model.layers.1.self_attn.k_proj", "model.layers.0.mlp.up_proj"]},
    "regex": {"r": 4, "target_modules": r".*layers\.1\..*(q|k)_proj"},
    "all-linear": {"r": 2, "target_modules": "all-linear"},
    "one-layer": {"r": 4, "target_modules": ["o_proj", "down_proj"], "layers_to_transform": [1]},
    "layers-pattern": {
        "r": 4,
        "target_modules": ["o_proj"],
        "layers_to_transform": [0],
        "layers_pattern": ["layers"],
    },
    "excluded": {"r": 4, "target_modules": ["q_proj", "gate_proj"], "exclude_modules": ["layers.0.self_attn.q_proj"]},
    "wide": {"r": 64, "lora_alpha": 3, "target_modules": ["k_proj"]},
    "eva": {"r": 4, "target_modules": ["q_proj"]},
    "lora-bias": {"r": 4, "lora_bias": True, "target_modules": ["q_proj", "down_proj"]},
    "bias-without-biases": {"r": 4, "bias": "all", "target_modules": ["q_proj"]},
    "output-layer": {"r": 4, "target_modules": ["q_proj", "lm_head"]},
    "embedding": {"r": 4, "target_modules": ["v_proj", "embed_tokens"]},
    "output-layer-and-embedding": {"r": 2, "target_modules": ["embed_tokens", "lm_head"]},
    "dropout": {"r": 4, "lora_dropout": 0.5, "target_modules": ["q_proj"]},
}

PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
PROMPT = [5, 17, 80, 3, 9]


def engine_of(base: Path, **more: Any) -> Engine:
    return Engine(Settings(model=base, dtype="float64", device="cpu", **more))


def greedy(adapter: str) -> dict[str, Any]:
    return {"model": adapter, "prompt": PROMPT, "temperature": 0, "max_tokens": 20, "ignore_eos": True}


@pytest.mark.parametrize("name", SERVED)
def test_it_equals_peft(name: str, tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    base = tiny_model("llama")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT says that it saves an embedding besides
        folder = save_adapter(base, tmp_path / name, seed=9, **SERVED[name])
        oracle = Oracle(base, {name: folder}, torch.float64)
    expected = oracle.generate(name, PROMPT, 20, ignore_eos=True).tokens
    if name == "eva":  # an initialisation that leaves the base as it was
        change_config(init_lora_weights="eva")(folder)
    with engine_of(base, lora_paths=[f"{name}={folder}"]) as engine:
        (answer,) = engine.generate([greedy(name)])
        logits = engine_logits(engine, name, PROMPT)
    torch.testing.assert_close(logits, oracle.logits(name, PROMPT), atol=1e-6, rtol=0)
    assert isinstance(answer, dict)
    assert ids_of(answer["choices"][0]["text"]) == [token for token in expected if token != EOS]


def test_every_subset_of_the_projections_equals_peft(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    base = tiny_model("llama")
    with engine_of(base) as engine:
        for bits in range(1, 2 ** len(PROJECTIONS)):
            targets = [name for i, name in enumerate(PROJECTIONS) if bits >> i & 1]
            folder = save_adapter(base, tmp_path / str(bits), seed=bits, r=2, target_modules=targets)
            engine.load_lora_adapter("subset", str(folder), replace=True)
            expected = Oracle(base, {"subset": folder}, torch.float64).logits("subset", PROMPT)
            torch.testing.assert_close(engine_logits(engine, "subset", PROMPT), expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("targets", [["lm_head"], ["embed_tokens"], ["embed_tokens", "lm_head", "q_proj"]])
@pytest.mark.parametrize("is_tied", [True, False])
def test_output_layer_and_embedding_tied_or_not(
    is_tied: bool,  # noqa: FBT001 - a test's parameter
    targets: list[str],
    tiny_model: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    """Mixed with base rows and prompts in chunks: the output layer sees other rows than the rest of the model."""
    base = tmp_path / "base"
    shutil.copytree(tiny_model("llama"), base)
    if is_tied:
        config = json.loads((base / "config.json").read_text())
        (base / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
        tensors = load_file(base / "model.safetensors")
        del tensors["lm_head.weight"]
        save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT says that merging a tied layer would be wrong
        folder = save_adapter(base, tmp_path / "wide", seed=3, r=3, target_modules=targets)
        oracle = Oracle(base, {"wide": folder}, torch.float64)
    bodies: list[dict[str, Any]] = []
    expected: list[list[int]] = []
    for i in range(8):
        name, prompt = ("wide" if i % 2 else None), [(7 * i + j) % EOS for j in range(1 + 5 * i)]
        body = {"prompt": prompt, "temperature": 0, "max_tokens": 12, "ignore_eos": True}
        bodies.append(body | ({"model": name} if name else {}))
        expected.append(oracle.generate(name, prompt, 12, ignore_eos=True).tokens)
    with engine_of(base, lora_paths=[f"wide={folder}"], max_prefill_tokens=7) as engine:
        for tokens, answer in zip(expected, engine.generate(bodies), strict=True):
            assert isinstance(answer, dict)
            assert ids_of(answer["choices"][0]["text"]) == [token for token in tokens if token != EOS]
        logits = engine_logits(engine, "wide", PROMPT)
    torch.testing.assert_close(logits, oracle.logits("wide", PROMPT), atol=1e-6, rtol=0)


def test_biases_of_adapted_modules_equal_peft(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    base = tiny_model("qwen2")
    torch.manual_seed(4)
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(base),
        LoraConfig(r=4, bias="all", target_modules=["q_proj", "k_proj", "v_proj"], task_type="CAUSAL_LM"),
    )
    for name, parameter in model.named_parameters():
        if "lora_" in name or name.endswith(".bias"):
            torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(str(tmp_path / "biased"))
    oracle = Oracle(base, {"biased": tmp_path / "biased"}, torch.float64)
    with engine_of(base, lora_paths=[f"biased={tmp_path / 'biased'}"]) as engine:
        for adapter in ("biased", None, "biased"):
            expected = oracle.logits(adapter, PROMPT)
            torch.testing.assert_close(engine_logits(engine, adapter, PROMPT), expected, atol=1e-6, rtol=0)


def test_different_ranks_and_base_rows_in_one_batch_equal_solo_rows(
    tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    base = tiny_model("llama")
    folders = {
        f"rank-{rank}": save_adapter(base, tmp_path / str(rank), seed=rank, r=rank, target_modules=PROJECTIONS)
        for rank in (1, 4, 8, 16, 64)
    }
    oracle = Oracle(base, folders, torch.float64)
    rows: list[tuple[str | None, list[int]]] = [(name, [i, 7]) for i in range(4) for name in (None, *folders)]
    bodies = [
        {"prompt": prompt, "temperature": 0, "max_tokens": 16, "ignore_eos": True} | ({"model": name} if name else {})
        for name, prompt in rows
    ]
    with engine_of(base, lora_paths=[f"{name}={folder}" for name, folder in folders.items()]) as engine:
        for (name, prompt), answer in zip(rows, engine.generate(bodies), strict=True):
            tokens = oracle.generate(name, prompt, 16, ignore_eos=True).tokens
            assert isinstance(answer, dict)
            assert ids_of(answer["choices"][0]["text"]) == [token for token in tokens if token != EOS]


def rename(change: Callable[[str], str]) -> Callable[[Path], None]:
    def rename_keys(folder: Path) -> None:
        file = folder / "adapter_model.safetensors"
        save_file({change(key): tensor for key, tensor in load_file(file).items()}, file)

    return rename_keys


KEY_FORMS: dict[str, Callable[[str], str]] = {
    "as-peft-saves": lambda key: key,
    "default": lambda key: key.replace(".weight", ".default.weight"),
    "another-name": lambda key: key.replace(".weight", ".mine.weight"),
    "no-prefix": lambda key: key.removeprefix("base_model.model."),
    "wrapper-outside": lambda key: key.replace("base_model.model.", "base_model.model.language_model."),
    "wrapper-inside": lambda key: key.replace("base_model.model.model.", "base_model.model.model.language_model."),
    "wrapper-alone": lambda key: key.replace("base_model.model.model.", "base_model.model.language_model."),
}


@pytest.mark.parametrize("form", KEY_FORMS)
def test_every_known_form_of_keys_is_the_same_adapter(
    form: str, plain_engine: Engine, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    targets = ["q_proj", "v_proj"]
    folder = save_adapter(tiny_model("llama"), tmp_path / form, seed=9, r=4, target_modules=targets)
    digest = plain_engine.load_lora_adapter(f"plain-{form}", str(folder))["report"]["digest"]
    rename(KEY_FORMS[form])(folder)
    assert plain_engine.load_lora_adapter(f"form-{form}", str(folder))["report"]["digest"] == digest


def test_the_first_pattern_that_matches_wins_in_the_order_of_the_file(
    tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    """Two adapters that differ in nothing but the order of their patterns, one after the other in one engine."""
    base = tiny_model("llama")
    patterns = {"q_proj": 2, r"layers\.0\..*": 64}
    orders = {"one": patterns, "other": dict(reversed(patterns.items()))}
    with engine_of(base) as engine:
        for name, order in orders.items():
            folder = save_adapter(base, tmp_path / name, seed=9, r=4, target_modules=["q_proj"])
            change_config(alpha_pattern=order)(folder)
            engine.load_lora_adapter(name, str(folder))
            expected = Oracle(base, {name: folder}, torch.float64).logits(name, PROMPT)
            torch.testing.assert_close(engine_logits(engine, name, PROMPT), expected, atol=1e-6, rtol=0)
        first, second = (engine.list_lora_adapters()[name]["digest"] for name in orders)
        assert first != second


def test_what_matches_nothing_and_another_base_are_warnings(
    plain_engine: Engine, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = save_adapter(tiny_model("llama"), tmp_path / "warned", seed=9, r=4, target_modules=["q_proj"])
    change_config(
        base_model_name_or_path="somebody/another-base",
        target_modules=["q_proj", "no_proj"],
        rank_pattern={"k_proj": 2},
        alpha_pattern={"never": 2},
    )(folder)
    # Copied from the base's folder, as many tools do; it says nothing of the weights.
    (folder / "added_tokens.json").write_text('{"<extra>": 100}')
    said = plain_engine.load_lora_adapter("warned", str(folder))["report"]["warnings"]
    for word in (
        "no_proj",
        "rank_pattern has the pattern k_proj",
        "alpha_pattern has the pattern never",
        "another-base",
    ):
        assert any(word in warning for warning in said), (word, said)
    assert plain_engine.list_lora_adapters()["warned"]["report"]["warnings"] == list(said)


def test_a_base_that_is_named_by_a_number_is_another_base(
    plain_engine: Engine, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = save_adapter(tiny_model("llama"), tmp_path / "numbered", seed=9, r=4, target_modules=["q_proj"])
    change_config(base_model_name_or_path=5)(folder)
    report = plain_engine.load_lora_adapter("numbered", str(folder))["report"]
    assert any("trained on 5" in warning for warning in report["warnings"])


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


def replace_by_list(folder: Path) -> None:
    (folder / "adapter_model.safetensors").unlink()
    torch.save([torch.ones(2)], folder / "adapter_model.bin")


def replace_by_bin(edit: Callable[[dict[Any, torch.Tensor]], None]) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        tensors: dict[Any, torch.Tensor] = dict(load_file(folder / "adapter_model.safetensors"))
        (folder / "adapter_model.safetensors").unlink()
        edit(tensors)
        torch.save(tensors, folder / "adapter_model.bin")

    return change


def truncate(folder: Path) -> None:
    file = folder / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


KEY = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"

REFUSED: dict[str, tuple[Callable[[Path], None], list[str]]] = {
    "another-type": (change_config(peft_type="IA3"), ["IA3", "LORA", "adapter_config.json"]),
    "no-rank": (change_config(r="REMOVED"), ["'r'", "adapter_config.json"]),
    "no-json": (lambda folder: (folder / "adapter_config.json").write_text("{"), ["adapter_config.json", "JSON"]),  # type: ignore[dict-item]
    "dora": (change_config(use_dora=True), ["use_dora"]),
    "lora-bias-lost": (change_config(lora_bias=True), ["lora_B.bias", "layers.0.self_attn.q_proj"]),
    "changed-norm": (
        change_tensors(lambda t: t.update({"base_model.model.model.norm.weight": torch.full((32,), 9.0)})),
        ["its own base_model.model.model.norm.weight"],
    ),
    "changed-output-layer": (
        change_tensors(lambda t: t.update({"base_model.model.lm_head.weight": torch.ones(128, 32)})),
        ["its own base_model.model.lm_head.weight"],
    ),
    "saved-modules": (change_config(modules_to_save=["lm_head"]), ["modules_to_save", "lm_head"]),
    "pissa": (change_config(init_lora_weights="pissa"), ["pissa", "path_initial_model_for_weight_conversion"]),
    "experts": (change_config(target_parameters=["mlp.experts.up"]), ["target_parameters"]),
    "replicated-layers": (change_config(layer_replication=[[0, 2]]), ["layer_replication"]),
    "future-field": (change_config(use_quantum=True), ["use_quantum"]),
    "no-match": (change_config(target_modules=["query_key_value"]), ["query_key_value"]),
    "output-layer-lost": (change_config(target_modules=["lm_head"]), ["no place", "layers.0.self_attn"]),
    "wide": (change_config(r=65), ["rank 65", "max_lora_rank 64"]),
    "a-without-b": (change_tensors(lambda t: t.pop(KEY.replace("_A", "_B"))), ["lora_B", "layers.0.self_attn.q_proj"]),  # type: ignore[arg-type]
    "missing-tensor": (change_tensors(lambda t: t.pop(KEY)), ["lora_A", "layers.0.self_attn.q_proj"]),  # type: ignore[arg-type]
    "extra-tensor": (change_tensors(lambda t: t.update(stranger=torch.ones(1))), ["1 tensors", "stranger"]),
    "other-shape": (change_tensors(lambda t: t.update({KEY: torch.ones(4, 31)})), [KEY, "[4, 31]", "[4, 32]"]),
    "nan": (change_tensors(lambda t: t[KEY][0, 0].fill_(float("nan"))), ["NaN", "layers.0.self_attn.q_proj"]),  # type: ignore[arg-type]
    "integers": (change_tensors(lambda t: t.update({KEY: torch.ones(4, 32).int()})), [KEY, "int32"]),
    "unknown-wrapper": (
        rename(lambda key: key.replace("model.layers", "tower.layers")),
        ["8 tensors", "tower.layers.0"],
    ),
    "one-stranger": (rename(lambda key: key.replace("layers.0.self_attn.q", "layers.7.self_attn.q")), ["layers.7"]),
    "several-adapters": (
        change_tensors(lambda t: t.update({KEY.replace(".weight", ".other.weight"): torch.ones(4, 32)})),
        ["default, other"],
    ),
    "one-place-twice": (
        change_tensors(lambda t: t.update({KEY.removeprefix("base_model.model."): torch.ones(4, 32)})),
        ["more than one tensor", KEY.removeprefix("base_model.model.")],
    ),
    "one-place-twice-by-name": (
        change_tensors(lambda t: t.update({KEY.replace(".weight", ".default.weight"): torch.ones(4, 32)})),
        ["more than one tensor"],
    ),
    "resized-embedding": (
        change_tensors(lambda t: t.update({"base_model.model.model.embed_tokens.weight": torch.ones(130, 32)})),
        ["embed_tokens.weight", "130", "128"],
    ),
    "token-rows": (change_config(trainable_token_indices=[3]), ["trainable_token_indices"]),
    "empty-targets": (change_config(target_modules=[]), ["target_modules"]),
    "bad-regex": (change_config(target_modules="("), ["PEFT cannot place"]),
    "bad-pattern": (change_config(rank_pattern=["x"]), ["PEFT cannot place"]),
    "olora": (change_config(init_lora_weights="olora"), ["olora"]),
    "truncated": (truncate, ["cannot be read"]),
    "list-in-bin": (replace_by_list, ["no mapping of names to tensors"]),
    "numbered-in-bin": (replace_by_bin(lambda t: t.update({0: torch.ones(1)})), ["no mapping of names to tensors"]),
    "sparse-in-bin": (replace_by_bin(lambda t: t.update({KEY: t[KEY].to_sparse()})), [KEY, "sparse"]),
    "empty-in-bin": (replace_by_bin(lambda t: t.update({KEY: t[KEY].to("meta")})), [KEY, "without content"]),
    "no-header": (
        lambda folder: (folder / "adapter_model.safetensors").write_bytes(b"\2" + bytes(7) + b"[]"),
        ["header"],
    ),  # type: ignore[dict-item]
    "nested-header": (
        lambda folder: (folder / "adapter_model.safetensors").write_bytes(  # type: ignore[dict-item]
            (200_000).to_bytes(8, "little") + b"[" * 200_000
        ),
        ["cannot be read"],
    ),
    "deep": (
        lambda folder: (folder / "adapter_config.json").write_text("[" * 200_000),
        ["adapter_config.json", "deep"],
    ),  # type: ignore[dict-item]
    "rather-deep": (change_config(use_quantum=json.loads("[" * 500 + "]" * 500)), ["adapter_config.json", "deep"]),
    "huge": (change_config(task_type="x" * 20_000_000), ["adapter_config.json", "bytes"]),
    "experts-alone": (change_config(target_parameters=["mlp.experts.up"], target_modules=None), ["target_parameters"]),
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


def test_files_that_change_while_they_are_read_are_refused(
    plain_engine: Engine,
    tiny_model: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = save_adapter(tiny_model("llama"), tmp_path / "changing", seed=9, r=4, target_modules=["q_proj"])

    def read_and_replace(name: str, where: Path) -> dict[str, torch.Tensor]:
        tensors = read_tensors(name, where)
        save_adapter(tiny_model("llama"), folder, seed=10, r=4, target_modules=["q_proj"])
        return tensors

    monkeypatch.setattr("lora_worker.adapters.plan.read_tensors", read_and_replace)
    with pytest.raises(InvalidAdapterError, match="changed while they were read"):
        plain_engine.load_lora_adapter("changing", str(folder))
