"""Workers are killed, stopped and continued under load, and nothing is lost, failed or wrong."""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path

import pytest
from support.fleet import Fleet
from support.worker_process import wait_for

from lora_worker.embedded import EmbeddedServer

from .conftest import Say

ROWS = 16
LEASE_SECONDS = 3
BACKLOG = 400


@pytest.mark.parametrize(
    ("kills", "transport"),
    [
        (3, "atomic"),
        pytest.param(40, "atomic", marks=pytest.mark.slow),
        pytest.param(40, "stock", marks=pytest.mark.slow),
    ],
)
def test_workers_that_are_killed_in_a_loop_lose_nothing(
    server: EmbeddedServer, tmp_path: Path, say: Say, kills: int, transport: str
) -> None:
    """Stock claims may lose the one message that was on its way at each kill, and no other."""
    chance = random.Random(kills)
    with Fleet(server, tmp_path, 3, 12, transport=transport) as fleet, fleet.counted_starts() as starts:
        for _ in range(kills):
            fleet.send(max(0, BACKLOG - fleet.unanswered), chance)
            time.sleep(chance.uniform(0.2, 1.0))  # a kill at any moment of a claim, a row or an acknowledgement
            victim = chance.choice(fleet.workers)
            fleet.kill(victim)
            victim.start_again()
        fleet.wait_until_nothing_is_left()
        lost = fleet.unanswered
        assert lost <= (kills if transport == "stock" else 0)
        fleet.check_answers(fleet.answered)
        fleet.check_nothing_is_left()
        again = sum(starts.values()) - len(starts)
        say(f"{kills} kills, {len(fleet.sent)} requests: lost {lost}, failed 0, wrong 0; {again} rows started again")
        # What ran at each kill, and what had just ended and was not stored yet: at most as many again.
        assert again <= 2 * kills * ROWS


def test_messages_of_a_killed_worker_run_elsewhere_within_a_lease_and_two_seconds(
    server: EmbeddedServer, tmp_path: Path, say: Say
) -> None:
    chance = random.Random(1)
    with Fleet(server, tmp_path, 2, 4) as fleet:
        fleet.send(200, chance, max_tokens=2000)
        victim = fleet.workers[0]
        wait_for(lambda: victim.log.count("received") > ROWS, "the worker has claimed")
        (victim_id,) = [worker for worker in fleet.live if worker.startswith("w0@")]
        fleet.kill(victim)
        killed_at = time.monotonic()
        wait_for(lambda: victim_id not in fleet.live, "its messages are restored")
        seconds = time.monotonic() - killed_at
        say(f"restored after {seconds:.1f} s with a lease of {LEASE_SECONDS} s")
        assert f"{victim_id} is dead; restored" in fleet.workers[1].log


def test_a_worker_that_was_stopped_for_longer_than_its_lease_lets_go_of_what_others_run(
    server: EmbeddedServer, tmp_path: Path, say: Say
) -> None:
    chance = random.Random(2)
    with Fleet(server, tmp_path, 2, 4) as fleet, fleet.counted_starts() as starts:
        fleet.send(300, chance, max_tokens=300)
        stopped = fleet.workers[0]
        wait_for(lambda: stopped.log.count("received") > ROWS, "the worker has claimed")
        (stopped_id,) = [worker for worker in fleet.live if worker.startswith("w0@")]
        stopped.send_signal(signal.SIGSTOP)
        wait_for(lambda: f"{stopped_id} is dead; restored" in fleet.workers[1].log, "its messages are restored")
        stopped.send_signal(signal.SIGCONT)
        wait_for(lambda: "were stopped" in stopped.log, "the worker has noticed")
        fleet.wait_for_answers()
        fleet.check_answers()
        fleet.check_nothing_is_left()
        again = sum(starts.values()) - len(starts)
        say(f"lost 0, wrong 0; {again} rows started again")
        assert stopped_id in fleet.live  # it serves again
        # Those it was running when it was stopped, and those it began before it could know.
        assert again <= 3 * ROWS


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGQUIT])
def test_a_worker_that_ends_under_load_loses_nothing_and_ends_in_time(
    server: EmbeddedServer, tmp_path: Path, say: Say, number: signal.Signals
) -> None:
    chance = random.Random(3)
    with Fleet(server, tmp_path, 2, 8, drain_seconds=2) as fleet:
        fleet.send(500, chance, max_tokens=100)
        ending = fleet.workers[0]
        wait_for(lambda: ending.log.count("received") > ROWS, "the worker has claimed")
        started_at = time.monotonic()
        ending.send_signal(number)
        code = ending.wait_until_ended()
        seconds = time.monotonic() - started_at
        fleet.wait_for_answers()
        fleet.check_answers()
        fleet.check_nothing_is_left()
        say(f"{number.name} under load: ended with {code} after {seconds:.1f} s; lost 0, failed 0, wrong 0")
        assert not [worker for worker in fleet.live if worker.startswith("w0@")]
        assert "is dead" not in fleet.workers[1].log
