"""What transformers' and PEFT's own `generate` answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from lora_worker.engine import Engine

# Where the oracle's two best logits are closer than this, rounding decides, and the prompt is no test.
CLOSE_CALL = 1e-3


class Answer(NamedTuple):
    """Greedy tokens, the end-of-sequence token included, and the smallest gap between the two best logits."""

    tokens: list[int]
    gap: float


class Oracle:
    """Greedy generation by transformers for the base (None) and by PEFT for each adapter, one prompt at a time."""

    def __init__(self, base: Path, adapters: dict[str, Path], dtype: torch.dtype = torch.float32) -> None:
        self._base = AutoModelForCausalLM.from_pretrained(base, dtype=dtype).eval()
        self._adapted = {
            name: PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype=dtype), folder).eval()
            for name, folder in adapters.items()
        }

    def generate(self, adapter: str | None, prompt: list[int], max_tokens: int, *, ignore_eos: bool = False) -> Answer:
        model = self._base if adapter is None else self._adapted[adapter]
        out = model.generate(
            input_ids=torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=max_tokens,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
            pad_token_id=0,
            **({"eos_token_id": None} if ignore_eos else {}),
        )
        gaps = [logits[0].topk(2).values.diff().abs().item() for logits in out.logits]
        return Answer(out.sequences[0, len(prompt) :].tolist(), min(gaps))

    def logits(self, adapter: str | None, prompt: list[int]) -> torch.Tensor:
        """[V], after the prompt's last token."""
        model = self._base if adapter is None else self._adapted[adapter]
        with torch.inference_mode():
            last: torch.Tensor = model(torch.tensor([prompt])).logits[0, -1]
        return last


def engine_logits(engine: Engine, adapter: str | None, prompt: list[int]) -> torch.Tensor:
    """[V], what the engine's own forward pass gives after the prompt's last token."""
    runner = engine._core._runner
    seen: list[torch.Tensor] = []

    def run(*args: Any, **kwargs: Any) -> torch.Tensor:
        seen.append(type(runner).run(runner, *args, **kwargs))
        return seen[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "run", run)
        model = {} if adapter is None else {"model": adapter}
        engine.generate([{"prompt": prompt, "max_tokens": 1, **model}])
    return seen[-1][0]
