"""Settings: the names, the sources, and one sentence for whatever is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lora_worker.errors import SettingsError
from lora_worker.settings import Settings, explain


def test_sources_win_in_their_order(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    toml = tmp_path / "worker.toml"
    toml.write_text('max_lora_rank = 8\ndrain_seconds = 3\nqueue_prefix = "toml"\nlora_paths = ["a=/a"]\n')
    (tmp_path / ".env").write_text("LORA_WORKER_QUEUE_PREFIX=dotenv\nLORA_WORKER_DRAIN_SECONDS=4\nOTHER_THING=1\n")
    monkeypatch.setenv("LORA_WORKER_CONFIG", str(toml))
    monkeypatch.setenv("LORA_WORKER_DRAIN_SECONDS", "5")
    settings = Settings()
    assert (settings.max_lora_rank, settings.queue_prefix, settings.drain_seconds) == (8, "dotenv", 5)
    assert Settings(drain_seconds=6).drain_seconds == 6
    sources = {row.name: row.source for row in explain(settings)}
    assert sources["max_lora_rank"] == f"file {toml}"
    assert sources["queue_prefix"] == ".env"
    assert sources["drain_seconds"] == "environment LORA_WORKER_DRAIN_SECONDS"
    assert sources["dtype"] == "default"


def test_lora_paths_take_three_forms(monkeypatch: pytest.MonkeyPatch) -> None:
    entries: list[Any] = ["alone", "named=/some/path", {"lora_name": "full", "lora_path": "/p", "pinned": True}]
    expected = [("alone", None, False), ("named", "/some/path", False), ("full", "/p", True)]
    found = Settings(lora_paths=entries).lora_paths
    assert [(e.lora_name, e.lora_path, e.pinned) for e in found] == expected
    monkeypatch.setenv("LORA_WORKER_LORA_PATHS", "alone, named=/some/path")
    assert [(e.lora_name, e.lora_path) for e in Settings().lora_paths] == [("alone", None), ("named", "/some/path")]
    json = '["alone", "named=/some/path", {"lora_name": "full", "lora_path": "/p", "pinned": true}]'
    monkeypatch.setenv("LORA_WORKER_LORA_PATHS", json)
    assert [(e.lora_name, e.lora_path, e.pinned) for e in Settings().lora_paths] == expected


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"LORA_WORKER_MAX_LORA_RANKS": "8"}, ["LORA_WORKER_MAX_LORA_RANKS", "LORA_WORKER_MAX_LORA_RANK?"]),
        ({"LORA_WORKER_MAX_LORA_RANK": "many"}, ["max_lora_rank", "LORA_WORKER_MAX_LORA_RANK", "'many'", "integer"]),
        ({"LORA_WORKER_LORA_EVICTION_POLICY": "lfu"}, ["lora_eviction_policy", "'lfu'", "lru", "fifo"]),
        ({"LORA_WORKER_DEVICE": "gpu"}, ["device", "'gpu'"]),
        ({"LORA_WORKER_REDIS_URL": "http://:hush@host"}, ["redis_url", "redis://"]),
        ({"LORA_WORKER_REDIS_URL": "sentinel://host:26379"}, ["Redis Sentinel is not supported", "one Redis server"]),
        ({"LORA_WORKER_LORA_PATHS": "bad name=/x"}, ["bad name", "1 to 128"]),
        ({"LORA_WORKER_LORA_PATHS": "a=/x,a=/y"}, ["'a'", "more than once"]),
        ({"LORA_WORKER_LORA_PATHS": "[1"}, ["lora_paths", "JSON"]),
        ({"LORA_WORKER_CONFIG": "/nowhere.toml"}, ["/nowhere.toml", "does not exist"]),
        (
            {
                "LORA_WORKER_LORA_PATHS": '{"lora_name": "a", "pinned": true}',
                "LORA_WORKER_MAX_LORAS_PER_BATCH": "1",
            },
            ["pins 1", "at least 2"],
        ),
    ],
)
def test_a_wrong_value_is_one_sentence_that_names_it(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], words: list[str]
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SettingsError) as caught:
        Settings()
    for word in words:
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "hush" not in str(caught.value)


def test_an_unknown_toml_key_is_refused_with_the_nearest_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "worker.toml").write_text("max_lora_rnak = 8\n")
    monkeypatch.setenv("LORA_WORKER_CONFIG", str(tmp_path / "worker.toml"))
    with pytest.raises(SettingsError, match=r"max_lora_rnak.*max_lora_rank\?"):
        Settings()
    (tmp_path / "worker.toml").write_text("max_lora_rank = \n")
    with pytest.raises(SettingsError, match="TOML"):
        Settings()


def test_the_password_is_never_shown() -> None:
    settings = Settings(redis_url="redis://:hush@host:6379/0")
    shown = {row.name: row.value for row in explain(settings)}
    assert shown["redis_url"] == "redis://***@host:6379/0"
    assert "hush" not in str(shown)


@pytest.mark.parametrize(
    "url",
    [
        "redis://:hush@[::1/0",
        "redis://:hu/hush@host:6379/0",
        "redis://:hush#1@host:6379/0",
        "redis://:12?hush@host:6379/0",
        "redis://me:hush@host:port/0",
        "redis://:hush@host@host:99999/0",
        "redis://:hush@/0",
    ],
)
def test_a_url_that_can_t_be_read_is_refused_with_one_sentence_and_without_its_password(url: str) -> None:
    with pytest.raises(SettingsError) as caught:
        Settings(redis_url=url)
    sentence = str(caught.value)
    assert "redis_url" in sentence
    assert "redis://[:PASSWORD@]HOST:PORT/DB" in sentence
    assert "hush" not in sentence


def test_the_documented_file_holds_every_setting_with_its_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """config/worker.toml has each setting once, commented out where it has no default, and changes nothing."""
    path = Path(__file__).parents[2] / "config" / "worker.toml"
    names = [
        line.removeprefix("# ").split(" = ")[0]
        for line in path.read_text().splitlines()
        if " = " in line and line.removeprefix("# ").split(" = ")[0].isidentifier()
    ]
    assert sorted(names) == sorted(Settings.model_fields)
    monkeypatch.setenv("LORA_WORKER_CONFIG", str(path))
    assert Settings().model_dump() == Settings.model_construct().model_dump()
