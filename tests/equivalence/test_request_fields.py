"""Every field of a request, over whole generations, against transformers' processors: alone, in mixes, preempted."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from support.engines import engines
from support.oracle import CLOSE_CALL
from support.tiny_models import EOS, VOCABULARY, ids_of, text_of
from transformers import (
    AutoModelForCausalLM,
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from lora_worker.engine import Engine

TOKENS = 24
ADAPTER = "everything"


class OpenAIPenalties(LogitsProcessor):
    """OpenAI's formula, which transformers doesn't have."""

    def __init__(self, body: dict[str, Any]) -> None:
        self.prompt_length = len(body["prompt"])
        self.presence, self.frequency = body.get("presence_penalty", 0), body.get("frequency_penalty", 0)

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        counts = torch.bincount(input_ids[0, self.prompt_length :], minlength=scores.shape[1]).to(scores.dtype)
        return scores - counts * self.frequency - (counts > 0).to(scores.dtype) * self.presence


@pytest.fixture(scope="module")
def models(tiny_model: Callable[[str], Path], tiny_adapters: Callable[[str], dict[str, Path]]) -> dict[str | None, Any]:
    """The base (None) and the adapted model, by transformers and PEFT, in float64."""

    def load() -> Any:
        return AutoModelForCausalLM.from_pretrained(tiny_model("llama"), dtype=torch.float64).eval()

    return {None: load(), ADAPTER: PeftModel.from_pretrained(load(), tiny_adapters("llama")[ADAPTER]).eval()}


@pytest.fixture(scope="module")
def make_engine(
    tiny_model: Callable[[str], Path], tiny_adapters: Callable[[str], dict[str, Path]]
) -> Iterator[Callable[..., Engine]]:
    paths = [f"{name}={path}" for name, path in tiny_adapters("llama").items()]
    with engines(tiny_model("llama"), lora_paths=paths) as make:
        yield make


@pytest.fixture(scope="module")
def engine(make_engine: Callable[..., Engine]) -> Engine:
    return make_engine()


def answers(engine: Engine, bodies: list[dict[str, Any]]) -> list[dict[str, Any]]:
    found = engine.generate(bodies)
    assert all(isinstance(answer, dict) for answer in found)
    return found  # type: ignore[return-value]


def one(engine: Engine, **body: Any) -> dict[str, Any]:
    (answer,) = answers(engine, [body])
    return answer


def tokens(choice: dict[str, Any]) -> list[int]:
    return ids_of(choice["text"])


def random_body(chance: random.Random) -> dict[str, Any]:
    """Any of the fields that change what is drawn."""
    body: dict[str, Any] = {
        "prompt": [chance.randrange(EOS) for _ in range(chance.randrange(1, 30))],
        "max_tokens": TOKENS,
        "temperature": chance.choice([0, 0.7, 1.5]),
        "seed": chance.randrange(1000),
    }
    fields: dict[str, Callable[[], Any]] = {
        "model": lambda: ADAPTER,
        "top_p": lambda: chance.choice([0.5, 0.9]),
        "top_k": lambda: chance.choice([1, 5, 40]),
        "min_p": lambda: chance.choice([0.02, 0.3]),
        "presence_penalty": lambda: chance.uniform(-2, 2),
        "frequency_penalty": lambda: chance.uniform(-2, 2),
        "repetition_penalty": lambda: chance.uniform(0.7, 1.6),
        "logit_bias": lambda: {str(chance.randrange(EOS)): chance.randrange(-12, 12) for _ in range(4)},
        "min_tokens": lambda: chance.randrange(TOKENS),
        "stop_token_ids": lambda: [chance.randrange(EOS) for _ in range(8)],
        "stop": lambda: [f"w{chance.randrange(10)}"],
        "ignore_eos": lambda: True,
        "n": lambda: chance.randrange(2, 4),
        "logprobs": lambda: chance.choice([0, 3]),
    }
    chosen = chance.sample(list(fields), chance.randrange(7))
    return body | {name: fields[name]() for name in chosen}


def processors(body: dict[str, Any]) -> LogitsProcessorList:
    """transformers' processors in the order of its `generate`, with OpenAI's formula after its own penalty."""
    found = LogitsProcessorList()
    if "logit_bias" in body:
        found.append(SequenceBiasLogitsProcessor([[[int(t)], float(b)] for t, b in body["logit_bias"].items()]))
    found.append(RepetitionPenaltyLogitsProcessor(float(body.get("repetition_penalty", 1))))
    found.append(OpenAIPenalties(body))
    found.append(TemperatureLogitsWarper(float(body["temperature"])))
    if "top_k" in body:
        found.append(TopKLogitsWarper(body["top_k"]))
    if "top_p" in body:
        found.append(TopPLogitsWarper(body["top_p"]))
    if "min_p" in body:
        found.append(MinPLogitsWarper(body["min_p"]))
    return found


def test_greedy_tokens_equal_those_of_transformers_generate(engine: Engine, models: dict[str | None, Any]) -> None:
    chance = random.Random(5)
    bodies: list[dict[str, Any]] = []
    expected = []
    while len(bodies) < 40:
        body = random_body(chance)
        for name in ("stop", "n", "top_p", "top_k", "min_p", "logprobs", "ignore_eos"):
            body.pop(name, None)
        body["temperature"] = 0
        ends = [EOS, *body.get("stop_token_ids", [])]
        out = models[body.get("model")].generate(
            input_ids=torch.tensor([body["prompt"]]),
            attention_mask=torch.ones(1, len(body["prompt"]), dtype=torch.long),
            max_new_tokens=TOKENS,
            do_sample=False,
            repetition_penalty=float(body.get("repetition_penalty", 1)),
            min_new_tokens=body.get("min_tokens"),
            eos_token_id=ends,
            sequence_bias=[[[int(t)], float(b)] for t, b in body.get("logit_bias", {}).items()] or None,
            logits_processor=LogitsProcessorList([OpenAIPenalties(body)]),
            output_scores=True,
            return_dict_in_generate=True,
            pad_token_id=0,
        )
        gaps = [scores[0].topk(2).values.diff().abs().item() for scores in out.scores]
        if min(gaps) >= CLOSE_CALL:
            bodies.append(body)
            expected.append((out.sequences[0, len(body["prompt"]) :].tolist(), ends))
    for (ids, ends), answer in zip(expected, answers(engine, bodies), strict=True):
        ended = ids[-1] in ends
        assert tokens(answer["choices"][0]) == ids[: len(ids) - ended]
        assert answer["choices"][0]["finish_reason"] == ("stop" if ended else "length")
        assert answer["usage"]["completion_tokens"] == len(ids)
    used = set().union(*bodies)
    assert {"repetition_penalty", "min_tokens", "logit_bias", "presence_penalty", "stop_token_ids"} <= used


def test_sampled_tokens_are_drawn_from_transformers_probabilities(
    engine: Engine, models: dict[str | None, Any]
) -> None:
    """The place of every draw in [0, 1) is known from the seed, so each token is known from the probabilities."""
    chance = random.Random(6)
    bodies: list[dict[str, Any]] = []
    while len(bodies) < 40:
        body = random_body(chance) | {"temperature": 1.1, "ignore_eos": True, "max_tokens": 12}
        bodies.append(
            {name: v for name, v in body.items() if name not in {"stop", "stop_token_ids", "n", "min_tokens"}}
        )
    for body, answer in zip(bodies, answers(engine, bodies), strict=True):
        places = torch.Generator().manual_seed(body["seed"])
        ids = list(body["prompt"])
        warp = processors(body)
        for _ in range(12):
            with torch.inference_mode():
                logits = models[body.get("model")](torch.tensor([ids])).logits[:, -1]
            so_far: Any = torch.tensor([ids])
            probabilities = torch.softmax(warp(so_far, logits)[0], dim=-1)
            is_sorted = "top_k" in body or "top_p" in body
            order = probabilities.argsort(descending=True) if is_sorted else torch.arange(VOCABULARY)
            place = torch.rand((), generator=places, dtype=torch.float64)
            ids.append(int(order[int((probabilities[order].cumsum(0) <= place).sum())]))
        # The end-of-sequence token, which is ignored here, has no text.
        assert tokens(answer["choices"][0]) == [token for token in ids[len(body["prompt"]) :] if token != EOS]


@pytest.mark.parametrize(
    "limits", [{}, {"max_running_requests": 5, "max_prefill_tokens": 3}, {"max_total_tokens": 256}]
)
def test_a_row_gets_the_same_answer_alone_and_in_any_mix(
    engine: Engine, make_engine: Callable[..., Engine], limits: dict[str, Any]
) -> None:
    chance = random.Random(7)
    bodies = [random_body(chance) for _ in range(60)]
    alone = [one(engine, **body) for body in bodies]
    assert {name for body in bodies for name in body} >= {"n", "logprobs", "min_p", "frequency_penalty", "stop"}
    mixing = make_engine(max_loras_per_batch=1, **limits)
    for body, first, mixed in zip(bodies, alone, answers(mixing, bodies), strict=True):
        assert mixed["usage"] == first["usage"]
        for one_choice, other in zip(first["choices"], mixed["choices"], strict=True):
            expected = one_choice.pop("logprobs")
            found = other.pop("logprobs")
            assert one_choice == other
            assert (expected is None) == ("logprobs" not in body)
            if expected is not None:
                assert found["tokens"] == expected["tokens"]
                assert found["token_logprobs"] == pytest.approx(expected["token_logprobs"], abs=1e-9)
                for some, others in zip(found["top_logprobs"], expected["top_logprobs"], strict=True):
                    assert some == pytest.approx(others, abs=1e-9)
    assert (mixing.info()["preemptions"] > 0) == ("max_total_tokens" in limits)
    mixing.check_integrity()
    assert not mixing._core._sampler._generators
    assert not mixing._core._sampler._processors._counts
    assert not mixing._core._stop_watch._watched


def test_choices_are_of_seeds_of_their_own_and_the_prompt_counts_once(engine: Engine) -> None:
    body = {"prompt": "w1 w2 w3", "max_tokens": 10, "seed": 3, "ignore_eos": True}
    several, again, single = (one(engine, **body, **more) for more in ({"n": 5}, {"n": 5}, {}))
    assert [choice["index"] for choice in several["choices"]] == list(range(5))
    assert several["choices"] == again["choices"]
    assert several["choices"][0] == single["choices"][0]
    assert len({choice["text"] for choice in several["choices"]}) == 5
    assert several["usage"] == {"prompt_tokens": 3, "completion_tokens": 50, "total_tokens": 53}
    # No choice of one seed is a choice of the next.
    other = one(engine, **{**body, "seed": 4}, n=5)
    assert not {c["text"] for c in several["choices"]} & {c["text"] for c in other["choices"]}


def test_logprobs_are_of_the_models_own_distribution(engine: Engine, models: dict[str | None, Any]) -> None:
    prompt = [1, 2, 3]
    shaping = {"temperature": 0.3, "seed": 1, "top_k": 5, "logit_bias": {"9": 30}, "frequency_penalty": 1.5}
    body = {"max_tokens": 8, "ignore_eos": True, **shaping}
    completion = one(engine, prompt=prompt, logprobs=4, **body)["choices"][0]
    messages = [{"role": "w1", "content": "w2 w3"}]
    chat = one(engine, messages=messages, logprobs=True, top_logprobs=4, **body)["choices"][0]
    found = completion["logprobs"]
    drawn = ids_of(" ".join(found["tokens"]))
    for token, offset in zip(found["tokens"], found["text_offset"], strict=True):
        assert completion["text"][offset:].startswith(token)
    with torch.inference_mode():
        raw = torch.log_softmax(models[None](torch.tensor([prompt + drawn])).logits[0], dim=-1)
    for i, token in enumerate(drawn):
        expected = raw[len(prompt) - 1 + i]
        values, ids = expected.topk(4)
        best = {f" w{t}": value for t, value in zip(ids.tolist(), values.tolist(), strict=True)}
        entry = chat["logprobs"]["content"][i]
        assert found["token_logprobs"][i] == pytest.approx(expected[token].item(), abs=1e-9)
        assert found["top_logprobs"][i] == pytest.approx(best | {f" w{token}": expected[token].item()}, abs=1e-9)
        assert {top["token"]: top["logprob"] for top in entry["top_logprobs"]} == pytest.approx(best, abs=1e-9)
        assert (entry["token"], bytes(entry["bytes"]).decode()) == (f" w{token}", f" w{token}")
    assert chat["logprobs"]["refusal"] is None
    assert one(engine, prompt=prompt, logprobs=0, **body)["choices"][0]["logprobs"]["top_logprobs"] == [
        pytest.approx({token: value}) for token, value in zip(found["tokens"], found["token_logprobs"], strict=True)
    ]


def test_nothing_ends_a_row_within_its_first_min_tokens(engine: Engine) -> None:
    body = {"prompt": "w1 w2", "temperature": 0, "max_tokens": 30, "ignore_eos": True}
    whole = tokens(one(engine, **body)["choices"][0])
    third, tenth = whole[2], whole[9]
    # A stop string that comes early is passed over, and the next time it comes it ends the text.
    answer = one(engine, **body, stop=[f"w{third} ", f"w{tenth}"], min_tokens=9)
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == 10
    assert answer["choices"][0]["text"].strip() == text_of(whole[:9])
    assert one(engine, **body, stop=[f"w{third} "])["usage"]["completion_tokens"] == 4
    # A stop token is not drawn at all before, and has no text when it ends the row.
    early = one(engine, **body, stop_token_ids=[third])
    assert tokens(early["choices"][0]) == whole[:2]
    assert early["usage"]["completion_tokens"] == 3
    late = one(engine, **body, stop_token_ids=[third], min_tokens=20)
    assert late["usage"]["completion_tokens"] > 20
    assert third not in tokens(late["choices"][0])[:20]


def test_token_ids_beyond_the_vocabulary_are_refused_by_field(engine: Engine) -> None:
    for field, value in (("logit_bias", {"128": 1}), ("stop_token_ids", [3, 128])):
        (error,) = engine.generate([{"prompt": "w1", field: value}], return_exceptions=True)
        assert f"{field} holds the token id 128, but the model has 128 tokens" in str(error)
    every = list(range(VOCABULARY))
    (error,) = engine.generate([{"prompt": "w1", "stop_token_ids": every, "min_tokens": 1}], return_exceptions=True)
    assert "leaves no token" in str(error)
