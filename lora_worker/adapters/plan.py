"""What an adapter's files mean on this base model, by PEFT's own rules.

PEFT injects the adapter's layers into a copy of the base model that has shapes and no weights (the meta device); the
rank and the scaling of every module are read off it. The placement depends on the configuration alone and is kept, so
a thousand adapters of one shape cost one injection and a thousand reads.
"""

from __future__ import annotations

import copy
import hashlib
import json
import threading
import time
import warnings
from collections import OrderedDict
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from peft import inject_adapter_in_model
from peft.tuners.lora import Embedding as PeftEmbedding
from peft.tuners.lora import Linear as PeftLinear
from peft.tuners.lora import LoraLayer as PeftLayer
from transformers import AutoModelForCausalLM, PretrainedConfig

from lora_worker.adapters.config_fields import (
    CONFIG_FILE,
    SERVED,
    fields_without_effect,
    read_config,
    to_lora_config,
    unmatched,
)
from lora_worker.adapters.host_adapter import HostAdapter, HostMemory
from lora_worker.adapters.reference import AdapterReference, LoadReport
from lora_worker.adapters.tensor_files import PICKLED, SAFETENSORS, read_shapes, read_tensors
from lora_worker.adapters.weights import BaseParameter, Pair, Placement, match
from lora_worker.errors import InvalidAdapterError
from lora_worker.lora.layer import LoraPair

PLACEMENTS_KEPT = 64


class LoadedAdapter(NamedTuple):
    adapter: HostAdapter
    report: LoadReport

    def reference(self, *, pinned: bool, lora_path: str | None = None) -> AdapterReference:
        """What is kept of it under its name, whether or not its weights are."""
        adapter, report = self
        return AdapterReference(
            report.lora_name,
            report.source,
            adapter.digest,
            adapter.rank,
            adapter.has_bias,
            adapter.nbytes,
            pinned,
            report,
            lora_path,
        )


