"""From what a task or a setting names to a folder that may be read."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from lora_worker.adapters.reference import AdapterReference
from lora_worker.errors import InvalidAdapterError

# What of a folder or a repository is an adapter.
FILES = ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin")
HUB_ID = re.compile(r"(?P<repository>[\w.-]{1,96}/[\w.-]{1,96})(@(?P<revision>[\w./-]{1,128}))?")


def resolve_task_path(name: str, lora_path: str, roots: Sequence[Path], *, allow_hub: bool = False) -> Path:
    """The folder a task's `lora_path` means: absolute, or relative to a root, and under a root in every case.

    Whoever can write to Redis can send a path, so symbolic links are followed before the check, those of the files in
    the folder too. With `allow_hub` it may also be a hub's `OWNER/NAME` or `OWNER/NAME@REVISION`.
    """
    if not roots and not allow_hub:
        raise InvalidAdapterError(
            f"the adapter {name!r} cannot be loaded by a task: adapter_roots is empty; set it to the folders under "
            f"which adapters may lie"
        )
    for root in roots:
        found = _under_root(lora_path, root)
        if found is not None:
            _check_folder(name, found)
            _check_links(name, found, root.resolve())
            return found
    if allow_hub and HUB_ID.fullmatch(lora_path):
        return _from_hub(name, lora_path)
    listed = ", ".join(str(root) for root in roots) or "none is set"
    hub = ", or a hub's OWNER/NAME or OWNER/NAME@REVISION" if allow_hub else ""
    raise InvalidAdapterError(
        f"the path {lora_path[:200]!r} of the adapter {name!r} is no folder under adapter_roots ({listed}); "
        f"give a folder that lies under one of them{hub}"
    )


def resolve_operator_path(name: str, lora_path: str | None, roots: Sequence[Path], *, allow_hub: bool = False) -> Path:
    """The folder an entry of `lora_paths` or the Python engine means: any path, or the name under an adapter root."""
    candidates = [Path(lora_path)] if lora_path is not None else [root / name for root in roots]
    for candidate in candidates:
        if candidate.exists():
            _check_folder(name, candidate)
            return candidate.resolve()
    if allow_hub and lora_path is not None and HUB_ID.fullmatch(lora_path):
        return _from_hub(name, lora_path)
    looked = ", ".join(str(candidate) for candidate in candidates) or "nowhere, since adapter_roots is empty"
    raise InvalidAdapterError(f"the adapter {name!r} has no folder (looked at: {looked}); give the path of its folder")


def locate(reference: AdapterReference, roots: Sequence[Path], *, allow_hub: bool = False) -> Path:
    """The folder of a registered adapter on this machine; another worker's may have its roots elsewhere."""
    if reference.lora_path is None:
        return Path(reference.source)
    if any(_under_root(reference.source, root) for root in roots):
        return resolve_task_path(reference.name, reference.source, roots)
    return resolve_task_path(reference.name, reference.lora_path, roots, allow_hub=allow_hub)


def portable_path(lora_path: str | None, folder: Path, roots: Sequence[Path]) -> str:
    """What other workers are told of an adapter's place: relative to its root, a hub's id, or the folder itself.

    The hub's id has the commit that was read, by which its cache names the folder, whatever is pushed later.
    """
    for root in (root.resolve() for root in roots):
        if folder.is_relative_to(root):
            return str(folder.relative_to(root))
    hub_id = None if lora_path is None or Path(lora_path).exists() else HUB_ID.fullmatch(lora_path)
    return str(folder) if hub_id is None else f"{hub_id['repository']}@{folder.name}"


def _under_root(lora_path: str, root: Path) -> Path | None:
    try:
        found = (root / lora_path).resolve(strict=True)
    except (OSError, ValueError, RuntimeError):  # RuntimeError: a loop of links
        return None
    return found if found.is_relative_to(root.resolve()) else None


def _check_folder(name: str, folder: Path) -> None:
    if not folder.is_dir():
        raise InvalidAdapterError(
            f"{folder} of the adapter {name!r} is a file; archives are not opened: give the folder that PEFT's "
            f"save_pretrained wrote"
        )
    if not (folder / FILES[0]).is_file():
        raise InvalidAdapterError(
            f"{folder} is no adapter folder for {name!r}: it has no {FILES[0]}; "
            f"give a folder that PEFT's save_pretrained wrote"
        )


def _check_links(name: str, folder: Path, root: Path) -> None:
    for file in (folder / file_name for file_name in FILES):
        if file.is_symlink() and not file.resolve().is_relative_to(root):
            raise InvalidAdapterError(
                f"{file} of the adapter {name!r} is a link that leaves the adapter root {root}; copy the file there"
            )


def _from_hub(name: str, hub_id: str) -> Path:
    """The folder in the hub's cache; with HF_HUB_OFFLINE=1 only what is there already."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    found = HUB_ID.fullmatch(hub_id)
    assert found is not None
    try:
        folder = Path(snapshot_download(found["repository"], revision=found["revision"], allow_patterns=list(FILES)))
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise InvalidAdapterError(
            f"the adapter {name!r} could not be fetched from the hub as {hub_id}: {reason}"
        ) from None
    _check_folder(name, folder)
    return folder
