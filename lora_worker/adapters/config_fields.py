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

from lora_worker.errors import InvalidAdapterError

SERVED = {
    "r",
    "lora_alpha",
    "target_modules",
    "exclude_modules",
    "fan_in_fan_out",
    "use_rslora",
    "layers_to_transform",
    "layers_pattern",
    "rank_pattern",
    "alpha_pattern",
}
# These act on training, on initialisation, or on nothing once the weights are saved.
WITHOUT_EFFECT = {
    "peft_type",
    "peft_version",
    "task_type",
    "auto_mapping",
    "base_model_name_or_path",
    "revision",
    "inference_mode",
    "lora_dropout",
    "megatron_core",
    "loftq_config",
    "eva_config",
    "corda_config",
    "lora_ga_config",
    "runtime_config",
    "qalora_group_size",
    "init_lora_weights",
}
# Initialisations that leave the base model as it is; the others (PiSSA, OLoRA, CorDA, LoftQ, ...) subtract from it.
HARMLESS_INITIALISATIONS = (True, False, None, "gaussian", "eva", "orthogonal")
REQUIRED = ("r", "target_modules")


def read_config(name: str, folder: Path) -> dict[str, Any]:
    """The checked content of `adapter_config.json`; InvalidAdapterError names the file, the field and the remedy."""
    file = folder / "adapter_config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidAdapterError(f"{file} of the adapter {name!r} cannot be read as JSON: {error}") from None
    if not isinstance(config, dict):
        raise InvalidAdapterError(
            f"{file} of the adapter {name!r} is no JSON object; PEFT's save_pretrained writes one"
        )
    if config.get("peft_type") != "LORA":
        raise InvalidAdapterError(
            f"the adapter {name!r} has peft_type {config.get('peft_type')!r} in {file}; only 'LORA' is served"
        )
    for field in REQUIRED:
        if config.get(field) is None:
            raise InvalidAdapterError(f"{file} of the adapter {name!r} lacks the field {field!r}, which PEFT writes")
    _check_initialisation(name, config)
    for field, value in config.items():
        if field not in SERVED and field not in WITHOUT_EFFECT and not _is_default(field, value):
            raise InvalidAdapterError(
                f"the adapter {name!r} sets {field} to {str(value)[:120]}, which this worker cannot serve exactly; "
                f"only adapters without it are accepted"
            )
    return config


def to_lora_config(config: dict[str, Any]) -> LoraConfig:
    """PEFT's own configuration object, made of the served fields alone."""
    return LoraConfig(**{field: config[field] for field in SERVED if field in config})


def fields_without_effect(config: dict[str, Any]) -> list[str]:
    """The fields that are set, differ from PEFT's default, and change nothing here."""
    bookkeeping = {"peft_type", "peft_version", "task_type", "inference_mode", "base_model_name_or_path", "revision"}
    candidates = WITHOUT_EFFECT - bookkeeping
    return sorted(f for f in candidates if f in config and config[f] and not _is_default(f, config[f]))


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
