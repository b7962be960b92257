"""How much a worker's pool holds, and how much of it may be pinned."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from lora_worker.kernels.pages import pages_for
from lora_worker.settings import Settings


def pool_pages(settings: Settings) -> int:
    """The pages of the pool: what `lora_pool_ranks` says, else enough for the greatest rank in every slot."""
    if settings.lora_pool_ranks is None:
        return settings.max_loras_per_batch * pages_for(settings.max_lora_rank)
    return pages_for(settings.lora_pool_ranks)


class PinRoom(NamedTuple):
    """All slots, of which one stays unpinned, and the pages that are left beside an adapter of the greatest rank."""

    slots: int
    pages: int

    @classmethod
    def of(cls, settings: Settings) -> PinRoom:
        return cls(settings.max_loras_per_batch, pool_pages(settings) - pages_for(settings.max_lora_rank))

    def lacks(self, ranks: Collection[int]) -> str | None:
        """Why adapters of these ranks can't all be pinned, as the end of a sentence; None where they can."""
        if len(ranks) >= self.slots:
            return (
                f"would pin {len(ranks)} of {self.slots} slots, and one must stay unpinned; unpin another adapter or "
                f"raise max_loras_per_batch"
            )
        if sum(map(pages_for, ranks)) > self.pages:
            return (
                "would leave no room for an adapter of the greatest rank beside the pinned ones; unpin another "
                "adapter or raise lora_pool_ranks"
            )
        return None
