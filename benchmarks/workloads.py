"""What the benchmarks run: seeded prompts, and adapters with random weights on the demo's model."""

from __future__ import annotations

import random
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


class Prompt(NamedTuple):
    """Token ids, and the adapter that answers; None is the base."""

    ids: list[int]
    adapter: str | None


def make_prompts(adapters: list[str | None], *, rows: int, vocabulary: int, seed: int) -> list[Prompt]:
    """`rows` prompts of 20 to 130 random tokens, the adapters in turn."""
    chance = random.Random(seed)
    lengths = [chance.randrange(20, 131) for _ in range(rows)]
    return [
        Prompt([chance.randrange(vocabulary) for _ in range(length)], adapters[i % len(adapters)])
        for i, length in enumerate(lengths)
    ]


@contextmanager
def random_adapters(model: Path, *, count: int, rank: int) -> Iterator[dict[str, Path]]:
    """Adapters on all seven projections with small random weights; their folders last as long as the block."""
    with tempfile.TemporaryDirectory(prefix="lora-worker-bench-") as root:
        base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        config = LoraConfig(r=rank, target_modules=PROJECTIONS, init_lora_weights=False, task_type="CAUSAL_LM")
        adapted = get_peft_model(base, config)
        adapters = {}
        for i in range(count):
            torch.manual_seed(i)
            for name, parameter in adapted.named_parameters():
                if "lora_" in name:
                    torch.nn.init.normal_(parameter, std=0.01)
            adapters[f"adapter-{i}"] = Path(root) / f"adapter-{i}"
            adapted.save_pretrained(str(adapters[f"adapter-{i}"]))
        yield adapters


def random_model(folder: Path) -> Path:
    """A small Llama with random weights, without a tokenizer: prompts are token ids below 512."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=131072,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def similar_adapters(model: Path, root: Path, *, count: int, rank: int) -> list[str]:
    """Adapters on q and v under `root`, of one configuration and different random weights; returns their names."""
    config = LoraConfig(r=rank, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(model), config)
    names = [f"adapter-{i}" for i in range(count)]
    adapted.save_pretrained(str(root / names[0]))
    weights = load_file(root / names[0] / "adapter_model.safetensors")
    for i, name in enumerate(names[1:]):
        torch.manual_seed(i)
        shutil.copytree(root / names[0], root / name)
        changed = {key: torch.randn_like(tensor) * 0.05 for key, tensor in weights.items()}
        save_file(changed, root / name / "adapter_model.safetensors", metadata={"format": "pt"})
    return names
