"""Anything in any order, with fewer slots than adapters: every count holds after every step, every answer is right."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from support.oracle import Oracle
from support.rows import Row, expected
from support.tiny_models import save_adapter
from support.worker_process import wait_for

from lora_worker import errors
from lora_worker.engine import Engine

OPERATIONS = 10_000
AT_ONCE = 40
TOKENS = 12
NAMES = ["a", "b", "c", "d", "e", "f"]
PROMPTS = [[i, 2 * i + 1] for i in range(4)]


class Asked(NamedTuple):
    row: Row
    name: str | None
    prompt: int


class Run:
    """Random operations on an engine, and what came of the rows."""

    def __init__(self, engine: Engine, folders: dict[str, Path], seed: int) -> None:
        self.engine = engine
        self.folders = folders
        self.chance = random.Random(seed)
        self.asked: list[Asked] = []
        self.answers: list[tuple[Asked, str | None, list[int]]] = []  # with the digest that answered
        self.contents: dict[str, str] = {}  # digest to folder
        self.ended: Counter[str] = Counter()

    def do(self) -> None:
        name = self.chance.choice(NAMES)
        operation = self.chance.choices(
            [self.generate, self.load, self.unload, self.pin, self.unpin, self.cancel], [60, 14, 5, 4, 7, 10]
        )[0]
        try:
            operation(name)
        except errors.AdapterError as error:
            self.ended[type(error).__name__] += 1
        if len(self.asked) >= AT_ONCE:
            self.collect()

    def generate(self, name: str) -> None:
        model = self.chance.choice([None, name, name, name])
        prompt = self.chance.randrange(len(PROMPTS))
        options: dict[str, object] = {"priority": self.chance.choice([0, 0, 9])}
        if self.chance.random() < 0.05:
            options["may_start"] = lambda: False  # as of one that has expired
        elif self.chance.random() < 0.05:
            options["time_limit_seconds"] = 0.001
        body = {} if model is None else {"model": model}
        row = Row(self.engine, options, prompt=PROMPTS[prompt], max_tokens=TOKENS, **body)
        self.asked.append(Asked(row, model, prompt))

    def load(self, name: str) -> None:
        folder = self.chance.choice(list(self.folders))
        report = self.engine.load_lora_adapter(
            name, str(self.folders[folder]), pinned=self.chance.random() < 0.1, replace=self.chance.random() < 0.8
        )["report"]
        self.contents[report["digest"]] = folder

    def unload(self, name: str) -> None:
        self.engine.unload_lora_adapter(name, force=self.chance.random() < 0.5)

    def pin(self, name: str) -> None:
        self.engine.pin_lora_adapter(name)

    def unpin(self, name: str) -> None:
        self.engine.unpin_lora_adapter(name)

    def cancel(self, _: str) -> None:
        if self.asked:
            self.engine.cancel(self.chance.choice(self.asked).row.id)

    def collect(self) -> None:
        for asked in self.asked:
            try:
                answer = asked.row.answer()
            except errors.LoraWorkerError as error:
                self.ended[type(error).__name__] += 1
            else:
                self.ended["answered"] += 1
                self.answers.append((asked, answer["lora_worker"]["digest"], asked.row.tokens()))
        self.asked.clear()
        self.engine.check_integrity()


def test_ten_thousand_operations_keep_every_count_and_every_answer(
    make_engine: Callable[..., Engine], tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    base = tiny_model("llama")
    targets = ["all-linear", ["q_proj", "v_proj"], ["down_proj"]]
    folders = {
        f"content-{i}": save_adapter(base, tmp_path / str(i), seed=i, r=2 ** (i % 5 + 1), target_modules=targets[i % 3])
        for i in range(9)
    }
    engine = make_engine(
        max_loras_per_batch=3,
        max_lora_rank=32,
        lora_pool_ranks=48,
        max_running_requests=8,
        max_loaded_loras=4,
        max_total_tokens=256,
        max_wait_seconds=0.05,
    )
    run = Run(engine, folders, seed=20)
    for _ in range(OPERATIONS):
        run.do()
    run.collect()
    wait_for(lambda: engine.info()["running"] == 0, "all rows have ended")
    oracle = Oracle(base, folders, torch.float64)
    solo = {(f, p): expected(oracle, f, PROMPTS[p], TOKENS) for f in (None, *folders) for p in range(len(PROMPTS))}
    for asked, digest, tokens in run.answers:
        assert (digest is None) == (asked.name is None)
        assert tokens == solo[None if digest is None else run.contents[digest], asked.prompt]
    kinds = {"answered", "UnknownAdapterError", "RequestWithdrawnError", "TimeLimitError", "AdapterConflictError"}
    assert kinds <= set(run.ended), run.ended
    assert engine.info()["pool"]["evictions"] > 100
