"""An adapter's tensors: read from its folder, and each given its place."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from lora_worker.errors import InvalidAdapterError

SAFETENSORS, PICKLED = "adapter_model.safetensors", "adapter_model.bin"

# PEFT saves `lora_A.weight`; some tools leave the adapter's name in the key, as PEFT has it while it trains.
_KEY = re.compile(r"(?P<path>.+)\.(?P<part>lora_[AB])(\.(?P<adapter>[^.]+))?\.weight")
# Whole matrices that PEFT saves beside an adapter when the vocabulary was resized or they were targets.
_WHOLE_MATRIX = re.compile(r"(.*\.)?(embed_tokens|wte|embed_in|word_embeddings|lm_head|embed_out)\.weight")


class Placement(NamedTuple):
    """Where PEFT puts one LoRA pair, and how."""

    rank: int
    scaling: float
    in_features: int
    out_features: int


class Pair(NamedTuple):
    """One module's tensors as they were saved: `a` [R, H], `b` [O, R]."""

    a: torch.Tensor
    b: torch.Tensor


def read_tensors(name: str, folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of safetensors or, of a pickle, tensors alone; InvalidAdapterError for anything else."""
    safe, pickled = folder / SAFETENSORS, folder / PICKLED
    try:
        if safe.is_file():
            return load_file(safe)
        if not pickled.is_file():
            raise InvalidAdapterError(f"{folder} of the adapter {name!r} has no {SAFETENSORS}")
        loaded = torch.load(pickled, map_location="cpu", weights_only=True)
    except InvalidAdapterError:
        raise
    except (SafetensorError, OSError, EOFError) as error:
        raise InvalidAdapterError(f"the weights of the adapter {name!r} in {folder} cannot be read: {error}") from None
    except Exception as error:  # an unpickler raises errors of many classes; none of them has executed anything
        raise InvalidAdapterError(f"{pickled} of the adapter {name!r} holds more than tensors: {error}") from None
    if isinstance(loaded, dict) and all(isinstance(tensor, torch.Tensor) for tensor in loaded.values()):
        return loaded
    raise InvalidAdapterError(f"{pickled} of the adapter {name!r} holds no mapping of names to tensors")


def match(
    name: str, placements: dict[str, Placement], tensors: dict[str, torch.Tensor], *, vocabulary: int
) -> dict[str, Pair]:
    """Every placed module with its two tensors, in a fixed order; nothing missing, nothing left over."""
    for key, tensor in tensors.items():
        if _WHOLE_MATRIX.fullmatch(key):
            raise InvalidAdapterError(
                f"the adapter {name!r} carries a whole matrix {key} with {tensor.shape[0]} rows for the base model's "
                f"vocabulary of {vocabulary}, which this worker cannot serve; train on the base's own vocabulary, and "
                f"save with save_embedding_layers=False"
            )
    keys = {key: found for key in tensors if (found := _KEY.fullmatch(key))}
    strangers = sorted(set(tensors) - set(keys))
    if strangers:
        raise InvalidAdapterError(_without_place(name, strangers))
    adapters = sorted({found["adapter"] or "default" for found in keys.values()})
    if len(adapters) > 1:
        raise InvalidAdapterError(
            f"the file of the adapter {name!r} holds several adapters ({', '.join(adapters)}); save each by itself"
        )
    path_of = _path_form(name, placements, {key: found["path"] for key, found in keys.items()})
    placed = {(path_of(found["path"]), found["part"]): key for key, found in keys.items()}
    pairs = {}
    for path in sorted(placements):
        found_pair = []
        for part, shape in _shapes(placements[path]).items():
            place = placed.get((path, part))
            if place is None:
                raise InvalidAdapterError(
                    f"the adapter {name!r} lacks the tensor {part} of {path}, which its target_modules need"
                )
            found_pair.append(_check_tensor(name, place, tensors[place], shape))
        pairs[path] = Pair(*found_pair)
    return pairs


def _shapes(placement: Placement) -> dict[str, tuple[int, int]]:
    return {
        "lora_A": (placement.rank, placement.in_features),
        "lora_B": (placement.out_features, placement.rank),
    }


def _path_form(name: str, placements: dict[str, Placement], paths: dict[str, str]) -> Callable[[str], str]:
    """How this file writes a module's path: the form by which every key has a place.

    PEFT writes `base_model.model.` in front; some tools leave it out, and models with a vision part call their text
    part `language_model`.
    """

    def without_prefix(path: str) -> str:
        return path.removeprefix("base_model.model.")

    def without_wrapper(path: str) -> str:
        return without_prefix(path).replace("language_model.", "", 1)

    def model_wrapper(path: str) -> str:
        return f"model.{without_wrapper(path)}"

    forms: list[Callable[[str], str]] = [without_prefix, without_wrapper, model_wrapper]
    unplaced: list[list[str]] = [[key for key, path in paths.items() if form(path) not in placements] for form in forms]
    for form, left in zip(forms, unplaced, strict=True):
        if not left:
            return form
    fewest = sorted(unplaced, key=len)[0]
    raise InvalidAdapterError(_without_place(name, sorted(fewest)))


def _without_place(name: str, keys: list[str]) -> str:
    return (
        f"the adapter {name!r} has {len(keys)} tensors that its configuration gives no place on this base model "
        f"(first: {', '.join(keys[:3])}); nothing of an adapter is dropped in silence"
    )


def _check_tensor(name: str, key: str, tensor: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    if tuple(tensor.shape) != shape:
        raise InvalidAdapterError(
            f"the tensor {key} of the adapter {name!r} has the shape {list(tensor.shape)}; "
            f"this base model and the adapter's rank need {list(shape)}"
        )
    if not tensor.is_floating_point() or tensor.element_size() < 2:
        raise InvalidAdapterError(
            f"the tensor {key} of the adapter {name!r} is {tensor.dtype}; 16, 32 and 64 bit floats are served"
        )
    return tensor
