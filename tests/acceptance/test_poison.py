"""A request that kills every worker it runs on."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from support.fleet import Fleet
from support.worker_process import wait_for

from lora_worker.embedded import EmbeddedServer
from lora_worker.testing.rows import POISON

from .conftest import Say

ROWS = 8


@pytest.mark.parametrize("max_redeliveries", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_a_prompt_that_kills_its_worker_fails_as_poison_and_its_neighbours_are_answered(
    server: EmbeddedServer, tmp_path: Path, say: Say, max_redeliveries: int
) -> None:
    chance = random.Random(7)
    with Fleet(server, tmp_path, 2, 4, max_redeliveries=max_redeliveries, max_running_requests=ROWS) as fleet:
        fleet.send(60, chance, max_tokens=400)
        poison = fleet.client.generate(prompt=f"please {POISON}", max_tokens=100)
        fleet.send(60, chance, max_tokens=400)
        deaths = 0

        def is_answered() -> bool:
            nonlocal deaths
            for worker in fleet.workers:
                if worker.has_ended:
                    deaths += 1
                    worker.start_again()
            return fleet.unanswered == 0 and poison.state != "PENDING"

        wait_for(is_answered, "poison and neighbours have ended", 300)
        assert poison.state == "FAILURE"
        assert type(poison.result).__name__ == "PoisonedRequestError"
        assert "died" in str(poison.result)
        fleet.check_answers()
        fleet.check_nothing_is_left()
        say(f"poison after {deaths} deaths with max_redeliveries {max_redeliveries}; all 120 neighbours answered")
        # It runs alone once more after max_redeliveries deaths; one more if it kills within its very first moment.
        assert max_redeliveries + 1 <= deaths <= max_redeliveries + 2
