"""Which unstarted rows go to idle peers."""

from __future__ import annotations

from lora_worker.fleet.claiming.hand_over import STALE_SECONDS, Candidate, choose


def rows(*adapters: str, priority: int = 0, waited_seconds: float = 0.0) -> list[Candidate]:
    return [Candidate(f"{a}-{i}", a, priority, waited_seconds) for i, a in enumerate(adapters)]


def test_half_of_what_can_be_spared_goes() -> None:
    chosen = choose(rows(*"aaaaaaaaaa"), 0, {"peer": 64}, {})
    assert len(chosen["peer"]) == 5


def test_rows_that_are_about_to_start_here_stay() -> None:
    assert choose(rows(*"aaaa"), 8, {"peer": 64}, {}) == {}


def test_rows_that_wait_for_a_slot_go_although_rows_are_free() -> None:
    chosen = choose(rows(*"aaaa", waited_seconds=2 * STALE_SECONDS), 8, {"peer": 64}, {})
    assert len(chosen["peer"]) == 2


def test_urgent_rows_go_first_then_those_whose_adapter_the_peer_has_then_the_most_of_one() -> None:
    candidates = [*rows(*"abbbccddddd"), *rows("x", priority=9)]
    assert choose(candidates, 0, {"peer": 2}, {"peer": {"c"}})["peer"] == ["c-4", "c-5"]
    assert {i[0] for i in choose(candidates, 0, {"peer": 4}, {})["peer"]} == {"d"}
    urgent = [*rows(*"ddddd", priority=9), *rows("x", priority=3)]
    assert choose(urgent, 0, {"peer": 1}, {})["peer"] == ["x-0"]


def test_several_peers_share() -> None:
    chosen = choose(rows(*"aaaaaaaaaaaa"), 0, {"one": 4, "two": 64}, {})
    assert {peer: len(given) for peer, given in chosen.items()} == {"one": 4, "two": 2}
