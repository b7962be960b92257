"""How fast is the engine: bare base and 8 adapters mixed, against transformers' generate and PEFT's mixed batch?

    python -m benchmarks.engine [--alternations 5] [--device cpu] [--out benchmarks/results/engine.json]

Every contender makes the same number of tokens from the same prompts, and they take turns; figures are medians over the
turns, and what counts is their ratios, since absolute times drift by a fifth and more on shared machines. One turn of
each before the first is not counted.

Caveats. Prompts are random tokens, so texts mean nothing; every row makes all its tokens (no end-of-sequence), which
spares the static batches of transformers and PEFT the waste they have when rows end at different times. transformers'
batch is padded on the left to the longest prompt, as its users do.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from benchmarks.workloads import Prompt, make_prompts, random_adapters
from lora_worker.demo.model import prepare_model
from lora_worker.engine import Engine
from lora_worker.models.loading import choose_device
from lora_worker.settings import Settings

ADAPTERS = 8
RANK = 16
ROWS = 64
NEW_TOKENS = 64
SEED = 0

Contender = Callable[[], None]


def engine_contender(engine: Engine, prompts: list[Prompt]) -> Contender:
    bodies: list[dict[str, Any]] = [
        {
            "prompt": prompt.ids,
            "max_tokens": NEW_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            **({"model": prompt.adapter} if prompt.adapter else {}),
        }
        for prompt in prompts
    ]
    return lambda: check(sum(a["usage"]["completion_tokens"] for a in engine.generate(bodies) if isinstance(a, dict)))


def check(tokens: int) -> None:
    assert tokens == ROWS * NEW_TOKENS, f"{tokens} tokens were made instead of {ROWS * NEW_TOKENS}"


def generate_contender(model: Any, prompts: list[Prompt]) -> Contender:
    """transformers' `generate`, or PEFT's with `adapter_names` where the prompts have adapters."""
    longest = max(len(prompt.ids) for prompt in prompts)
    padding = [longest - len(prompt.ids) for prompt in prompts]
    device = model.device
    ids = torch.tensor([[0] * pad + p.ids for pad, p in zip(padding, prompts, strict=True)], device=device)
    mask = torch.tensor([[0] * pad + [1] * (longest - pad) for pad in padding], device=device)
    names = {"adapter_names": [prompt.adapter for prompt in prompts]} if prompts[0].adapter else {}

    def run() -> None:
        with torch.inference_mode():
            out = model.generate(
                input_ids=ids,
                attention_mask=mask,
                max_new_tokens=NEW_TOKENS,
                min_new_tokens=NEW_TOKENS,
                do_sample=False,
                pad_token_id=0,
                **names,
            )
        check((out.shape[1] - longest) * out.shape[0])

    return run


def load(folder: Path, device: torch.device) -> Any:
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    return model.to(device).eval()


def measure(contenders: dict[str, Contender], alternations: int) -> dict[str, list[float]]:
    """Tokens per second of each contender in each turn; the first turn warms up."""
    rates: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(alternations + 1):
        for name, run in contenders.items():
            started = time.perf_counter()
            run()
            rate = ROWS * NEW_TOKENS / (time.perf_counter() - started)
            print(f"turn {turn}: {name}: {rate:.0f} tokens/s", flush=True)
            if turn:
                rates[name].append(rate)
    return rates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--alternations", type=int, default=5)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    disable_progress_bar()
    device = choose_device(arguments.device)
    folder = prepare_model()
    base = load(folder, device)
    vocabulary = base.config.vocab_size
    bare = make_prompts([None], rows=ROWS, vocabulary=vocabulary, seed=SEED)
    with random_adapters(folder, count=ADAPTERS, rank=RANK) as adapters:
        mixed = make_prompts(list(adapters), rows=ROWS, vocabulary=vocabulary, seed=SEED)
        peft = None
        for name, path in adapters.items():
            if peft is None:
                clean = load(folder, device)
                peft = PeftModel.from_pretrained(clean, path, adapter_name=name, autocast_adapter_dtype=False).eval()
            else:
                peft.load_adapter(path, adapter_name=name, autocast_adapter_dtype=False)
        settings = Settings(
            model=folder,
            device=str(device),
            max_loras_per_batch=ADAPTERS,
            max_lora_rank=RANK,
            max_running_requests=ROWS,
            lora_paths=[{"lora_name": name, "lora_path": str(path)} for name, path in adapters.items()],
        )
        with Engine(settings) as engine:
            rates = measure(
                {
                    "ours, bare base": engine_contender(engine, bare),
                    "ours, 8 adapters": engine_contender(engine, mixed),
                    "transformers, bare base": generate_contender(base, bare),
                    "PEFT, 8 adapters": generate_contender(peft, mixed),
                },
                arguments.alternations,
            )
    medians = {name: statistics.median(values) for name, values in rates.items()}
    ratios = {
        "8 adapters, ours / PEFT": medians["ours, 8 adapters"] / medians["PEFT, 8 adapters"],
        "bare base, ours / transformers": medians["ours, bare base"] / medians["transformers, bare base"],
        "ours, 8 adapters / bare base": medians["ours, 8 adapters"] / medians["ours, bare base"],
    }
    for name, ratio in ratios.items():
        print(f"{name}: {ratio:.2f}")
    if arguments.out:
        machine = {"machine": platform.machine(), "device": str(device), "torch": torch.__version__}
        result = {"medians_tokens_per_second": medians, "ratios": ratios, "turns": rates, **machine}
        arguments.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
