"""From what a task or a setting names to a folder that may be read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lora_worker.errors import InvalidAdapterError


def resolve_task_path(name: str, lora_path: str, roots: Sequence[Path]) -> Path:
    """The folder a task's `lora_path` means: absolute, or relative to a root, and under a root in every case.

    Whoever can write to Redis can send a path, so symbolic links are followed before the check.
    """
    if not roots:
        raise InvalidAdapterError(
            f"the adapter {name!r} cannot be loaded by a task: adapter_roots is empty; set it to the folders under "
            f"which adapters may lie"
        )
    for root in roots:
        try:
            folder = (root / lora_path).resolve(strict=True)
        except (OSError, ValueError, RuntimeError):  # RuntimeError: a loop of links
            continue
        if folder.is_relative_to(root.resolve()):
            return _check_folder(name, folder)
    listed = ", ".join(str(root) for root in roots)
    raise InvalidAdapterError(
        f"the path {lora_path[:200]!r} of the adapter {name!r} is no folder under adapter_roots ({listed}); "
        f"give a folder that lies under one of them"
    )


def resolve_operator_path(name: str, lora_path: str | None, roots: Sequence[Path]) -> Path:
    """The folder an entry of `lora_paths` or the Python engine means: any path, or the name under an adapter root."""
    candidates = [Path(lora_path)] if lora_path is not None else [root / name for root in roots]
    for candidate in candidates:
        if candidate.is_dir():
            return _check_folder(name, candidate.resolve())
    looked = ", ".join(str(candidate) for candidate in candidates) or "nowhere, since adapter_roots is empty"
    raise InvalidAdapterError(f"the adapter {name!r} has no folder (looked at: {looked}); give the path of its folder")


def _check_folder(name: str, folder: Path) -> Path:
    if not (folder / "adapter_config.json").is_file():
        raise InvalidAdapterError(
            f"{folder} is no adapter folder for {name!r}: it has no adapter_config.json; "
            f"give a folder that PEFT's save_pretrained wrote"
        )
    return folder