class AdapterPlanner:
    """Reads adapter folders for one base model. Safe to call from several threads.

    Args:
        config: the base model's configuration.
        targetable: the module paths that the engine can give a LoRA delta.
        max_rank: the pool's greatest rank.
        dtype: what the weights are served in.
        page_locked: whether the host keeps them in memory from which a card can copy by itself.
        base_parameter: the base model's parameters, to tell which of those in an adapter's file it has changed.
    """

    def __init__(
        self,
        config: PretrainedConfig,
        *,
        targetable: set[str],
        max_rank: int,
        dtype: torch.dtype,
        page_locked: bool,
        base_parameter: BaseParameter,
    ) -> None:
        self._config = config
        # Once, and here: transformers sets torch's default dtype for the whole process while it builds a model, and
        # reads run beside generation.
        with torch.device("meta"):
            self._skeleton = AutoModelForCausalLM.from_config(config)
        self._base_parameter = base_parameter
        self._targetable = targetable
        self._max_rank = max_rank
        self._dtype = dtype
        self._page_locked = page_locked
        self._placements: OrderedDict[str, dict[str, Placement]] = OrderedDict()
        self._lock = threading.Lock()

    def load(self, name: str, folder: Path) -> LoadedAdapter:
        """Read, check and cast; raises InvalidAdapterError for whatever can't be served exactly."""
        started = time.monotonic()
        before = _stamps(folder)
        config = read_config(name, folder)
        placements = self._placements_of(name, config)
        tensors, matched = self._read(name, folder, placements)
        digest, pairs = self._cast_all(name, placements, matched)
        if _stamps(folder) != before:
            raise InvalidAdapterError(
                f"the files of the adapter {name!r} in {folder} changed while they were read; load it again when they "
                f"are written whole"
            )
        nbytes = sum(pair.nbytes for pair in pairs.values())
        ranks = sorted({placements[path].rank for path in pairs})
        adapter = HostAdapter(digest, pairs, ranks[-1], nbytes)
        report = LoadReport(
            lora_name=name,
            source=str(folder),
            digest=adapter.digest,
            ranks=ranks,
            scalings=sorted({placements[path].scaling for path in pairs}),
            modules=len(pairs),
            bytes=nbytes,
            ignored_fields=fields_without_effect(config),
            warnings=[*unmatched(config, list(pairs)), *self._warnings(config, tensors)],
            seconds=round(time.monotonic() - started, 4),
        )
        return LoadedAdapter(adapter, report)

    def _read(
        self, name: str, folder: Path, placements: dict[str, Placement]
    ) -> tuple[dict[str, torch.Tensor], dict[str, Pair]]:
        """All tensors of the file, and those of each module; by their shapes first, which costs next to nothing."""
        base_parameter = cache(self._base_parameter)
        match(name, placements, read_shapes(name, folder), base_parameter)
        tensors = read_tensors(name, folder)
        return tensors, match(name, placements, tensors, base_parameter)

    def _placements_of(self, name: str, config: dict[str, Any]) -> dict[str, Placement]:
        # Patterns stay in the file's order: PEFT takes the first that matches.
        key = json.dumps({field: config.get(field) for field in SERVED})
        with self._lock:
            if key in self._placements:
                self._placements.move_to_end(key)
                return self._placements[key]
            placements = self._inject(name, config)
            self._placements[key] = placements
            if len(self._placements) > PLACEMENTS_KEPT:
                self._placements.popitem(last=False)
            return placements

    def _inject(self, name: str, config: dict[str, Any]) -> dict[str, Placement]:
        try:
            skeleton = copy.deepcopy(self._skeleton)
            with torch.device("meta"), warnings.catch_warnings():
                # PEFT warns of what the report says anyway (fan_in_fan_out corrected for Conv1D).
                warnings.simplefilter("ignore")
                inject_adapter_in_model(to_lora_config(config), skeleton, low_cpu_mem_usage=True)
        except Exception as error:  # re.error, AttributeError and more, from whatever a configuration holds
            reason = " ".join(str(error).split())
            raise InvalidAdapterError(f"PEFT cannot place the adapter {name!r} on this base model: {reason}") from None
        placements = {}
        module: Any
        for path, module in skeleton.named_modules():
            if not isinstance(module, PeftLayer):
                continue
            if type(module) not in (PeftLinear, PeftEmbedding) or path not in self._targetable:
                raise InvalidAdapterError(
                    f"the adapter {name!r} targets {path}, which this worker gives no LoRA; "
                    f"it serves {self._targets_served()}"
                )
            placements[path] = _placement(module)
        if not placements:
            raise InvalidAdapterError(f"target_modules of the adapter {name!r} match no module of this base model")
        self._check_ranks(name, placements)
        return placements

    def _targets_served(self) -> str:
        return ", ".join(sorted({path.rpartition(".")[2] for path in self._targetable})) or "no module"

    def _check_ranks(self, name: str, placements: dict[str, Placement]) -> None:
        rank = max(placement.rank for placement in placements.values())
        if rank > self._max_rank:
            raise InvalidAdapterError(
                f"the adapter {name!r} has rank {rank}, above max_lora_rank {self._max_rank}; "
                f"raise the setting max_lora_rank to at least {rank}"
            )

    def _cast_all(
        self, name: str, placements: dict[str, Placement], matched: dict[str, Pair]
    ) -> tuple[str, dict[str, LoraPair]]:
        """The content's digest, and what is served of it."""
        memory = HostMemory(sum(p.numbers for p in matched.values()), self._dtype, page_locked=self._page_locked)
        digest = hashlib.sha256()
        pairs = {}
        for path, pair in matched.items():
            scaling = placements[path].scaling
            digest.update(f"{path} {scaling!r}".encode())
            for tensor in pair:
                _add_content(digest, tensor)
            pairs[path] = self._cast(name, path, pair, scaling, memory)
        return digest.hexdigest(), pairs

    def _cast(self, name: str, path: str, pair: Pair, scaling: float, memory: HostMemory) -> LoraPair:
        # The scaling goes into B once, in double precision, instead of into every step's products.
        bias = None if pair.bias is None else pair.bias.to(torch.float64) * scaling
        if pair.base_bias is not None:
            own = self._base_parameter(f"{path}.bias")
            assert own is not None, f"{path} has a changed bias and none in the base"
            change = pair.base_bias.to(torch.float64) - own.to(torch.float64)
            bias = change if bias is None else bias + change
        cast = LoraPair(
            memory.keep(pair.a),
            memory.keep((pair.b.to(torch.float64) * scaling).t()),
            None if bias is None else memory.keep(bias),
        )
        for part, tensor in zip(("lora_A", "lora_B", "bias"), cast, strict=True):
            if tensor is not None and not torch.isfinite(tensor).all():
                raise InvalidAdapterError(
                    f"the adapter {name!r} has NaN or Inf in {part} of {path} (in {self._dtype}); "
                    f"export it again from a checkpoint with finite weights"
                )
        return cast

    def _warnings(self, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> list[str]:
        found = []
        base = config.get("base_model_name_or_path")
        served = str(getattr(self._config, "_name_or_path", "") or "")
        if base and Path(str(base)).name.lower() != Path(served).name.lower():
            found.append(f"trained on {base!r}, served on {served!r}; the shapes fit")
        dtypes = sorted({str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()})
        wanted = str(self._dtype).removeprefix("torch.")
        if dtypes != [wanted]:
            found.append(f"weights are cast from {', '.join(dtypes)} to {wanted}")
        return found


def _placement(module: Any) -> Placement:
    """What PEFT has made of one module."""
    scaling = module.scaling["default"]
    if isinstance(module, PeftEmbedding):
        a, b = module.lora_embedding_A["default"], module.lora_embedding_B["default"]
        return Placement(a.shape[0], scaling, a.shape[1], b.shape[0], is_embedding=True, has_bias=False)
    a, b = module.lora_A["default"].weight, module.lora_B["default"].weight
    has_bias = module.lora_B["default"].bias is not None
    return Placement(a.shape[0], scaling, a.shape[1], b.shape[0], is_embedding=False, has_bias=has_bias)


def _add_content(digest: hashlib._Hash, tensor: torch.Tensor | None) -> None:
    if tensor is None:
        digest.update(b"none")
        return
    digest.update(f"{tensor.dtype} {tuple(tensor.shape)} ".encode())
    digest.update(tensor.contiguous().view(torch.uint8).numpy().data)


def _stamps(folder: Path) -> list[tuple[int, int, int]]:
    """What differs where a file has been written or replaced."""
    files = [folder / name for name in (CONFIG_FILE, SAFETENSORS, PICKLED)]
    stats = [file.stat() for file in files if file.is_file()]
    return [(stat.st_ino, stat.st_size, stat.st_mtime_ns) for stat in stats]
