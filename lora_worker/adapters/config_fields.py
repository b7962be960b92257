"""What each field of an adapter's configuration means to this engine: served, without effect, or refused by name.

A field that is in neither set must have PEFT's default (or, if this PEFT doesn't know it, an empty value), so that a
field of some future PEFT is refused and never dropped.
"""

from __future__ import annotations

import json
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from peft import LoraConfig
from peft.utils.other import get_pattern_key

from lora_worker.errors import InvalidAdapterError

CONFIG_FILE = "adapter_config.json"

SERVED = {
    "r": "rank of each pair",
    "lora_alpha": "with r, the scaling",
    "target_modules": "names, paths, a regular expression or all-linear, by PEFT's own matching",
    "exclude_modules": "names, paths or a regular expression, by PEFT's own matching",
    "fan_in_fan_out": "Conv1D of GPT-2; PEFT corrects it by itself",
    "use_rslora": "scaling by the root of the rank",
    "layers_to_transform": "by PEFT's own rules",
    "layers_pattern": "by PEFT's own rules",
    "bias": "biases of adapted linear modules that the file holds; a changed bias of another module is refused",
    "lora_bias": "the bias of the second matrix",
    "rank_pattern": "by PEFT's own matching; a pattern that matches nothing is a warning",
    "alpha_pattern": "by PEFT's own matching; a pattern that matches nothing is a warning",
}
# These act on training, on initialisation, or on nothing once the weights are saved.
WITHOUT_EFFECT = {
    "peft_type": "must be LORA",
    "peft_version": "says who wrote the file",
    "task_type": "says what it was trained for",
    "auto_mapping": "says which class it was trained on",
    "base_model_name_or_path": "a base of another name is a warning; shapes decide",
    "revision": "says which version of the base it was trained on",
    "inference_mode": "a worker does nothing else",
    "lora_dropout": "acts in training alone",
    "megatron_core": "matters where megatron_config is set, which is refused",
    "loftq_config": "acts on initialisation, which init_lora_weights decides",
    "eva_config": "acts on initialisation, which init_lora_weights decides",
    "corda_config": "acts on initialisation, which init_lora_weights decides",
    "lora_ga_config": "acts on initialisation, which init_lora_weights decides",
    "runtime_config": "how PEFT runs, not what it computes",
    "qalora_group_size": "matters where use_qalora is on, which is refused",
    "init_lora_weights": "served where it leaves the base model as it was, else refused",
}
# Every other field must have PEFT's default. Why, for those that this PEFT has:
REFUSED = {
    "modules_to_save": "whole modules are not part of the slots",
    "megatron_config": "another implementation of the layers",
    "trainable_token_indices": "changes rows of the embedding",
    "use_dora": "scales the base's own columns, per adapter",
    "velora_config": "another way of training, not tried",
    "alora_invocation_tokens": "acts from a token on, within a row",
    "use_qalora": "pools the input before the pair",
    "monteclora_config": "draws its weights anew",
    "layer_replication": "makes another base model",
    "target_parameters": "expert parameters are not linear modules",
    "use_bdlora": "block-diagonal matrices are another product",
    "arrow_config": "routes between adapters",
    "kasa_config": "another decomposition of the base",
    "ensure_weight_tying": "ties the adapters of tied layers in training, not tried",
}
# Initialisations that leave the base model as it is; the others (PiSSA, OLoRA, CorDA, LoftQ, ...) subtract from it.
HARMLESS_INITIALISATIONS = (True, False, None, "gaussian", "eva", "orthogonal")
REQUIRED = ("r", "target_modules")
# Far above what PEFT writes, and far below what would hurt.
MAX_BYTES = 4 * 1024**2
MAX_DEPTH = 32


