"""Base-model families: greedy tokens equal `generate`'s, with an adapter and without, or a refusal by name."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from support.oracle import CLOSE_CALL, Oracle
from support.tiny_models import EOS, SPREAD, VOCABULARY, ids_of, make_tokenizer, save_adapter

from lora_worker.engine import Engine
from lora_worker.errors import UnsupportedModelError
from lora_worker.settings import Settings

TOKENS = 24
WINDOW = 16  # short, so that rows outgrow it

LLAMA_SHAPE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}


class Family(NamedTuple):
    """A family's configuration class, its shape, and the modules an adapter targets."""

    name: str
    shape: dict[str, Any]
    targets: list[str]


QKV = ["q_proj", "k_proj", "v_proj", "o_proj"]

FAMILIES = [
    Family("Llama", LLAMA_SHAPE, QKV),
    Family("Mistral", {**LLAMA_SHAPE, "sliding_window": WINDOW}, QKV),
    Family("Qwen2", LLAMA_SHAPE, QKV),
    Family("Qwen3", {**LLAMA_SHAPE, "head_dim": 8}, [*QKV, "down_proj"]),
    Family("Gemma2", {**LLAMA_SHAPE, "head_dim": 8, "sliding_window": WINDOW}, QKV),
    Family("Gemma3ForCausalLM", {**LLAMA_SHAPE, "head_dim": 8, "sliding_window": WINDOW}, QKV),
    Family("Phi3", {**LLAMA_SHAPE, "pad_token_id": 0}, ["qkv_proj", "gate_up_proj"]),
    Family("GPT2", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256}, ["c_attn", "c_fc"]),
    Family("GPTNeoX", {k: v for k, v in LLAMA_SHAPE.items() if k != "num_key_value_heads"}, ["query_key_value"]),
    Family("OPT", {**LLAMA_SHAPE, "ffn_dim": 48, "word_embed_proj_dim": 32}, ["q_proj", "v_proj", "fc1"]),
    Family("Mixtral", {**LLAMA_SHAPE, "num_local_experts": 4}, QKV),
    Family("Qwen3Moe", {**LLAMA_SHAPE, "head_dim": 8, **EXPERTS}, QKV),
    Family("Olmo2", LLAMA_SHAPE, QKV),
    Family("SmolLM3", {**LLAMA_SHAPE, "pad_token_id": 0}, QKV),
    Family("Granite", LLAMA_SHAPE, QKV),
    Family("Starcoder2", LLAMA_SHAPE, QKV),
    Family("Cohere", LLAMA_SHAPE, QKV),
]

REFUSED = [
    ("Bloom", {"hidden_size": 32, "n_layer": 2, "n_head": 4}),
    ("Falcon", {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "alibi": False}),
    ("GptOss", {**LLAMA_SHAPE, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 128}),
]


def save_family(name: str, shape: dict[str, Any], folder: Path) -> Path:
    torch.manual_seed(sum(name.encode()))
    classes = {
        "GPT2": ("GPT2Config", "GPT2LMHeadModel"),
        "Gemma3ForCausalLM": ("Gemma3TextConfig", "Gemma3ForCausalLM"),
    }
    config_class, model_class = classes.get(name, (f"{name}Config", f"{name}ForCausalLM"))
    config = getattr(transformers, config_class)(
        vocab_size=VOCABULARY, initializer_range=SPREAD, bos_token_id=None, eos_token_id=EOS, **shape
    )
    model: Any = getattr(transformers, model_class)(config)
    for parameter in model.parameters():
        if parameter.dim() == 1:  # biases and norms, which start as zeros and ones and would test nothing
            parameter.data += torch.randn_like(parameter) * 0.3
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_greedy_tokens_equal_transformers_and_pefts(family: Family, tmp_path: Path) -> None:
    base = save_family(family.name, family.shape, tmp_path / "base")
    adapter = save_adapter(base, tmp_path / "adapter", seed=3, r=4, target_modules=family.targets)
    oracle = Oracle(base, {"adapter": adapter})
    chance = random.Random(2)
    bodies: list[dict[str, Any]] = []
    expected: list[list[int]] = []
    while len(bodies) < 8:
        prompt = [chance.randrange(EOS) for _ in range(chance.choice([1, 3, 12, 40]))]
        name = "adapter" if len(bodies) % 2 else None
        answer = oracle.generate(name, prompt, TOKENS, ignore_eos=True)
        if answer.gap >= CLOSE_CALL:
            body = {"prompt": prompt, "temperature": 0, "max_tokens": TOKENS, "ignore_eos": True}
            bodies.append(body | ({"model": name} if name else {}))
            expected.append(answer.tokens)
    settings = Settings(
        model=base, device="cpu", dtype="float32", lora_paths=[f"adapter={adapter}"], max_prefill_tokens=16
    )
    with Engine(settings) as engine:
        for tokens, response in zip(expected, engine.generate(bodies), strict=True):
            assert isinstance(response, dict)
            assert ids_of(response["choices"][0]["text"]) == [token for token in tokens if token != EOS]


@pytest.mark.parametrize(("name", "shape"), REFUSED)
def test_a_family_with_attention_that_is_not_understood_is_refused_by_name(
    name: str, shape: dict[str, Any], tmp_path: Path
) -> None:
    base = save_family(name, shape, tmp_path)
    with pytest.raises(UnsupportedModelError, match=name):
        Engine(Settings(model=base, device="cpu", dtype="float32"))
