"""What a worker would say of an adapter, without a worker."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from lora_worker.adapters.plan import AdapterPlanner
from lora_worker.adapters.reference import LoadReport
from lora_worker.adapters.source import resolve_operator_path
from lora_worker.errors import UnsupportedModelError
from lora_worker.lora.inject import targetable
from lora_worker.settings import Settings


def check_adapter(lora_path: str, settings: Settings) -> LoadReport:
    """The report of the load, from shapes: of the base model its configuration is read, and its weights only where the
    adapter's file holds some of them.

    Raises InvalidAdapterError where the worker would refuse the adapter, and UnsupportedModelError or SettingsError
    where the question can't be asked.
    """
    try:
        config = AutoConfig.from_pretrained(settings.model or "", local_files_only=True)
        with torch.device("meta"):
            skeleton = AutoModelForCausalLM.from_config(config)
    except (OSError, ValueError, KeyError) as error:
        raise UnsupportedModelError(f"transformers cannot read the model {settings.model}: {error}") from None
    saved = config.dtype if isinstance(config.dtype, torch.dtype) else torch.float32

    @cache
    def parameters() -> dict[str, torch.Tensor]:
        # Seldom asked for: where an adapter's file holds parameters of the base besides LoRA's.
        model = AutoModelForCausalLM.from_pretrained(settings.model or "", dtype="auto", local_files_only=True)
        return {name: tensor.detach() for name, tensor in model.named_parameters(remove_duplicate=False)}

    planner = AdapterPlanner(
        config,
        targetable=set(targetable(skeleton, settings.lora_target_modules)),
        max_rank=settings.max_lora_rank,
        dtype=saved if settings.dtype == "auto" else getattr(torch, settings.dtype),
        page_locked=False,
        base_parameter=lambda parameter: parameters().get(parameter),
    )
    name = Path(lora_path).name
    folder = resolve_operator_path(name, lora_path, settings.adapter_roots, allow_hub=settings.allow_hub)
    return planner.load(name, folder).report
