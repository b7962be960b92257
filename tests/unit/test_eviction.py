"""The eviction policies."""

from __future__ import annotations

import pytest

from lora_worker.adapters.eviction import make_policy
from lora_worker.errors import SettingsError


def nothing_blocked(_: str) -> bool:
    return False


def test_lru_evicts_what_was_used_longest_ago() -> None:
    policy = make_policy("lru")
    for key in "abc":
        policy.added(key)
    policy.used("a")
    assert policy.victim(nothing_blocked) == "b"
    policy.removed("b")
    assert policy.victim(nothing_blocked) == "c"


def test_fifo_evicts_what_came_first_whatever_its_use() -> None:
    policy = make_policy("fifo")
    for key in "abc":
        policy.added(key)
    policy.used("a")
    assert policy.victim(nothing_blocked) == "a"


@pytest.mark.parametrize("name", ["lru", "fifo"])
def test_a_blocked_key_is_never_the_victim(name: str) -> None:
    policy = make_policy(name)
    for key in "abc":
        policy.added(key)
    assert policy.victim(lambda key: key in "ab") == "c"
    assert policy.victim(lambda _: True) is None


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(SettingsError, match="lfu"):
        make_policy("lfu")
