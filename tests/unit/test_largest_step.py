"""The step by which a card's memory is measured, here on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lora_worker.engine import Engine
from lora_worker.engine.largest_step import LargestStep, run_largest_step
from lora_worker.engine.model_runner import ModelRunner
from lora_worker.lora.inject import inject_lora
from lora_worker.lora.layer import LoraLinear
from lora_worker.models.loading import load_model
from lora_worker.settings import Settings


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize(
    ("step", "lengths", "slots"),
    [
        (LargestStep(rows=4, row_tokens=200, prefill_tokens=64, slots=2), [64, 1, 1, 1], {0, 1}),
        (LargestStep(rows=4, row_tokens=40, prefill_tokens=64, slots=8), [40, 24, 1, 1], {0, 1}),
        (LargestStep(rows=2, row_tokens=40, prefill_tokens=500, slots=1), [40, 40], {0}),
        (LargestStep(rows=3, row_tokens=256, prefill_tokens=1, slots=1), [1, 1, 1], {0}),
    ],
)
def test_it_has_the_tokens_of_the_limits_and_leaves_the_pool_empty(
    step: LargestStep, lengths: list[int], slots: set[int], family: str, tiny_model: Callable[[str], Path]
) -> None:
    loaded = load_model(Settings(model=tiny_model(family), device="cpu"))
    layers, lora_step = inject_lora(loaded.model, ["all-linear"])
    seen: set[tuple[int, frozenset[int]]] = set()

    def look(_: torch.nn.Module, args: tuple[torch.Tensor], __: Any) -> None:
        assert lora_step.batch is not None
        seen.add((args[0].shape[:-1].numel(), lora_step.batch.slots))

    linear = [layer for layer in layers.values() if isinstance(layer, LoraLinear) and not layer.allocates_late]
    for layer in linear:
        layer.allocate(slots=8, pages=8)
        layer.register_forward_hook(look)
    assert [chunk.length for chunk in step.chunks(32)] == lengths
    assert max(chunk.start + chunk.length for chunk in step.chunks(32)) == step.row_tokens
    run_largest_step(step, layers.values(), ModelRunner(loaded, lora_step))
    assert seen == {(sum(lengths), frozenset(slots))}
    assert not any(layer._slots or layer._written for layer in linear)
    loaded.attention.close()


@pytest.mark.gpu
def test_what_a_card_has_left_for_the_cache_leaves_room_for_the_largest_step(tiny_model: Callable[[str], Path]) -> None:
    """Rows beyond what the cache holds, at the limits of a step: nothing runs out of memory."""
    with Engine(Settings(model=tiny_model("llama"), device="cuda", max_model_len=256)) as engine:
        assert engine.info()["kv_tokens"] >= 256
        bodies = [{"prompt": [i % 100] * 200, "max_tokens": 20, "logprobs": 20, "min_p": 0.1} for i in range(300)]
        assert len(engine.generate(bodies)) == len(bodies)
