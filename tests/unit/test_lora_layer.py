"""A layer in a model that calls it otherwise than once with all tokens of a step."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lora_worker.errors import UnsupportedModelError
from lora_worker.kernels.torch_lora import Segment, make_lora_batch
from lora_worker.lora.layer import LoraEmbedding, LoraLayer, LoraLinear, LoraPair, LoraStep, Place


def filled(layer: LoraLayer, width_in: int, width_out: int) -> LoraLayer:
    layer.allocate(slots=1, pages=1)
    layer.put(Place(0, (0,)), LoraPair(torch.ones(2, width_in), torch.ones(2, width_out)))
    return layer


@torch.inference_mode()
@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("kind", ["linear", "output", "embedding"])
def test_a_layer_that_is_given_some_of_the_tokens_says_so(kind: str, count: int) -> None:
    """A model that sends tokens to experts, for one: whose they are is then not told by their place."""
    batch = make_lora_batch([Segment(0, (0,), 1, 3)], has_bias=False, device=torch.device("cpu"))
    step = LoraStep(None, batch) if kind == "output" else LoraStep(batch)
    layer: LoraLayer
    if kind == "embedding":
        layer, tokens = filled(LoraEmbedding(nn.Embedding(4, 5), step), 4, 5), torch.zeros(1, 4, dtype=torch.long)
    else:
        linear = LoraLinear(nn.Linear(4, 5), in_features=4, out_features=5, step=step, is_output=kind == "output")
        layer, tokens = filled(linear, 4, 5), torch.ones(1, 4, 4)
    assert layer(tokens[:, :3]).shape == (1, 3, 5)
    with pytest.raises(UnsupportedModelError, match=f"{count} of a step's 3 tokens"):
        layer(tokens[:, :count])
