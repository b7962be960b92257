"""Where an adapter may be read from."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from lora_worker.adapters.reference import AdapterReference, LoadReport
from lora_worker.adapters.source import locate, portable_path, resolve_operator_path, resolve_task_path
from lora_worker.errors import InvalidAdapterError

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    make_folder(tmp_path / "root" / "good")
    make_folder(tmp_path / "outside")
    return tmp_path / "root"


def make_folder(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text("{}")
    (folder / "adapter_model.safetensors").write_bytes(b"")
    return folder


def test_a_path_under_a_root_is_found_absolute_or_relative(root: Path, tmp_path: Path) -> None:
    expected = (root / "good").resolve()
    for path in ("good", "./good", "../root/good", str(root / "good")):
        assert resolve_task_path("x", path, [tmp_path / "missing", root]) == expected


@pytest.mark.parametrize("path", ["../outside", "/etc", "", ".", "nothing", "good/adapter_config.json/x", "a\0b"])
def test_a_path_elsewhere_is_refused(root: Path, path: str) -> None:
    with pytest.raises(InvalidAdapterError, match="'x'"):
        resolve_task_path("x", path, [root])


def test_without_roots_every_task_path_is_refused() -> None:
    with pytest.raises(InvalidAdapterError, match="adapter_roots is empty"):
        resolve_task_path("x", "/etc", [])


def test_links_that_leave_the_root_are_refused(root: Path, tmp_path: Path) -> None:
    (root / "link").symlink_to(tmp_path / "outside")
    (root / "inside").symlink_to(root / "good")
    (root / "loop").symlink_to(root / "loop")
    linked = make_folder(root / "linked")
    (linked / "adapter_model.safetensors").unlink()
    (linked / "adapter_model.safetensors").symlink_to(tmp_path / "outside" / "adapter_model.safetensors")
    assert resolve_task_path("x", "inside", [root]) == (root / "good").resolve()
    for path in ("link", "loop"):
        with pytest.raises(InvalidAdapterError, match="no folder under adapter_roots"):
            resolve_task_path("x", path, [root])
    with pytest.raises(InvalidAdapterError, match="leaves the adapter root"):
        resolve_task_path("x", "linked", [root])


def test_archives_are_not_opened(root: Path) -> None:
    with zipfile.ZipFile(root / "adapter.zip", "w") as archive:
        archive.writestr("adapter_config.json", "{}")
    with pytest.raises(InvalidAdapterError, match="archives are not opened"):
        resolve_task_path("x", "adapter.zip", [root])


def test_the_operator_may_name_any_folder_or_a_name_under_a_root(root: Path, tmp_path: Path) -> None:
    assert resolve_operator_path("x", str(tmp_path / "outside"), []) == (tmp_path / "outside").resolve()
    assert resolve_operator_path("good", None, [root]) == (root / "good").resolve()
    with pytest.raises(InvalidAdapterError, match="nowhere"):
        resolve_operator_path("good", None, [])


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A hub's cache as huggingface_hub lays it out, with one repository, and no way to any hub."""
    cache = tmp_path / "hub"
    repository = cache / "models--owner--name"
    snapshot = make_folder(repository / "snapshots" / COMMIT)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return snapshot


def test_a_hub_id_is_found_in_the_cache_where_it_is_allowed(hub_cache: Path, root: Path) -> None:
    for hub_id in ("owner/name", "owner/name@main", f"owner/name@{COMMIT}"):
        assert resolve_task_path("x", hub_id, [root], allow_hub=True).samefile(hub_cache)
        assert resolve_operator_path("x", hub_id, [], allow_hub=True).samefile(hub_cache)
    with pytest.raises(InvalidAdapterError, match="no folder under adapter_roots"):
        resolve_task_path("x", "owner/name", [root])


@pytest.mark.usefixtures("hub_cache")
def test_what_the_hub_has_not_is_one_sentence(root: Path) -> None:
    for hub_id in ("owner/other", "owner/name@v2"):
        with pytest.raises(InvalidAdapterError, match=f"could not be fetched from the hub as {hub_id}") as caught:
            resolve_task_path("x", hub_id, [root], allow_hub=True)
        assert "\n" not in str(caught.value)


def registered(source: Path, lora_path: str | None) -> AdapterReference:
    report = LoadReport("x", str(source), "d", [8], [1.0], 1, 1)
    return AdapterReference(
        "x", str(source), "d", 8, has_bias=False, nbytes=1, pinned=False, report=report, lora_path=lora_path
    )


def test_what_another_worker_registered_is_found_under_this_ones_roots_and_nowhere_else(
    root: Path, tmp_path: Path
) -> None:
    other = make_folder(tmp_path / "other" / "good")
    told = portable_path("good", other, [tmp_path / "other"])
    assert told == "good"
    assert locate(registered(other, told), [root]) == root / "good"
    # The same place on this machine comes before the same path under another root.
    assert locate(registered(other, told), [root, tmp_path / "other"]) == other
    outside = tmp_path / "outside"
    assert portable_path(str(outside), outside, [root]) == str(outside)
    with pytest.raises(InvalidAdapterError, match="adapter_roots"):
        locate(registered(outside, str(outside)), [root])
    # This worker's own settings named it.
    assert locate(registered(outside, None), [root]) == outside


@pytest.mark.parametrize("hub_id", ["owner/name", "owner/name@main", f"owner/name@{COMMIT}"])
def test_a_hubs_adapter_is_registered_by_the_commit_that_was_read(hub_id: str, hub_cache: Path, tmp_path: Path) -> None:
    """What is pushed later doesn't change what the name stands for, on any worker."""
    told = portable_path(hub_id, resolve_task_path("x", hub_id, [], allow_hub=True), [])
    assert told == f"owner/name@{COMMIT}"
    (hub_cache.parents[1] / "refs" / "main").write_text("f" * 40)
    make_folder(hub_cache.parent / ("f" * 40))
    assert locate(registered(tmp_path / "elsewhere", told), [], allow_hub=True).samefile(hub_cache)
