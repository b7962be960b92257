"""Random adapters in random forms: each equals PEFT, or is refused with one sentence.

`LORA_TESTS_RANDOM_ADAPTERS=500 pytest -s tests/equivalence/test_random_adapters.py` makes as many and prints the tally.
"""

from __future__ import annotations

import os
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from support.oracle import engine_logits
from transformers import AutoModelForCausalLM

from lora_worker.engine import Engine
from lora_worker.errors import InvalidAdapterError
from lora_worker.settings import Settings

COUNT = int(os.environ.get("LORA_TESTS_RANDOM_ADAPTERS", "60"))
PROMPT = [5, 17, 80, 3]
TOLERANCE = 1e-4

MODULES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
PATHS = [f"model.layers.{i}.{m}" for i in (0, 1) for m in ("self_attn.q_proj", "self_attn.o_proj", "mlp.down_proj")]

targets = st.one_of(
    st.lists(st.sampled_from(MODULES), min_size=1, max_size=7, unique=True),
    st.lists(st.sampled_from(PATHS), min_size=1, max_size=4, unique=True),
    st.lists(st.sampled_from([*MODULES, "lm_head", "embed_tokens"]), min_size=1, max_size=3, unique=True),
    st.sampled_from([r".*\.(q|v)_proj", r".*layers\.1\..*", "all-linear", r"model\.layers\.0\.mlp\.up_proj"]),
)
patterns = st.dictionaries(
    st.sampled_from(["q_proj", "v_proj", r"layers\.0\..*", r"layers.1.mlp.down_proj", "o_proj"]),
    st.sampled_from([1, 2, 3, 8]),
    max_size=2,
)
plain = st.fixed_dictionaries(
    {"r": st.sampled_from([1, 2, 4, 8]), "lora_alpha": st.sampled_from([1, 4, 7, 16]), "target_modules": targets},
    optional={
        "use_rslora": st.booleans(),
        "rank_pattern": patterns,
        "alpha_pattern": patterns,
        "exclude_modules": st.sampled_from([["q_proj"], r".*layers\.0\..*", ["model.layers.1.mlp.up_proj"]]),
        "lora_dropout": st.sampled_from([0.0, 0.3]),
    },
)
# Seldom, something that can't be served.
extras = st.one_of(
    st.just({}),
    st.just({}),
    st.sampled_from([{"use_dora": True}, {"bias": "all"}, {"modules_to_save": ["lm_head"]}, {"lora_bias": True}]),
)

Rename = Callable[[str], str]
KEY_FORMS: dict[str, Rename] = {
    "peft": lambda key: key,
    "default": lambda key: key.replace(".weight", ".default.weight"),
    "no-prefix": lambda key: key.removeprefix("base_model.model."),
    "wrapper": lambda key: key.replace("base_model.model.", "base_model.model.language_model."),
    "stranger": lambda key: key.replace("layers.0", "blocks.0"),
}
SPOILERS: dict[str, Callable[[dict[str, torch.Tensor]], object]] = {
    "none": lambda _: None,
    "lost": lambda tensors: tensors.pop(next(key for key in sorted(tensors) if "lora_" in key)),
    "nan": lambda tensors: tensors[sorted(tensors)[-1]].view(-1)[0].fill_(float("nan")),
    "turned": lambda tensors: tensors.update({sorted(tensors)[0]: tensors[sorted(tensors)[0]].t().contiguous()}),
    "more": lambda tensors: tensors.update({"base_model.model.extra.lora_A.weight": torch.ones(2, 2)}),
}
forms = st.sampled_from(["peft", "peft", *KEY_FORMS])
spoilers = st.sampled_from(["none"] * 6 + list(SPOILERS))


class Saved(NamedTuple):
    """An adapter in a folder, and the logits PEFT gives with it."""

    folder: Path
    logits: torch.Tensor


class Tally:
    """What has come of the adapters so far."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.largest = 0.0


def save(base: Path, folder: Path, config: dict[str, Any], seed: int) -> Saved:
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT says of patterns and exclusions that they match nothing
        try:
            lora = LoraConfig(init_lora_weights=False, task_type="CAUSAL_LM", **config)
            model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), lora).eval()
        except ValueError:
            assume(False)  # noqa: FBT003 - hypothesis' own; PEFT itself refuses to make this one
        for name, parameter in model.named_parameters():
            if "lora_" in name and parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=0.3)
        model.save_pretrained(str(folder))
        # As PEFT reads it back: saving sorts the patterns, and the first that matches wins.
        try:
            again = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), str(folder)).eval()
        except RuntimeError:
            assume(False)  # noqa: FBT003 - PEFT cannot read its own file, whose patterns now give other ranks
        with torch.inference_mode():
            logits = again(input_ids=torch.tensor([PROMPT])).logits[0, -1]
    return Saved(folder, logits)


@pytest.fixture(scope="module")
def engine(tiny_model: Callable[[str], Path]) -> Iterator[Engine]:
    with Engine(Settings(model=tiny_model("llama"), dtype="float32", device="cpu")) as started:
        yield started


@pytest.fixture(scope="module")
def tally() -> Iterator[Tally]:
    kept = Tally()
    yield kept
    served, refused = kept.counts["served"], kept.counts["refused"]
    print(f"\n{served} served, largest logit difference {kept.largest:.2g}; {refused} refused")  # noqa: T201
    assert served
    assert refused


def refusal_of(engine: Engine, folder: Path) -> str | None:
    try:
        engine.load_lora_adapter("random", str(folder), replace=True)
    except InvalidAdapterError as error:
        return str(error)
    return None


@settings(
    max_examples=COUNT,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.filter_too_much],
)
@given(config=plain, extra=extras, form=forms, spoiler=spoilers, seed=st.integers(0, 2**20))
def test_it_equals_peft_or_is_refused(
    config: dict[str, Any],
    extra: dict[str, Any],
    form: str,
    spoiler: str,
    seed: int,
    engine: Engine,
    tally: Tally,
    tiny_model: Callable[[str], Path],
) -> None:
    with tempfile.TemporaryDirectory() as root:
        saved = save(tiny_model("llama"), Path(root) / "random", {**config, **extra}, seed)
        file = saved.folder / "adapter_model.safetensors"
        tensors = {KEY_FORMS[form](key): tensor for key, tensor in load_file(file).items()}
        SPOILERS[spoiler](tensors)
        save_file(tensors, file)
        refusal = refusal_of(engine, saved.folder)
        if refusal is not None:
            assert refusal
            assert "\n" not in refusal
            tally.counts["refused"] += 1
            return
        assert spoiler == "none"
        difference = (engine_logits(engine, "random", PROMPT) - saved.logits).abs().max().item()
        tally.counts["served"] += 1
        tally.largest = max(tally.largest, difference)
        assert difference <= TOLERANCE