def read_config(name: str, folder: Path) -> dict[str, Any]:
    """The checked content of `adapter_config.json`; InvalidAdapterError names the file, the field and the remedy."""
    file = folder / CONFIG_FILE
    config = _read_json(name, file)
    if not isinstance(config, dict):
        raise InvalidAdapterError(
            f"{file} of the adapter {name!r} is no JSON object; PEFT's save_pretrained writes one"
        )
    if config.get("peft_type") != "LORA":
        raise InvalidAdapterError(
            f"the adapter {name!r} has peft_type {config.get('peft_type')!r} in {file}; only 'LORA' is served"
        )
    _check_initialisation(name, config)
    for field, value in config.items():
        if field not in SERVED and field not in WITHOUT_EFFECT and not _is_default(field, value):
            raise InvalidAdapterError(
                f"the adapter {name!r} sets {field} to {str(value)[:120]}, which this worker cannot serve exactly; "
                f"only adapters without it are accepted"
            )
    for field in REQUIRED:
        if config.get(field) is None:
            raise InvalidAdapterError(f"{file} of the adapter {name!r} lacks the field {field!r}, which PEFT writes")
    return config


def to_lora_config(config: dict[str, Any]) -> LoraConfig:
    """PEFT's own configuration object, made of the served fields alone."""
    placing = {field: config[field] for field in SERVED if field in config and field != "bias"}
    return LoraConfig(**placing)


def fields_without_effect(config: dict[str, Any]) -> list[str]:
    """The fields that are set, differ from PEFT's default, and change nothing here."""
    bookkeeping = {"peft_type", "peft_version", "task_type", "inference_mode", "base_model_name_or_path", "revision"}
    candidates = set(WITHOUT_EFFECT) - bookkeeping
    return sorted(f for f in candidates if f in config and config[f] and not _is_default(f, config[f]))


def unmatched(config: dict[str, Any], paths: list[str]) -> list[str]:
    """Warnings of names and patterns that match none of the modules an adapter has been given, as PEFT matches them."""
    found = []
    targets = config["target_modules"]
    for target in targets if isinstance(targets, list) else []:
        if not any(path == target or path.endswith(f".{target}") for path in paths):
            found.append(f"target_modules names {target}, which matches no module")
    for field in ("rank_pattern", "alpha_pattern"):
        for pattern in config.get(field) or {}:
            if all(get_pattern_key([pattern], path) != pattern for path in paths):
                found.append(f"{field} has the pattern {pattern}, which matches no module")
    return found


def _read_json(name: str, file: Path) -> Any:
    try:
        with file.open("rb") as stream:
            content = stream.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise ValueError(f"it has more than {MAX_BYTES} bytes")
        found = json.loads(content)
        if _is_deeper(found, MAX_DEPTH):
            raise ValueError(f"it is more than {MAX_DEPTH} levels deep")
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidAdapterError(f"{file} of the adapter {name!r} cannot be read as JSON: {error}") from None
    return found


def _is_deeper(value: Any, levels: int) -> bool:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return any(levels == 0 or _is_deeper(each, levels - 1) for each in inner)


def _check_initialisation(name: str, config: dict[str, Any]) -> None:
    initialisation = config.get("init_lora_weights", True)
    if initialisation not in HARMLESS_INITIALISATIONS:
        raise InvalidAdapterError(
            f"the adapter {name!r} was initialised with {initialisation!r}, which changes the base model's weights, so "
            f"it is wrong on the original base; convert it with PEFT's "
            f"save_pretrained(path_initial_model_for_weight_conversion=...) and load the result"
        )


def _is_default(field: str, value: Any) -> bool:
    known = {f.name: f for f in fields(LoraConfig)}.get(field)
    if known is None:
        return not value
    default = known.default_factory() if known.default_factory is not MISSING else known.default
    return bool(value == default) or (not value and not default)


def decisions() -> list[tuple[str, str, str]]:
    """Every field of the installed PEFT's LoraConfig with what this worker does with it, and why."""
    rows = []
    for name in sorted(field.name for field in fields(LoraConfig)):
        for decision, reasons in (("served", SERVED), ("without effect", WITHOUT_EFFECT), ("refused", REFUSED)):
            if name in reasons:
                rows.append((name, decision, reasons[name]))
                break
        else:
            rows.append((name, "refused", "not known to this worker"))
    return rows


def decisions_table() -> str:
    """The same in Markdown, as `docs/adapters.md` has it."""
    lines = [f"| `{name}` | {decision} | {reason} |" for name, decision, reason in decisions()]
    return "\n".join(["| field | decision | why |", "|---|---|---|", *lines])
