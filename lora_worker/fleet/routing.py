"""Which queue a task goes to, and which worker comes first for a queue. Plain functions of names; no state.

A producer needs only `queue_for`, or its formula in another language (docs/fleet.md has it with a test vector). Workers
rank themselves for each partition by rendezvous hashing: the one with the highest hash of queue and name comes first.
When a worker goes, its partitions alone move, each to the worker that came second for it; when one comes, it takes
an even share from all. A worker is ranked by its node's name, which a restart keeps, and not by its id.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from zlib import crc32

from lora_worker.fleet.keys import Keys
from lora_worker.messages import GENERATE


def partition_of(lora_name: str, partitions: int) -> int:
    """The number of an adapter's partition: CRC-32 (as in zlib and PNG) of its UTF-8 bytes, modulo `partitions`."""
    # JSON can carry halves of surrogate pairs, of which no UTF-8 exists; no adapter is called so.
    return crc32(lora_name.encode(errors="surrogatepass")) % partitions


def queue_for(task: str, model: object, keys: Keys, *, base_name: str | None = None) -> str:
    """The queue a task is best sent to; the inbox is always right too, and takes one hop more.

    `model` is the field of a generate request: an adapter's name, the base's, or None for the base.
    """
    if task != GENERATE:
        return keys.manage
    if not isinstance(model, str) or model == base_name:
        return keys.inbox
    return keys.partitions[partition_of(model, len(keys.partitions))]


def node_of(worker_id: str) -> str:
    """A worker's node name (`gpu0@host`): its id without the random part that each start has of its own."""
    return worker_id.rpartition(":")[0]


def rank(queue: str, workers: Iterable[str]) -> list[str]:
    """Worker ids in the order in which they come for a queue."""
    return sorted(workers, key=lambda worker: (_weight(queue, node_of(worker)), worker), reverse=True)


def _weight(queue: str, node: str) -> bytes:
    return hashlib.blake2b(f"{queue}|{node}".encode(), digest_size=8).digest()
