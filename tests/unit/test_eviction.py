"""The eviction policies."""

from __future__ import annotations

import pytest

from lora_worker.adapters.eviction import make_policy
from lora_worker.errors import SettingsError


def test_lru_evicts_what_was_used_longest_ago() -> None:
    policy = make_policy("lru")
    for key in "abc":
        policy.added(key)
    policy.used("a")
    assert list(policy) == ["b", "c", "a"]
    policy.removed("b")
    assert list(policy) == ["c", "a"]


def test_fifo_evicts_what_came_first_whatever_its_use() -> None:
    policy = make_policy("fifo")
    for key in "abc":
        policy.added(key)
    policy.used("a")
    assert list(policy) == ["a", "b", "c"]


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(SettingsError, match="lfu"):
        make_policy("lfu")
