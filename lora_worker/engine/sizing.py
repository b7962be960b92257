"""How many tokens the KV cache holds, and how many of them one row may have."""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import NamedTuple

import torch

from lora_worker.adapters.room import pool_pages
from lora_worker.engine.largest_step import LargestStep, run_largest_step
from lora_worker.engine.model_runner import ModelRunner
from lora_worker.errors import SettingsError
from lora_worker.lora.layer import LoraLayer
from lora_worker.models.loading import LoadedModel
from lora_worker.settings import Settings

logger = logging.getLogger(__name__)

CPU_CACHE_BYTES = 2 * 1024**3
# Of what the largest step leaves free on a card; the rest is for the gaps between what torch has allocated.
CUDA_CACHE_SHARE = 0.9
# A layer's attention reads keys and values out of the cache as a copy, in which rows are padded to at most twice.
READ_PADDING = 2


class CacheSize(NamedTuple):
    """In tokens."""

    total: int
    max_model_len: int


def cache_size(
    settings: Settings, loaded: LoadedModel, layers: Collection[LoraLayer], runner: ModelRunner
) -> CacheSize:
    """One full row always fits; SettingsError with one sentence where that can't be."""
    device = loaded.model.device
    room, longest = CPU_CACHE_BYTES // loaded.attention.bytes_per_token, loaded.max_model_len
    if device.type == "cuda" and settings.max_total_tokens is None:
        room, longest = _room_on_card(settings, loaded, layers, runner)
    total = settings.max_total_tokens or min(settings.running_limit(device.type) * longest, room)
    longest = min(longest, total)
    if longest == loaded.max_model_len:
        return CacheSize(total, longest)
    if settings.max_model_len is not None or longest < 1:
        raise SettingsError(
            f"the KV cache holds {max(total, 0)} tokens, too few for one row of max_model_len {loaded.max_model_len}; "
            f"raise max_total_tokens, or lower max_model_len or, on a card, max_prefill_tokens"
        )
    logger.warning(
        "The KV cache holds %d tokens, and a row may have %d and not the model's %d; raise max_total_tokens or, on a "
        "card, lower max_prefill_tokens.",
        total,
        longest,
        loaded.max_model_len,
    )
    return CacheSize(total, longest)


def _room_on_card(
    settings: Settings, loaded: LoadedModel, layers: Collection[LoraLayer], runner: ModelRunner
) -> tuple[int, int]:
    """The tokens that fit beside the largest step and the layers that take memory late, and the longest row's.

    Where the step itself doesn't fit, and no setting asks for rows so long, it is tried with shorter ones.
    """
    device, attention = loaded.model.device, loaded.attention
    longest = loaded.max_model_len
    while (step_bytes := _step_bytes(settings, longest, layers, runner, device)) is None:
        if settings.max_model_len is not None or longest <= attention.block_size:
            raise SettingsError(
                f"a step of max_running_requests {settings.running_limit(device.type)} and max_prefill_tokens "
                f"{settings.prefill_limit(device.type)} with a row of {longest} tokens does not fit beside the model "
                f"on {device}; lower one of them or max_model_len"
            )
        longest //= 2
    late_bytes = sum(layer.page_bytes for layer in layers if layer.allocates_late) * pool_pages(settings)
    free = torch.cuda.mem_get_info(device)[0] - step_bytes - late_bytes
    token_bytes = attention.bytes_per_token * (1 + READ_PADDING / len(attention.cache))
    return int(free * CUDA_CACHE_SHARE / token_bytes), longest


def _step_bytes(
    settings: Settings, row_tokens: int, layers: Collection[LoraLayer], runner: ModelRunner, device: torch.device
) -> int | None:
    """What the largest step takes of a card for itself at its peak; None where there isn't as much."""
    step = LargestStep(
        rows=settings.running_limit(device.type),
        row_tokens=row_tokens,
        prefill_tokens=settings.prefill_limit(device.type),
        slots=min(settings.max_loras_per_batch, pool_pages(settings)),
    )
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    try:
        run_largest_step(step, layers, runner)
    except torch.OutOfMemoryError:
        return None
    finally:
        # The cache is sized by what the card has free, and torch keeps what a step has used.
        torch.cuda.empty_cache()
    return torch.cuda.max_memory_allocated(device) - before
