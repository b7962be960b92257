"""What the worker tells about its adapters and its pool."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from lora_worker.adapters.manager import AdapterManager
from lora_worker.messages import AdapterOnWorker, AdapterStatus


def adapter_status(adapters: AdapterManager, worker_name: str) -> dict[str, dict[str, Any]]:
    """Per registered name: what it is, and what this worker does with it."""
    return {
        reference.name: AdapterStatus(
            source=reference.source,
            digest=reference.digest,
            rank=reference.rank,
            bytes=reference.nbytes,
            pinned=reference.pinned,
            report=asdict(reference.report),
            workers={worker_name: adapter_here(adapters, reference.digest)},
        ).model_dump()
        for reference in adapters.registry
    }


def pool_info(adapters: AdapterManager, policy: str) -> dict[str, Any]:
    """The pool as `inspect stats` shows it: gauges, counters since the start, and seconds by tier."""
    pool, cache, counters = adapters.pool, adapters.cache, adapters.counters
    residents = pool.residents()
    used, wasted = (sum(values) for values in zip((0, 0), *map(pool.bytes_of, residents.values()), strict=True))
    return {
        "policy": policy,
        "slots": {str(slot): _shown(adapters, digest) for slot, digest in residents.items()},
        "max_loras_per_batch": pool.slots,
        "pinned": [reference.name for reference in adapters.registry.pinned()],
        "hits": counters.hits,
        "loads": counters.copies.count,
        "evictions": counters.evictions,
        "pool_bytes": pool.nbytes,
        "used_bytes": used,
        "wasted_bytes": wasted,
        "cached_adapters": len(cache),
        "cached_bytes": cache.nbytes,
        "cache_evictions": counters.cache_evictions,
        "copies_to_slots": counters.copies.as_dict(),
        "reads_from_files": counters.reads.as_dict(),
        "waits": adapters.waits.as_dict(),
    }


def adapter_here(adapters: AdapterManager, digest: str) -> AdapterOnWorker:
    """Where the weights of one content are on this worker."""
    pool = adapters.pool
    used, wasted = pool.bytes_of(digest)
    return AdapterOnWorker(
        cached=digest in adapters.cache,
        resident=digest in pool,
        slot=pool.place(digest).slot if digest in pool else None,
        held=pool.held(digest),
        last_used=pool.last_used(digest),
        used_bytes=used,
        wasted_bytes=wasted,
        error=adapters.errors.get(digest),
    )


def _shown(adapters: AdapterManager, digest: str) -> str:
    names = sorted(adapters.registry.names_of(digest))
    return names[0] if names else f"(unloading {digest[:12]})"
