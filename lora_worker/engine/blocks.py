"""Which blocks of the KV cache are free."""

from __future__ import annotations


class BlockManager:
    """Hands out block numbers; block 0 is never handed out, since padded places of a block table point to it."""

    def __init__(self, count: int, block_size: int) -> None:
        self.block_size = block_size
        self.count = count
        self._free = list(range(count, 0, -1))

    @property
    def free_count(self) -> int:
        return len(self._free)

    def needed(self, tokens: int, held: int) -> int:
        """How many more blocks a row of so many tokens needs when it holds `held`."""
        return max(0, -(-tokens // self.block_size) - held)

    def take(self, count: int) -> list[int]:
        assert count <= len(self._free), f"{count} blocks asked for, {len(self._free)} are free"
        return [self._free.pop() for _ in range(count)]

    def give_back(self, blocks: list[int]) -> None:
        self._free.extend(blocks)

    def check_integrity(self, held: list[int]) -> None:
        assert sorted(self._free + held) == list(range(1, self.count + 1)), "blocks lost or shared"
