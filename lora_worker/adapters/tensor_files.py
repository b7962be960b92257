"""The tensors of an adapter's file, read into memory of the worker's own.

Nothing is mapped: a file that is written over would change what is served, and one that is cut off would end the
process. The header is read first, so that a file that is refused by its shapes is never read whole.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load

from lora_worker.errors import InvalidAdapterError

SAFETENSORS, PICKLED = "adapter_model.safetensors", "adapter_model.bin"
HEADER_BYTES = 100_000_000  # safetensors' own bound

Tensors = dict[str, torch.Tensor]


def read_shapes(name: str, folder: Path) -> Tensors:
    """The tensors of the adapter's file without their content, on the meta device; errors as `read_tensors`."""
    return _read(name, folder, "meta")


def read_tensors(name: str, folder: Path) -> Tensors:
    """The tensors of safetensors or, of a pickle, tensors alone; InvalidAdapterError for anything else."""
    return _read(name, folder, "cpu")


def _read(name: str, folder: Path, device: str) -> Tensors:
    file = next((file for file in (folder / SAFETENSORS, folder / PICKLED) if file.is_file()), None)
    if file is None:
        raise InvalidAdapterError(f"{folder} of the adapter {name!r} has no {SAFETENSORS}")
    try:
        if file.name == SAFETENSORS:
            return _shapes(file) if device == "meta" else load(file.read_bytes())
        return _unpickle(name, file, device)
    # The last three are of a header that is no header, or of a type that safetensors' torch part doesn't know.
    except (SafetensorError, OSError, EOFError, MemoryError, ValueError, KeyError, RecursionError) as error:
        reason = str(error) or type(error).__name__
        raise InvalidAdapterError(f"the weights of the adapter {name!r} in {folder} cannot be read: {reason}") from None


def _shapes(file: Path) -> Tensors:
    """What the header of a safetensors file says; whatever else is wrong with it is found when it is read whole."""
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if length > HEADER_BYTES:
            raise SafetensorError(f"its header would have {length} bytes")
        header = json.loads(stream.read(length))
    try:
        entries = {key: entry for key, entry in header.items() if key != "__metadata__"}
        size = 8 + length + max((entry["data_offsets"][1] for entry in entries.values()), default=0)
        shapes = {key: torch.empty(entry["shape"], device="meta") for key, entry in entries.items()}
    except (TypeError, AttributeError, IndexError, RuntimeError):
        raise SafetensorError("its header is none of safetensors'") from None
    if file.stat().st_size != size:
        raise SafetensorError(f"it has {file.stat().st_size} bytes, and by its header {size}")
    return shapes


def _unpickle(name: str, file: Path, device: str) -> Tensors:
    try:
        loaded = torch.load(file, map_location=device, weights_only=True)
    except (OSError, EOFError, MemoryError):
        raise
    except Exception as error:  # an unpickler raises errors of many classes; none of them has executed anything
        raise InvalidAdapterError(f"{file} of the adapter {name!r} holds more than tensors: {error}") from None
    if not isinstance(loaded, dict) or not all(isinstance(key, str) for key in loaded):
        raise InvalidAdapterError(f"{file} of the adapter {name!r} holds no mapping of names to tensors")
    for key, tensor in loaded.items():
        if not isinstance(tensor, torch.Tensor):
            raise InvalidAdapterError(f"{file} of the adapter {name!r} holds no mapping of names to tensors")
        if tensor.layout != torch.strided or tensor.is_nested or tensor.device.type != device:
            raise InvalidAdapterError(
                f"the tensor {key} of the adapter {name!r} in {file} is sparse, nested or without content; save it as "
                f"an ordinary tensor"
            )
    return {key: tensor.detach() for key, tensor in loaded.items()}
