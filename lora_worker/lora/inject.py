"""Put the layers into a loaded model."""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from lora_worker.errors import SettingsError
from lora_worker.lora.layer import LoraEmbedding, LoraLayer, LoraLinear, LoraStep


def inject_lora(model: PreTrainedModel, target_modules: list[str]) -> tuple[dict[str, LoraLayer], LoraStep]:
    """Replace every module that adapters may target; returns the layers by module path, and what they look at.

    `target_modules` holds module names or ends of paths; 'all-linear' is every linear module, and besides the output
    layer and the input embedding, whose slots take no memory until an adapter targets them.
    """
    step = LoraStep()
    layers: dict[str, LoraLayer] = {}
    output = model.get_output_embeddings()
    for path, base in targetable(model, target_modules).items():
        layer: LoraLayer
        shape = _shape(base)
        if shape is not None:
            layer = LoraLinear(base, in_features=shape[0], out_features=shape[1], step=step, is_output=base is output)
        else:
            assert isinstance(base, nn.Embedding), f"{path} is neither linear nor an embedding"
            layer = LoraEmbedding(base, step)
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, layer)
        layers[path] = layer
    return layers, step


def targetable(model: PreTrainedModel, target_modules: list[str]) -> dict[str, nn.Module]:
    """The modules that adapters may target, by path: linear ones, and the input embedding.

    `target_modules` is the setting `lora_target_modules`; SettingsError where it names what the model hasn't.
    """
    embedding = model.get_input_embeddings()
    found = {
        path: module
        for path, module in model.named_modules()
        if _shape(module) is not None or (module is embedding and type(module) is nn.Embedding)
    }
    unmatched = [t for t in target_modules if t != "all-linear" and not any(_is_target(path, [t]) for path in found)]
    if unmatched:
        known = ", ".join(sorted({path.rpartition(".")[2] for path in found}))
        raise SettingsError(
            f"lora_target_modules names {', '.join(unmatched)}, but the base model has no such linear module; "
            f"leave it at all-linear, or name modules such as {known}"
        )
    return {path: module for path, module in found.items() if _is_target(path, target_modules)}


def _is_target(path: str, target_modules: list[str]) -> bool:
    return any(target in ("all-linear", path) or path.endswith(f".{target}") for target in target_modules)


def _shape(module: nn.Module) -> tuple[int, int] | None:
    """In and out of a linear module of the kinds PEFT adapts, or None."""
    if type(module) is nn.Linear:
        return module.in_features, module.out_features
    if type(module) is Conv1D:
        return module.weight.shape[0], module.weight.shape[1]
    return None
