"""Put the layers into a loaded model."""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from lora_worker.errors import SettingsError
from lora_worker.lora.layer import LoraLinear, LoraStep


def inject_lora(model: PreTrainedModel, target_modules: list[str]) -> tuple[dict[str, LoraLinear], LoraStep]:
    """Replace every targeted linear module by a LoraLinear; returns them by module path, and what they look at.

    `target_modules` holds module names or ends of paths; 'all-linear' is every linear module but the output layer.
    """
    step = LoraStep()
    layers: dict[str, LoraLinear] = {}
    for path, (in_features, out_features) in targetable(model, target_modules).items():
        base = model.get_submodule(path)
        layer = LoraLinear(base, in_features=in_features, out_features=out_features, step=step)
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, layer)
        layers[path] = layer
    return layers, step


def targetable(model: PreTrainedModel, target_modules: list[str]) -> dict[str, tuple[int, int]]:
    """The linear modules that adapters may target, by path, with their in and out features.

    `target_modules` is the setting `lora_target_modules`; SettingsError where it names what the model hasn't.
    """
    linear = {
        path: shape
        for path, module in model.named_modules()
        if module is not model.get_output_embeddings() and (shape := _shape(module)) is not None
    }
    unmatched = [t for t in target_modules if t != "all-linear" and not any(_is_target(path, [t]) for path in linear)]
    if unmatched:
        known = ", ".join(sorted({path.rpartition(".")[2] for path in linear}))
        raise SettingsError(
            f"lora_target_modules names {', '.join(unmatched)}, but the base model has no such linear module; "
            f"leave it at all-linear, or name modules such as {known}"
        )
    return {path: shape for path, shape in linear.items() if _is_target(path, target_modules)}


def _is_target(path: str, target_modules: list[str]) -> bool:
    return any(target in ("all-linear", path) or path.endswith(f".{target}") for target in target_modules)


def _shape(module: nn.Module) -> tuple[int, int] | None:
    """In and out of a linear module of the kinds PEFT adapts, or None."""
    if type(module) is nn.Linear:
        return module.in_features, module.out_features
    if type(module) is Conv1D:
        return module.weight.shape[0], module.weight.shape[1]
    return None
