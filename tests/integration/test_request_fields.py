"""Requests with OpenAI's fields through a real Redis and a real worker process."""

from __future__ import annotations

from typing import Any

import pytest
from celery.exceptions import SoftTimeLimitExceeded, TaskRevokedError
from redis import Redis
from support.worker_process import wait_for

from lora_worker import errors
from lora_worker.client import Client
from lora_worker.engine import Engine
from lora_worker.settings import Settings

from .conftest import ADAPTERS, LONG

SECONDS = 60
NAME = ADAPTERS[0]
BODIES: list[dict[str, Any]] = [
    {"prompt": "w1 w2", "n": 3, "seed": 4, "max_tokens": 12, "logprobs": 2},
    {"prompt": "w1 w2", "model": NAME, "temperature": 0, "repetition_penalty": 1.4, "max_tokens": 20},
    {"prompt": "w1 w2", "temperature": 0, "logit_bias": {7: 100}, "frequency_penalty": 2, "max_tokens": 4},
    {"prompt": "w1", "seed": 1, "min_p": 0.1, "presence_penalty": 1.0, "min_tokens": 5, "stop_token_ids": [3, 4, 5]},
    {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "w1"}]}],
        "n": 2,
        "seed": 2,
        "logprobs": True,
        "top_logprobs": 1,
        "max_completion_tokens": 5,
        "user": "me",
        "stream": False,
    },
]


def test_fields_mean_the_same_by_way_of_a_worker(
    client: Client, worker_settings: dict[str, Any], adapter_root: Any
) -> None:
    client.load_lora_adapter(NAME, NAME).get(timeout=SECONDS)
    results = [client.generate(**body) for body in BODIES]
    found = [result.get(timeout=SECONDS) for result in results]
    own = {**worker_settings, "adapter_roots": [adapter_root], "lora_paths": [NAME], "max_running_requests": 1}
    with Engine(Settings(**own)) as engine:
        for answer, expected in zip(found, engine.generate(BODIES), strict=True):
            assert isinstance(expected, dict)
            assert answer["usage"] == expected["usage"]
            assert [without_logprobs(c) for c in answer["choices"]] == [
                without_logprobs(c) for c in expected["choices"]
            ]
    assert [len(answer["choices"]) for answer in found] == [3, 1, 1, 1, 2]


def without_logprobs(choice: dict[str, Any]) -> dict[str, Any]:
    """Their last digits depend on the mix."""
    return {name: value for name, value in choice.items() if name != "logprobs"}


@pytest.mark.parametrize("field", ["stream", "echo", "best_of", "response_format", "suffix", "functions", "audio"])
def test_a_refused_field_fails_its_task_with_a_sentence(client: Client, field: str) -> None:
    with pytest.raises(errors.InvalidRequestError, match=f"'{field}' is not served: "):
        client.generate(prompt="w1", **{field: True if field == "stream" else 7}).get(timeout=SECONDS)


def test_a_task_of_several_choices_is_revoked_and_timed_as_one(client: Client, connection: Redis) -> None:
    endless = {"prompt": [1], "max_tokens": LONG - 10, "ignore_eos": True, "n": 3}
    revoked, limited = client.generate(**endless), client.generate(**endless, soft_time_limit=1)
    with pytest.raises(SoftTimeLimitExceeded):
        limited.get(timeout=SECONDS)
    client.app.control.revoke(revoked.id, terminate=True)
    with pytest.raises(TaskRevokedError):
        revoked.get(timeout=SECONDS)
    assert len(client.generate(prompt="w1", n=2, max_tokens=2).get(timeout=SECONDS)["choices"]) == 2
    wait_for(lambda: connection.hlen("unacked") == 0, "everything is acknowledged")
