"""Put an engine together: model, layers, pool, cache and scheduler, sized by the settings and by the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from lora_worker.adapters.device_pool import DevicePool
from lora_worker.adapters.eviction import LruPolicy, make_policy
from lora_worker.adapters.host_cache import HostCache
from lora_worker.adapters.manager import AdapterManager, Tiers
from lora_worker.adapters.plan import AdapterPlanner
from lora_worker.adapters.registry import AdapterRegistry
from lora_worker.adapters.room import PinRoom, pool_pages
from lora_worker.adapters.source import locate
from lora_worker.adapters.statistics import PoolCounters
from lora_worker.engine.blocks import BlockManager
from lora_worker.engine.core import EngineCore
from lora_worker.engine.model_runner import ModelRunner
from lora_worker.engine.sampler import Sampler
from lora_worker.engine.scheduler import Scheduler
from lora_worker.engine.sizing import cache_size
from lora_worker.engine.stopping import StopWatch
from lora_worker.lora.inject import inject_lora
from lora_worker.models.loading import LoadedModel, load_model
from lora_worker.settings import Settings


class Built(NamedTuple):
    core: EngineCore
    loaded: LoadedModel
    max_model_len: int


def build(settings: Settings, post: Callable[[Callable[[], None]], None]) -> Built:
    """Raises UnsupportedModelError or SettingsError with one sentence; `post` runs a function on the engine thread."""
    loaded = load_model(settings)
    model, attention = loaded.model, loaded.attention
    # By their names before the layers come in between; a tied one stands under both of its names.
    parameters = dict(model.named_parameters(remove_duplicate=False))
    layers, lora_step = inject_lora(model, settings.lora_target_modules)
    registry, counters = AdapterRegistry(settings.base_name), PoolCounters()
    pool = DevicePool(
        layers,
        make_policy(settings.lora_eviction_policy),
        counters,
        slots=settings.max_loras_per_batch,
        pages=pool_pages(settings),
        device=model.device,
        is_pinned=registry.is_pinned,
    )
    cache = HostCache(
        LruPolicy(),
        counters,
        max_adapters=settings.max_loaded_loras,
        max_bytes=int(settings.max_loaded_lora_bytes),
        is_pinned=registry.is_pinned,
    )
    runner = ModelRunner(loaded, lora_step)
    size = cache_size(settings, loaded, layers.values(), runner)
    blocks = BlockManager(-(-size.total // attention.block_size), attention.block_size)
    attention.set_blocks(blocks.count)
    adapters = AdapterManager(
        Tiers(registry, cache, pool, counters),
        AdapterPlanner(
            model.config,
            targetable=set(layers),
            max_rank=settings.max_lora_rank,
            dtype=model.dtype,
            page_locked=model.device.type == "cuda",
            base_parameter=lambda name: parameters[name].detach().cpu() if name in parameters else None,
        ),
        pin_room=PinRoom.of(settings),
        post=post,
        is_wanted=lambda name: scheduler.waiting.wants(name),
        on_read_failed=lambda names, error: core.fail_waiting(names, error),
        locate=lambda reference: locate(reference, settings.adapter_roots, allow_hub=settings.allow_hub),
    )
    scheduler = Scheduler(
        blocks,
        adapters,
        start=lambda sequence, spared: core.start(sequence, spared),
        stop=lambda sequence: core.stop(sequence),
        max_running=settings.running_limit(model.device.type),
        max_prefill_tokens=settings.prefill_limit(model.device.type),
        max_wait_seconds=settings.max_wait_seconds,
    )
    core = EngineCore(
        scheduler,
        runner,
        adapters,
        Sampler(),
        StopWatch(loaded.tokenizer),
    )
    return Built(core, loaded, size.max_model_len)
