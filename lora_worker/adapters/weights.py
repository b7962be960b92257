"""An adapter's tensors, each given its place."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

import torch

from lora_worker.errors import InvalidAdapterError

# PEFT saves `lora_A.weight`; some tools leave the adapter's name in the key, as PEFT has it while it trains.
_KEY = re.compile(
    r"(?P<path>.+)\.(?P<part>lora_[AB]|lora_embedding_[AB])(\.(?P<adapter>(?!weight$|bias$)[^.]+))?(\.(?P<kind>weight|bias))?"
)
PREFIX = "base_model.model."

# A parameter of the base model by its name there, on the CPU, or None.
BaseParameter = Callable[[str], torch.Tensor | None]


class Placement(NamedTuple):
    """Where PEFT puts one LoRA pair, and how. Of an embedding, `in_features` is the vocabulary."""

    rank: int
    scaling: float
    in_features: int
    out_features: int
    is_embedding: bool
    has_bias: bool

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The tensors that must be there."""
        kind, suffix = ("lora_embedding", "") if self.is_embedding else ("lora", ".weight")
        needed: dict[str, tuple[int, ...]] = {
            f"{kind}_A{suffix}": (self.rank, self.in_features),
            f"{kind}_B{suffix}": (self.out_features, self.rank),
        }
        return needed | ({"lora_B.bias": (self.out_features,)} if self.has_bias else {})


class Pair(NamedTuple):
    """One module's tensors as they were saved.

    `a` [R, H], `b` [O, R], `bias` [O] of the second matrix, `base_bias` [O] what has become of the base's own.
    """

    a: torch.Tensor
    b: torch.Tensor
    bias: torch.Tensor | None = None
    base_bias: torch.Tensor | None = None

    @property
    def numbers(self) -> int:
        """How many there are once the two biases are one."""
        biases = [bias.numel() for bias in (self.bias, self.base_bias) if bias is not None]
        return self.a.numel() + self.b.numel() + max(biases, default=0)


def match(
    name: str, placements: dict[str, Placement], tensors: dict[str, torch.Tensor], base_parameter: BaseParameter
) -> dict[str, Pair]:
    """Every placed module with its tensors, in a fixed order; nothing missing, nothing left over.

    Of tensors on the meta device the shapes alone are looked at.
    """
    keys = {key: found for key in tensors if (found := _KEY.fullmatch(key))}
    adapters = sorted({found["adapter"] or "default" for found in keys.values()})
    if len(adapters) > 1:
        raise InvalidAdapterError(
            f"the file of the adapter {name!r} holds several adapters ({', '.join(adapters)}); save each by itself"
        )
    others = {key: tensor for key, tensor in tensors.items() if key not in keys}
    base_biases = _changed_biases(name, placements, others, base_parameter)
    path_of = _path_form(name, placements, {key: found["path"] for key, found in keys.items()})
    placed = {(path_of(found["path"]), _part(found)): key for key, found in keys.items()}
    twice = sorted(set(keys) - set(placed.values()))
    if twice:
        raise InvalidAdapterError(
            f"the adapter {name!r} has more than one tensor for one place ({', '.join(twice[:3])}); write each once"
        )
    pairs = {}
    for path in sorted(placements):
        parts = []
        for part, shape in placements[path].shapes.items():
            key = placed.pop((path, part), None)
            if key is None:
                raise InvalidAdapterError(
                    f"the adapter {name!r} lacks the tensor {part} of {path}, which its configuration needs"
                )
            parts.append(_check_tensor(name, key, tensors[key], shape))
        pairs[path] = Pair(*parts)._replace(base_bias=base_biases.get(path))
    if placed:
        raise InvalidAdapterError(_without_place(name, sorted(placed.values())))
    return pairs


def _part(found: re.Match[str]) -> str:
    return f"{found['part']}.{found['kind']}" if found["kind"] else found["part"]


def _changed_biases(
    name: str,
    placements: dict[str, Placement],
    others: dict[str, torch.Tensor],
    base_parameter: BaseParameter,
) -> dict[str, torch.Tensor]:
    """What a file holds beside LoRA: the base's own parameters, unchanged, or biases of adapted linear modules.

    PEFT saves the whole matrix of an output layer or embedding that is a target, and with `bias` set every bias.
    """
    biases, strangers = {}, []
    for key, tensor in sorted(others.items()):
        parameter = key.removeprefix(PREFIX).replace(".base_layer.", ".")
        path, _, kind = parameter.rpartition(".")
        base = base_parameter(parameter)
        if base is None:
            strangers.append(key)
        elif base.shape != tensor.shape:
            raise InvalidAdapterError(
                f"the adapter {name!r} carries {key} with the shape {list(tensor.shape)}, but the base model's has "
                f"{list(base.shape)}; train on the base's own vocabulary, without resizing its embeddings"
            )
        elif tensor.is_meta or torch.equal(tensor.to(base.dtype), base):
            continue
        elif kind == "bias" and path in placements and not placements[path].is_embedding:
            biases[path] = tensor
        else:
            raise InvalidAdapterError(
                f"the adapter {name!r} carries its own {key}, which differs from the base model's; only LoRA matrices "
                f"and biases of the modules that they adapt are served"
            )
    if strangers:
        raise InvalidAdapterError(_without_place(name, strangers))
    return biases


def _path_form(name: str, placements: dict[str, Placement], paths: dict[str, str]) -> Callable[[str], str]:
    """How this file writes a module's path: the form by which every key has a place.

    PEFT writes `base_model.model.` in front; some tools leave it out, and models with a vision part call their text
    part `language_model`.
    """

    def without_prefix(path: str) -> str:
        return path.removeprefix(PREFIX)

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


def _check_tensor(name: str, key: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
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
