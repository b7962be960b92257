"""What is served is what was read: whatever becomes of an adapter's files afterwards, and however large they are."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from lora_worker.engine import Engine
from lora_worker.errors import InvalidAdapterError

BODY = {"prompt": [4, 5], "max_tokens": 8, "temperature": 0, "ignore_eos": True}


@pytest.mark.parametrize("becomes", ["another adapter's", "empty"])
def test_a_file_that_is_written_over_in_place_changes_nothing_that_was_read(
    becomes: str, make_engine: Callable[..., Engine], paths: dict[str, Path], tmp_path: Path
) -> None:
    """In the dtype of the file, where nothing has to be cast."""
    folder = tmp_path / "changing"
    shutil.copytree(paths["attention"], folder)
    engine = make_engine(dtype="float32", max_loras_per_batch=1, lora_paths=[f"a={folder}", f"b={paths['mlp']}"])
    before = engine.generate([{**BODY, "model": "a"}])
    engine.generate([{**BODY, "model": "b"}])
    content = (paths["mlp"] / "adapter_model.safetensors").read_bytes() if becomes == "another adapter's" else b""
    (folder / "adapter_model.safetensors").write_bytes(content)
    assert engine.generate([{**BODY, "model": "a"}])[0]["choices"] == before[0]["choices"]  # type: ignore[index]
    assert engine.info()["pool"]["reads_from_files"]["count"] == 0


def test_an_adapter_takes_the_memory_that_is_counted(
    make_engine: Callable[..., Engine], paths: dict[str, Path], tmp_path: Path
) -> None:
    """Also where the file's tensors are views of a larger one, as a pickle's may be."""
    folder = tmp_path / "viewing"
    shutil.copytree(paths["attention"], folder)
    tensors = load_file(folder / "adapter_model.safetensors")
    (folder / "adapter_model.safetensors").unlink()
    for key, tensor in tensors.items():
        large = torch.zeros(100_000)
        large[: tensor.numel()] = tensor.flatten()
        tensors[key] = large[: tensor.numel()].view_as(tensor)
    torch.save(tensors, folder / "adapter_model.bin")
    engine = make_engine(dtype="float32", lora_paths=[f"a={folder}"])
    (adapter,) = engine._core.adapters.cache._adapters.values()
    kept = {part.untyped_storage() for pair in adapter.pairs.values() for part in pair if part is not None}
    held = {storage.data_ptr(): storage.nbytes() for storage in kept}
    assert sum(held.values()) == adapter.nbytes == engine.info()["pool"]["cached_bytes"]


def test_a_file_is_not_read_whole_where_its_header_is_refused(
    make_engine: Callable[..., Engine], paths: dict[str, Path], tmp_path: Path
) -> None:
    """A terabyte that is not there: to read it would fail."""
    folder = tmp_path / "giant"
    shutil.copytree(paths["attention"], folder)
    size = 10**12
    header = json.dumps({"stranger": {"dtype": "F32", "shape": [size // 4], "data_offsets": [0, size]}}).encode()
    with (folder / "adapter_model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + size)
    with pytest.raises(InvalidAdapterError, match="stranger"):
        make_engine().load_lora_adapter("giant", str(folder))
