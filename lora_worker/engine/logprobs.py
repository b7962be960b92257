"""Log probabilities of generated tokens.

They are of the model's own distribution: the log-softmax of its logits before any bias, penalty, temperature or
restriction, as in OpenAI's API and by default in vLLM.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows

import torch

from lora_worker.engine.sequence import Sequence, TokenLogprobs
from lora_worker.messages import MAX_LOGPROBS

# JSON has no infinity; OpenAI and vLLM put this in its place.
LOWEST = -9999.0


class StepLogprobs:
    """The distributions of one step, taken before the logits are processed, for the rows that ask for them."""

    def __init__(self, logits: torch.Tensor, rows: Rows[Sequence]) -> None:
        """logits [rows, V]."""
        self._places = [i for i, row in enumerate(rows) if row.top_logprobs is not None]
        self._counts = [rows[i].top_logprobs or 0 for i in self._places]
        if self._places:
            self._logprobs = torch.log_softmax(logits[self._places], dim=-1)

    def of(self, tokens: list[int]) -> list[TokenLogprobs | None]:
        """The log probabilities of the rows' drawn tokens [rows]; None for rows that don't ask."""
        found: list[TokenLogprobs | None] = [None] * len(tokens)
        if not self._places:
            return found
        drawn = torch.tensor([tokens[i] for i in self._places], device=self._logprobs.device)
        chosen = self._logprobs.gather(1, drawn[:, None])[:, 0].tolist()
        tops = self._tops()
        for i, logprob, top in zip(self._places, chosen, tops, strict=True):
            found[i] = TokenLogprobs(max(logprob, LOWEST), top)
        return found

    def _tops(self) -> list[list[tuple[int, float]]]:
        if not any(self._counts):
            return [[] for _ in self._counts]
        # Always as many, so that equal ones come in the same order whatever other rows ask for.
        values, ids = torch.topk(self._logprobs, min(MAX_LOGPROBS, self._logprobs.shape[1]))
        rows = zip(self._counts, ids.tolist(), values.tolist(), strict=True)
        return [[(i, max(v, LOWEST)) for i, v in zip(row[:n], some[:n], strict=True)] for n, row, some in rows]
