"""What the benchmarks run: seeded prompts, and adapters with random weights on the demo's model."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

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
