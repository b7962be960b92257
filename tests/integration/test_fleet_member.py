"""Leases, the ledger and restoring, between members in this process on a real Redis."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
from redis import Redis
from support.worker_process import wait_for

from lora_worker.embedded import EmbeddedServer
from lora_worker.errors import SettingsError
from lora_worker.fleet.connection import check_server
from lora_worker.fleet.keys import list_of
from lora_worker.fleet.membership.member import FleetMember
from lora_worker.settings import Settings

LEASE_SECONDS = 1.0
MESSAGE = '{"body": "W10=", "headers": {"empty": [], "id": "x"}, "properties": {}}'

Join = Callable[..., FleetMember]


@pytest.fixture
def redis(server: EmbeddedServer) -> Iterator[Redis]:
    with Redis(port=server.port, decode_responses=True) as connection:
        connection.flushdb()
        yield connection


@pytest.fixture
def join(server: EmbeddedServer, redis: Redis) -> Iterator[Join]:  # noqa: ARG001 - flushed before
    members = []

    def start(node: str, **settings: object) -> FleetMember:
        member = FleetMember(
            Settings(redis_url=server.url, **{"lease_seconds": LEASE_SECONDS, **settings}), f"{node}@host"
        )
        members.append(member)
        member.join()
        wait_for(lambda: member.members, "the member has looked around")
        return member

    yield start
    for member in members:
        with suppress(RuntimeError):
            member.leave()


def die(member: FleetMember) -> None:
    """End its threads as a kill would: nothing is given back."""
    member.lease.stop()
    member.steward.stop()
    member.unacknowledged.stop()


def claim(redis: Redis, member: FleetMember, tag: str, list_name: str = "lora.p03", message: str = MESSAGE) -> None:
    redis.hset(member.keys.unacked(member.worker_id), tag, f"{list_name}\n{message}")
    member.unacknowledged.add(tag)


def test_members_find_each_other_and_share_the_partitions(join: Join) -> None:
    one, two = join("one"), join("two")
    wait_for(lambda: one.members and len(one.members.ids) == 2, "each knows of the other")
    assert one.members
    assert two.members
    first, others = one.members.own_partitions(one.worker_id, one.keys)
    assert sorted(two.members.own_partitions(two.worker_id, two.keys)[0]) == sorted(others)
    assert sorted(first + others) == one.keys.partitions


def test_a_dead_member_s_messages_go_back_byte_for_byte_to_the_front_of_their_lists(join: Join, redis: Redis) -> None:
    one, two = join("one"), join("two")
    urgent = list_of("lora.p03", 0)
    redis.lpush(urgent, "waiting")
    claim(redis, two, "001-0000")
    claim(redis, two, "001-0001", message=MESSAGE.replace("x", "y"))
    two.unacknowledged.mark_started(["001-0001"])
    assert two.unacknowledged.flush(5)
    redis.lpush(two.keys.direct(two.worker_id), "direct")
    die(two)
    wait_for(lambda: two.worker_id not in redis.zrange(one.keys.workers, 0, -1), "it is taken off the books")
    first, second, third = (str(redis.rpop(urgent)) for _ in range(3))
    assert first == '{"lora_restored": 1, "lora_deaths": 0, ' + MESSAGE[1:]
    assert json.loads(second)["lora_deaths"] == 1
    assert third == "waiting"
    assert redis.lrange("lora", 0, -1) == ["direct"]
    assert not redis.keys("lora:*:" + two.worker_id)


@pytest.mark.parametrize("odd", [" \n" + MESSAGE, "no message of Celery's", ""])
def test_what_no_sender_of_ours_would_write_survives_its_worker_too(join: Join, redis: Redis, odd: str) -> None:
    join("one")
    two = join("two")
    claim(redis, two, "1", message=odd)
    die(two)
    found = str(wait_for(lambda: redis.lrange("lora.p03", 0, -1), "it is restored")[0])
    if odd.strip() == MESSAGE:
        assert json.loads(found)["lora_restored"] == 1
        assert found.endswith(MESSAGE[1:])
    else:
        assert found == odd


def test_what_nobody_knows_the_fate_of_comes_back_as_restored_so_that_its_result_is_looked_for(
    join: Join, redis: Redis
) -> None:
    one = join("one")
    restored = '{"lora_restored": 2, "lora_deaths": 1, ' + MESSAGE[1:]
    redis.hset(one.keys.unacked(one.worker_id), mapping={"1": f"lora.p03\n{MESSAGE}", "2": f"lora.p04\n{restored}"})
    one.give_back_unknown()
    assert one.unacknowledged.flush(5)
    assert redis.lrange("lora.p03", 0, -1) == ['{"lora_restored": 1, "lora_deaths": 0, ' + MESSAGE[1:]]
    assert redis.lrange("lora.p04", 0, -1) == [restored]


def test_deaths_add_up(join: Join, redis: Redis) -> None:
    one = join("one")
    for deaths in (1, 2):
        victim = join(f"victim{deaths}")
        claim(redis, victim, "1", message=str(redis.rpop("lora.p03") or MESSAGE))
        victim.unacknowledged.mark_started(["1"])
        assert victim.unacknowledged.flush(5)
        die(victim)
        wait_for(lambda: redis.llen("lora.p03"), "it is restored")
        assert json.loads(str(redis.lindex("lora.p03", 0)))["lora_deaths"] == deaths
    assert one.lease.is_certain


def test_a_member_whose_messages_were_restored_is_told_which(join: Join, redis: Redis) -> None:
    one, two = join("one"), join("two")
    foreign: list[set[str]] = []
    two.on_foreign = foreign.append
    claim(redis, two, "1")
    claim(redis, two, "2")
    redis.zadd(two.keys.workers, {two.worker_id: 0})  # a peer has begun
    redis.hdel(two.keys.unacked(two.worker_id), "1")
    wait_for(lambda: foreign, "it is told")
    assert foreign == [{"1"}]
    assert "2" in two.unacknowledged
    assert "1" not in two.unacknowledged
    assert not two.is_own("1", lambda: False)
    assert two.is_own("2", lambda: False)
    assert one.lease.dead == frozenset()


def test_what_is_settled_while_redis_is_away_is_written_when_it_is_back(redis: Redis) -> None:
    with EmbeddedServer() as server:
        member = FleetMember(Settings(redis_url=server.url, lease_seconds=LEASE_SECONDS), "one@host")
        member.join()
        wait_for(lambda: member.members, "the member has looked around")
        with Redis(port=server.port) as connection:
            claim(connection, member, "1")
            claim(connection, member, "2")
        server.stop()
        member.unacknowledged.acknowledge("1")
        member.unacknowledged.give_back("2")
        assert not member.unacknowledged.flush(0.2)
        server.start()
        assert member.unacknowledged.flush(30)
        with Redis(port=server.port, decode_responses=True) as connection:
            assert not connection.exists(member.keys.unacked(member.worker_id))
            assert connection.lrange("lora.p03", 0, -1) == [MESSAGE]
        member.leave()
    assert redis.ping()


def test_an_unexpected_error_does_not_end_the_writing_of_acknowledgements(
    join: Join, redis: Redis, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    member = join("one")
    claim(redis, member, "1")
    write, errors = member.unacknowledged._write, [ValueError("never seen before")]

    def fail_once(operations: Any) -> None:
        if errors:
            raise errors.pop()
        write(operations)

    monkeypatch.setattr(member.unacknowledged, "_write", fail_once)
    member.unacknowledged.acknowledge("1")
    wait_for(lambda: not redis.exists(member.keys.unacked(member.worker_id)), "it is written")
    assert "never seen before" in caplog.text


def test_a_redis_that_comes_back_empty_ends_no_row(join: Join, redis: Redis) -> None:
    member = join("one")
    foreign: list[set[str]] = []
    member.on_foreign = foreign.append
    claim(redis, member, "1")
    redis.flushdb()
    wait_for(lambda: redis.zscore(member.keys.workers, member.worker_id), "it has beaten again")
    first = redis.zscore(member.keys.workers, member.worker_id)
    wait_for(lambda: redis.zscore(member.keys.workers, member.worker_id) != first, "and again")
    assert not foreign
    assert member.is_own("1", lambda: False)
    assert member.held("1") is None


def test_a_forwarded_message_reaches_a_living_worker_only(join: Join, redis: Redis) -> None:
    one = join("one")
    claim(redis, one, "1")
    one.unacknowledged.forward("1", one.keys.direct("gone@host:1"), worker="gone@host:1")
    claim(redis, one, "2", message="two")
    one.unacknowledged.forward("2", one.keys.direct(one.worker_id), worker=one.worker_id)
    assert one.unacknowledged.flush(5)
    assert redis.lrange("lora.p03", 0, -1) == [MESSAGE]
    assert redis.lrange(one.keys.direct(one.worker_id), 0, -1) == ["two"]


def test_a_member_that_leaves_gives_back_what_it_holds_and_counts_no_death(join: Join, redis: Redis) -> None:
    one, two = join("one"), join("two")
    claim(redis, two, "1")
    two.unacknowledged.mark_started(["1"])
    two.leave()
    assert redis.lrange("lora.p03", 0, -1) == [MESSAGE]
    assert redis.zrange(one.keys.workers, 0, -1) == [one.worker_id]
    assert not redis.keys("lora:*:" + two.worker_id)


def test_a_draining_member_has_no_partitions(join: Join) -> None:
    one, two = join("one"), join("two")
    wait_for(lambda: one.members and len(one.members.ids) == 2, "each knows of the other")
    two.steward.drain()
    both = {one.worker_id, two.worker_id}

    def is_left_alone() -> bool:
        return one.members is not None and one.members.ids == both and one.members.takers == (one.worker_id,)

    wait_for(is_left_alone, "the other takes over")
    assert one.members
    assert len(one.members.own_partitions(one.worker_id, one.keys)[0]) == 64


def test_another_number_of_partitions_is_refused_with_a_sentence(join: Join, server: EmbeddedServer) -> None:
    join("one")
    other = FleetMember(Settings(redis_url=server.url, partitions=32), "two@host")
    with pytest.raises(SettingsError, match=r"64 partitions.*32.*set it to 64"):
        other.check()


def test_a_name_that_a_living_worker_has_is_refused_and_that_of_a_dead_one_is_waited_for(
    join: Join, server: EmbeddedServer, redis: Redis, caplog: pytest.LogCaptureFixture
) -> None:
    first = join("gpu0")
    again = FleetMember(Settings(redis_url=server.url, lease_seconds=LEASE_SECONDS), "gpu0@host")
    with pytest.raises(SettingsError, match=r"another worker .* called gpu0@host.*-n"):
        again.check_name()
    die(first)
    again.check_name()
    assert not redis.zrangebyscore(first.keys.workers, redis.time()[0] + redis.time()[1] / 1e6, "+inf")
    assert "waiting until that has ended" in caplog.text
    FleetMember(Settings(redis_url=server.url, lease_seconds=LEASE_SECONDS), "gpu1@host").check_name()


def test_a_lease_s_connection_that_broke_between_two_beats_counts_as_a_break(join: Join, redis: Redis) -> None:
    """Behind it may be another server, on which some of the messages in hand are not this worker's, or not there."""
    member = join("one")
    claim(redis, member, "1")
    found: list[set[str]] = []
    member.on_foreign = found.append
    redis.hdel(member.keys.unacked(member.worker_id), "1")
    connections: list[dict[str, str]] = redis.client_list()
    for connection in connections:
        if connection["id"] != str(redis.client_id()):
            redis.client_kill_filter(_id=connection["id"])
    wait_for(lambda: found, "it has looked what is its own")
    assert found == [{"1"}]


