"""The batched LoRA delta against the plainest loop over tokens."""

from __future__ import annotations

import pytest
import torch

from lora_worker.kernels.pages import PAGE_RANKS
from lora_worker.kernels.torch_lora import Segment, add_bias, add_lora, make_lora_batch

H, O, S, PAGES = 12, 20, 6, 16  # noqa: E741 - the shapes' own letters

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]

# How many tokens of a step each adapter has, by the adapter's pages; the base's come first.
STEPS: dict[str, list[tuple[tuple[int, ...], int]]] = {
    "one": [((2,), 5)],
    "equal-neighbours": [((0,), 2), ((1,), 2), ((2,), 2)],
    "equal-with-a-gap": [((0,), 2), ((3,), 2), ((5,), 2)],
    "unequal-neighbours": [((1,), 3), ((2,), 2), ((3,), 4)],
    "unequal-with-a-gap": [((0,), 2), ((2,), 1), ((4,), 3)],
    "one-long": [((0,), 40), ((1,), 1), ((2,), 1), ((3,), 1)],
    "base-first": [((), 3), ((0,), 2), ((4,), 1)],
    "two-pages-each": [((0, 1), 2), ((2, 3), 2)],
    "scattered-pages": [((1, 5), 2), ((4, 9), 2)],
    "one-with-scattered-pages": [((7, 3, 12), 4)],
    "ranks-mixed": [((), 2), ((0,), 2), ((9,), 1), ((1, 2), 3), ((10, 11), 3), ((3, 4, 5, 6, 7, 8), 2)],
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("step", STEPS)
def test_every_token_gets_the_delta_of_its_adapter(step: str, device: str) -> None:
    generator = torch.Generator().manual_seed(5)
    count = sum(length for _, length in STEPS[step])
    x, out = (torch.randn(count, n, generator=generator, dtype=torch.float64) for n in (H, O))
    a, b = (torch.randn(PAGES * PAGE_RANKS, n, generator=generator, dtype=torch.float64) for n in (H, O))
    used = {page for pages, _ in STEPS[step] for page in pages}
    for page in set(range(PAGES)) - used:  # what is of no adapter in the step must not be read
        a[page * PAGE_RANKS : (page + 1) * PAGE_RANKS] = float("nan")
        b[page * PAGE_RANKS : (page + 1) * PAGE_RANKS] = float("nan")
    bias = torch.randn(S, O, generator=generator, dtype=torch.float64)
    expected = out.clone()
    segments: list[Segment] = []
    token = 0
    for slot, (pages, length) in enumerate(STEPS[step]):
        for t in range(token, token + length) if pages else ():
            for page in pages:
                rows = slice(page * PAGE_RANKS, (page + 1) * PAGE_RANKS)
                expected[t] += (x[t] @ a[rows].T) @ b[rows]
            expected[t] += bias[slot]
        if pages:
            segments.append(Segment(slot, pages, token, token + length))
        token += length
    batch = make_lora_batch(segments, has_bias=True, device=torch.device(device))
    assert batch is not None
    result = out.to(device)
    add_lora(result, x.to(device), a.to(device), b.to(device), batch)
    add_bias(result, bias.to(device), batch)
    torch.testing.assert_close(result.cpu(), expected)


def test_a_step_without_adapters_has_no_batch() -> None:
    assert make_lora_batch([], has_bias=False, device=torch.device("cpu")) is None
