"""The batched LoRA delta against the plainest loop over tokens."""

from __future__ import annotations

import pytest
import torch

from lora_worker.kernels.torch_lora import Segment, add_bias, add_lora, make_lora_batch

H, O, R, S = 12, 20, 8, 6  # noqa: E741 - the shapes' own letters

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]

# Slots of the tokens of a step, in order.
STEPS = {
    "one": [2] * 5,
    "equal-neighbours": [0, 0, 1, 1, 2, 2],
    "equal-with-a-gap": [0, 0, 3, 3, 5, 5],
    "unequal-neighbours": [1, 1, 1, 2, 2, 3, 3, 3, 3],
    "unequal-with-a-gap": [0, 0, 2, 4, 4, 4],
    "one-long": [0] * 40 + [1, 2, 3],
    "base-first": [-1, -1, -1, 0, 0, 4],
    "all": [0, 1, 2, 3, 4, 5],
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rank", [1, 3, R])
@pytest.mark.parametrize("step", STEPS)
def test_every_token_gets_the_delta_of_its_slot(step: str, rank: int, device: str) -> None:
    slots = STEPS[step]
    generator = torch.Generator().manual_seed(5)
    x, out = (torch.randn(len(slots), n, generator=generator, dtype=torch.float64) for n in (H, O))
    a, b = (torch.randn(S, R, n, generator=generator, dtype=torch.float64) for n in (H, O))
    # Adapters of smaller rank have zeros beyond it; what lies beyond the step's rank must not be read.
    a[:, rank:] = float("nan")
    b[:, rank:] = float("nan")
    bias = torch.randn(S, O, generator=generator, dtype=torch.float64)
    expected = out.clone()
    for token, slot in enumerate(slots):
        if slot >= 0:
            expected[token] += (x[token] @ a[slot, :rank].T) @ b[slot, :rank] + bias[slot]
    segments: list[Segment] = []
    for token, slot in enumerate(slots):
        if segments and segments[-1].slot == slot:
            segments[-1] = segments[-1]._replace(end=token + 1)
        elif slot >= 0:
            segments.append(Segment(slot, token, token + 1))
    batch = make_lora_batch(segments, rank=rank, has_bias=True, device=torch.device(device))
    assert batch is not None
    result = out.to(device)
    add_lora(result, x.to(device), a.to(device), b.to(device), batch)
    add_bias(result, bias.to(device), batch)
    torch.testing.assert_close(result.cpu(), expected)


def test_a_step_without_adapters_has_no_batch() -> None:
    assert make_lora_batch([], rank=0, has_bias=False, device=torch.device("cpu")) is None