def test_what_peers_read_of_a_worker_does_not_grow_with_its_report(join: Join, redis: Redis) -> None:
    one, two = join("one"), join("two")
    two.descriptions.append(lambda: {"adapters": {f"a{i}": {} for i in range(1000)}, "resident": ["a1"]})
    two.report_now()
    wait_for(
        lambda: one.members and one.members.resident().get(two.worker_id) == frozenset({"a1"}), "the other has read it"
    )
    assert redis.hget(two.keys.worker(two.worker_id), "report")
    answer = one.steward._read_members(
        keys=[one.keys.workers, one.keys.fleet], args=[one.keys.worker("")], client=redis
    )
    assert len(str(answer)) < 1000


def test_a_cluster_and_a_sentinel_are_refused_with_a_sentence(redis: Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    check_server(redis)
    for mode, word in (("cluster", "Redis Cluster"), ("sentinel", "Redis Sentinel")):
        monkeypatch.setattr(redis, "info", lambda _, mode=mode: {"redis_mode": mode})
        with pytest.raises(SettingsError, match=word):
            check_server(redis)


def test_an_account_that_may_not_ask_what_the_server_is_is_served(server: EmbeddedServer, redis: Redis) -> None:
    redis.acl_setuser("lora", enabled=True, passwords=["+pw"], keys=["*"], channels=["*"], commands=["+@all", "-info"])
    url = server.url.replace("redis://", "redis://lora:pw@")
    member = FleetMember(Settings(redis_url=url, lease_seconds=LEASE_SECONDS), "one@host")
    member.check()
    member.join()
    wait_for(lambda: member.members, "the member has looked around")
    member.leave()


def test_an_old_redis_is_refused_with_a_sentence(redis: Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis, "info", lambda _: {"redis_version": "6.0.16"})
    with pytest.raises(SettingsError, match=r"6\.0\.16.*6\.2 or newer"):
        check_server(redis)
