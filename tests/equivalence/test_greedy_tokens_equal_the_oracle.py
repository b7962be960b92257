"""Greedy tokens equal transformers' for the base and PEFT's for each adapter, alone and in every mix tried."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from support.oracle import CLOSE_CALL, Oracle
from support.tiny_models import EOS, VOCABULARY, ids_of

from lora_worker.engine import Engine
from lora_worker.settings import Settings

FAMILIES = ["llama", "qwen2", "gpt2"]
NAMES = [None, "attention", "everything", "narrow", "mlp"]
TOKENS = 24


class Case(NamedTuple):
    """A request and the tokens the oracle gives it."""

    adapter: str | None
    prompt: list[int]
    tokens: list[int]

    @property
    def body(self) -> dict[str, Any]:
        model = {"model": self.adapter} if self.adapter else {}
        return {"prompt": self.prompt, "temperature": 0, "max_tokens": TOKENS, **model}


class Family(NamedTuple):
    name: str
    folder: Path
    adapters: dict[str, Path]
    oracle: Oracle
    cases: list[Case]

    def settings(self, **more: Any) -> Settings:
        paths = [{"lora_name": name, "lora_path": str(folder)} for name, folder in self.adapters.items()]
        return Settings(model=str(self.folder), dtype="float32", device="cpu", lora_paths=paths, **more)


def make_cases(oracle: Oracle, *, count: int, seed: int) -> list[Case]:
    chance = random.Random(seed)
    cases: list[Case] = []
    while len(cases) < count:
        prompt = [chance.randrange(EOS) for _ in range(chance.choice([1, 2, 5, 31, 32, 33, 70]))]
        adapter = NAMES[len(cases) % len(NAMES)]
        answer = oracle.generate(adapter, prompt, TOKENS)
        if answer.gap >= CLOSE_CALL:
            cases.append(Case(adapter, prompt, answer.tokens))
    return cases


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tiny_model: Any, tiny_adapters: Any) -> Family:
    folder, adapters = tiny_model(request.param), tiny_adapters(request.param)
    oracle = Oracle(folder, adapters)
    return Family(request.param, folder, adapters, oracle, make_cases(oracle, count=20, seed=7))


def expect(case: Case, response: Any) -> None:
    choice = response["choices"][0]
    ended = case.tokens[-1] == EOS
    assert ids_of(choice["text"]) == case.tokens[: len(case.tokens) - ended]
    assert choice["finish_reason"] == ("stop" if ended else "length")
    assert response["usage"]["completion_tokens"] == len(case.tokens)
    assert response["lora_worker"]["adapter"] == case.adapter


def test_each_row_alone(family: Family) -> None:
    with Engine(family.settings(max_loras_per_batch=1)) as engine:
        for case in family.cases:
            expect(case, engine.generate([case.body])[0])
        engine.check_integrity()


@pytest.mark.parametrize("slots", [1, 2, 3])
@pytest.mark.parametrize("order", [0, 1, 2])
def test_rows_of_all_adapters_and_the_base_together(family: Family, slots: int, order: int) -> None:
    cases = list(family.cases)
    random.Random(order).shuffle(cases)
    with Engine(family.settings(max_loras_per_batch=slots)) as engine:
        for case, response in zip(cases, engine.generate([c.body for c in cases]), strict=True):
            expect(case, response)
        assert engine.info()["pool"]["evictions"] > 0
        engine.check_integrity()


def test_rows_that_join_while_others_run(family: Family) -> None:
    """Two rows at a time and two prompt tokens a step: rows leave and join at nearly every step, prompts in chunks."""
    settings = family.settings(max_loras_per_batch=2, max_running_requests=3, max_prefill_tokens=2)
    with Engine(settings) as engine:
        for case, response in zip(family.cases, engine.generate([c.body for c in family.cases]), strict=True):
            expect(case, response)


def test_rows_that_are_preempted_for_lack_of_cache(family: Family) -> None:
    settings = family.settings(max_loras_per_batch=3, max_total_tokens=128, max_model_len=128)
    with Engine(settings) as engine:
        for case, response in zip(family.cases, engine.generate([c.body for c in family.cases]), strict=True):
            expect(case, response)
        assert engine.info()["preemptions"] > 0
        engine.check_integrity()


def test_a_slot_taken_in_turn_by_adapters_of_other_modules_keeps_nothing(family: Family) -> None:
    """With one slot, each adapter comes after each other one; what the former one set elsewhere must be zero again."""
    by_name = {name: [case for case in family.cases if case.adapter == name] for name in NAMES[1:]}
    with Engine(family.settings(max_loras_per_batch=1)) as engine:
        for first in NAMES[1:]:
            for second in NAMES[1:]:
                for name in (first, second):
                    expect(by_name[name][0], engine.generate([by_name[name][0].body])[0])


@pytest.mark.gpu
@pytest.mark.parametrize("slots", [1, 3])
def test_rows_on_a_cuda_card(family: Family, slots: int) -> None:
    """The same torch path on the card; the oracle's answers are the CPU's."""
    settings = family.settings(max_loras_per_batch=slots).model_copy(update={"device": "cuda"})
    with Engine(settings) as engine:
        for case, response in zip(family.cases, engine.generate([c.body for c in family.cases]), strict=True):
            expect(case, response)
        engine.check_integrity()


def test_long_rows_in_float64(family: Family) -> None:
    oracle = Oracle(family.folder, family.adapters, dtype=torch.float64)
    chance = random.Random(3)
    bodies, expected = [], []
    for name in NAMES * 2:
        prompt = [chance.randrange(VOCABULARY) for _ in range(chance.randrange(1, 90))]
        expected.append(oracle.generate(name, prompt, 120, ignore_eos=True).tokens)
        body = {"prompt": prompt, "temperature": 0, "max_tokens": 120, "ignore_eos": True}
        bodies.append(body | ({"model": name} if name else {}))
    settings = family.settings(max_loras_per_batch=2).model_copy(update={"dtype": "float64"})
    with Engine(settings) as engine:
        for tokens, response in zip(expected, engine.generate(bodies), strict=True):
            visible = [token for token in tokens if token != EOS]
            assert isinstance(response, dict)
            assert ids_of(response["choices"][0]["text"]) == visible
