"""Attention over a KV cache in blocks, as transformers calls it.

A model's tokens come as one row [1, T]: several sequences side by side, each token with its position. Keys and values
go into the cache; each group of sequences then reads its own back. Letters: N sequences, C new tokens, B blocks a
sequence, L = B * block size keys, K key heads, G query heads a key head, D head size.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention
from transformers import AttentionInterface, AttentionMaskInterface

from lora_worker.errors import UnsupportedModelError
from lora_worker.kernels.memory import zeros
from lora_worker.models.attention_step import AttentionStep

_numbers = itertools.count()

# Arguments that say nothing beyond what the step says, or that concern training.
IGNORED_ARGUMENTS = {
    "position_ids",
    "use_cache",
    "is_causal",
    "output_attentions",
    "output_router_logits",
    "cache_position",
}


class _Rules(NamedTuple):
    """How a layer attends: factor on the scores, tokens seen at most, and cap on the scores (Gemma 2)."""

    scaling: float | None
    window: int | None
    softcap: float | None


class BlockCacheAttention:
    """The attention function of one loaded model, with its cache of keys and values.

    Registered under a name of its own, so that several engines in one process never meet. `cache` maps a layer's index
    to its keys and values, each [blocks, K, block size, D], made when the layer is first called.
    """

    def __init__(self, block_size: int) -> None:
        self.name = f"lora_worker_{next(_numbers)}"
        self.block_size = block_size
        self.step: AttentionStep | None = None
        self.calls = 0
        self.cache: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._blocks = 0
        AttentionInterface.register(self.name, self.forward)
        AttentionMaskInterface.register(self.name, _no_mask)

    def set_blocks(self, count: int) -> None:
        """Start over with an empty cache of so many blocks, numbered from 1; block 0 is padding."""
        self._blocks = count + 1
        for layer, (keys, values) in self.cache.items():
            self.cache[layer] = (
                zeros(self._blocks, *keys.shape[1:], like=keys),
                zeros(self._blocks, *values.shape[1:], like=values),
            )

    @property
    def bytes_per_token(self) -> int:
        """What one token's keys and values take over all layers that have been called."""
        places = self._blocks * self.block_size
        return sum(keys.nbytes + values.nbytes for keys, values in self.cache.values()) // places

    @torch.inference_mode()
    def clear(self, blocks: list[int]) -> None:
        """Zero blocks that a row has been given: it reads places beyond its end, masked, and 0 * NaN is NaN."""
        index: torch.Tensor | None = None
        for keys, values in self.cache.values():
            if index is None:  # once for all layers, which lie on one device
                index = torch.tensor(blocks, device=keys.device)
            keys.index_fill_(0, index, 0)
            values.index_fill_(0, index, 0)

    def close(self) -> None:
        AttentionInterface._global_mapping.pop(self.name, None)
        AttentionMaskInterface._global_mapping.pop(self.name, None)
        self.cache.clear()

    def forward(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,  # noqa: ARG002 - the step says what a token sees
        scaling: float | None = None,
        dropout: float = 0.0,  # noqa: ARG002 - inference only
        sliding_window: int | None = None,
        softcap: float | None = None,
        **others: Any,
    ) -> tuple[torch.Tensor, None]:
        """query [1, K * G, T, D], key and value [1, K, T, D]; returns [1, T, K * G, D]."""
        unknown = sorted(n for n, v in others.items() if v is not None and n not in IGNORED_ARGUMENTS)
        if unknown:
            raise UnsupportedModelError(
                f"{type(module).__name__} asks its attention for {', '.join(unknown)}, which this engine can't compute"
            )
        assert self.step is not None, "attention was called outside a step"
        self.calls += 1
        keys, values = self._layer_cache(module, key, value)
        self._write(keys, key)
        self._write(values, value)
        tokens = query[0].transpose(0, 1)  # [T, K * G, D]
        rules = _Rules(scaling, sliding_window, softcap)
        parts = [self._attend(index, tokens, keys, values, rules) for index in range(len(self.step.groups))]
        if len(parts) == 1:
            return parts[0][None], None
        out = parts[0].new_empty(tokens.shape[0], *parts[0].shape[1:])
        for group, part in zip(self.step.groups, parts, strict=True):
            out[group.tokens] = part
        return out[None], None

    def _write(self, cache: torch.Tensor, new: torch.Tensor) -> None:
        assert self.step is not None
        heads, size = cache.shape[1], cache.shape[3]
        tokens = new[0].transpose(0, 1).reshape(-1, size)  # [T * K, D]
        cache.view(-1, size).index_copy_(0, self.step.write_places(heads), tokens)

    def _read(self, cache: torch.Tensor, index: int) -> torch.Tensor:
        """A group's part of the cache, [N, K, L, D]."""
        assert self.step is not None
        heads, size = cache.shape[1], cache.shape[3]
        blocks = cache.view(-1, self.block_size * size).index_select(0, self.step.read_places(index, heads))
        return blocks.view(self.step.groups[index].rows, heads, -1, size)

    def _attend(
        self,
        index: int,
        tokens: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        rules: _Rules,
    ) -> torch.Tensor:
        """One group's output, [N * C, K * G, D]."""
        assert self.step is not None
        group = self.step.groups[index]
        new = tokens if group.tokens is None else tokens.index_select(0, group.tokens)
        heads, size = keys.shape[1], new.shape[2]
        together = new.shape[1] // heads
        # The query heads that share a key head stand beside the new tokens, so that no key is copied for them.
        query = new.view(group.rows, -1, heads, together, size).transpose(1, 2)
        query = query.reshape(group.rows, heads, -1, size)
        bias = self.step.bias(index, together, rules.window, query.dtype)
        seen_keys, seen_values = self._read(keys, index), self._read(values, index)
        if group.positions.shape[1] == 1 or rules.softcap is not None:
            out = _attend_by_products(query, seen_keys, seen_values, bias, rules)
        else:
            out = F.scaled_dot_product_attention(query, seen_keys, seen_values, attn_mask=bias, scale=rules.scaling)
        out = out.view(group.rows, heads, -1, together, out.shape[3]).transpose(1, 2)
        return out.reshape(new.shape[0], heads * together, -1)

    def _layer_cache(
        self, module: torch.nn.Module, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        layer = getattr(module, "layer_idx", None)
        if not isinstance(layer, int):
            raise UnsupportedModelError(f"{type(module).__name__} does not say which layer it is (layer_idx)")
        if layer not in self.cache:
            self.cache[layer] = (
                zeros(self._blocks, key.shape[1], self.block_size, key.shape[3], like=key),
                zeros(self._blocks, value.shape[1], self.block_size, value.shape[3], like=value),
            )
        return self.cache[layer]


def _attend_by_products(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, bias: torch.Tensor, rules: _Rules
) -> torch.Tensor:
    """What scaled_dot_product_attention computes, and soft caps besides, which it can't.

    On the CPU it takes half the time where each row has a single new token. query [N, K, C * G, D], keys and values
    [N, K, L, D].
    """
    scaling = query.shape[3] ** -0.5 if rules.scaling is None else rules.scaling
    scores = torch.matmul(query * scaling, keys.transpose(2, 3))
    if rules.softcap is not None:
        scores = torch.tanh(scores / rules.softcap) * rules.softcap
    weights = torch.softmax(scores + bias, dim=3, dtype=torch.promote_types(scores.dtype, torch.float32))
    return torch.matmul(weights.to(values.dtype), values)


def _no_mask(*_: Any, **__: Any) -> None:
    """transformers makes no mask; the step's bias is the only one."""
