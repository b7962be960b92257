"""From a folder to a model that is known to compute what transformers computes."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from lora_worker.errors import UnsupportedModelError
from lora_worker.models.attention import BlockCacheAttention
from lora_worker.models.attention_step import AttentionRow, AttentionStep
from lora_worker.settings import Settings

# A probe's logits may differ from transformers' by rounding, here as a share of their norm; a feature that is missing
# moves them by a large share. transformers' eager softmax is in float32 whatever the model's dtype.
PROBE_TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-4, torch.float16: 0.02, torch.bfloat16: 0.1}
DTYPES = tuple(str(dtype).removeprefix("torch.") for dtype in PROBE_TOLERANCE)
# These choose their frequencies by the longest row of a batch, so a row's answer would depend on its neighbours'.
ROPE_BY_LONGEST_ROW = {"dynamic", "longrope"}
BLOCK_SIZE = 32
UNBOUNDED_MODEL_LEN = 4096


class LoadedModel(NamedTuple):
    """What the engine needs of a base model. `max_model_len` is in tokens, prompt and answer together."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    attention: BlockCacheAttention
    eos_ids: frozenset[int]
    max_model_len: int


def choose_device(name: str) -> torch.device:
    """The device of the setting; 'auto' is the first CUDA card, else the CPU."""
    if name == "auto":
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UnsupportedModelError(
            f"device is {name}, but torch finds {torch.cuda.device_count()} CUDA cards here; use another, cpu or auto"
        )
    return device


def load_model(settings: Settings) -> LoadedModel:
    """Load and probe; raises UnsupportedModelError with one sentence."""
    if settings.model is None:
        raise UnsupportedModelError("no model is set; set LORA_WORKER_MODEL to the folder of a transformers model")
    folder = Path(settings.model)
    if not (folder / "config.json").is_file():
        raise UnsupportedModelError(
            f"the model {settings.model} is no folder with a config.json; give a folder that save_pretrained wrote"
        )
    device = choose_device(settings.device)
    attention = BlockCacheAttention(BLOCK_SIZE)
    dtype = "auto" if settings.dtype == "auto" else getattr(torch, settings.dtype)
    try:
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, attn_implementation=attention.name, local_files_only=True
        )
        model.to(device)  # type: ignore[arg-type] # transformers wraps torch's method and loses its types
    except Exception as error:  # of many classes: a broken file, a family that is not known, memory that does not do
        attention.close()
        raise UnsupportedModelError(
            f"transformers cannot load the model {folder} ({_architecture(folder)}) with this engine's attention: "
            f"{error!r}"
        ) from None
    model.eval().requires_grad_(requires_grad=False)
    if model.dtype not in PROBE_TOLERANCE:
        raise UnsupportedModelError(f"{folder} has weights in {model.dtype}; set dtype to one of {', '.join(DTYPES)}")
    try:
        _probe(model, attention)
    except RuntimeError as error:  # torch's, of a product that it doesn't have in this dtype
        raise UnsupportedModelError(f"{type(model).__name__} cannot compute in {model.dtype}: {error}") from None
    limit = _position_limit(model)
    if settings.max_model_len is not None and settings.max_model_len > limit:
        raise UnsupportedModelError(
            f"max_model_len is {settings.max_model_len}, but {folder.name} can be served exactly up to {limit} tokens; "
            f"set it to at most {limit}"
        )
    return LoadedModel(
        model, _load_tokenizer(folder), attention, _eos_ids(folder, model), settings.max_model_len or limit
    )


def _architecture(folder: Path) -> str:
    with suppress(OSError, ValueError):
        return ", ".join(json.loads((folder / "config.json").read_text()).get("architectures") or [])
    return "unknown"


def _load_tokenizer(folder: Path) -> PreTrainedTokenizerBase | None:
    names = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
    if not any((folder / name).exists() for name in names):
        return None
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise UnsupportedModelError(f"transformers cannot load the tokenizer of {folder}: {error}") from None


def _eos_ids(folder: Path, model: PreTrainedModel) -> frozenset[int]:
    """The ids at which transformers' `generate` ends: the generation config's, else the model config's."""
    ids = model.config.eos_token_id
    if (folder / "generation_config.json").is_file():
        generation_ids = GenerationConfig.from_pretrained(folder).eos_token_id
        ids = ids if generation_ids is None else generation_ids
    if ids is None:
        return frozenset()
    return frozenset([ids] if isinstance(ids, int) else ids)


def _position_limit(model: PreTrainedModel) -> int:
    """The tokens up to which a row's answer depends on that row alone."""
    config = model.config.get_text_config()
    limits = [getattr(config, "max_position_embeddings", None)]
    parameters = getattr(config, "rope_parameters", None) or {}
    # One set of parameters, or one a type of layer.
    for rope in (parameters, *parameters.values()):
        if isinstance(rope, dict) and rope.get("rope_type") in ROPE_BY_LONGEST_ROW:
            limits.append(rope.get("original_max_position_embeddings"))
    return min((limit for limit in limits if isinstance(limit, int) and limit > 0), default=UNBOUNDED_MODEL_LEN)


@torch.inference_mode()
def _probe(model: PreTrainedModel, attention: BlockCacheAttention) -> None:
    """Run two short sequences side by side and compare each with transformers' own attention.

    A family whose attention has a feature that this engine lacks would answer wrongly and silently; it is refused.
    """
    attention.set_blocks(2)
    vocabulary = model.config.get_text_config().vocab_size
    prompts = [[i * 7 % vocabulary for i in range(1, 12)], [i * 11 % vocabulary for i in range(1, 6)]]
    ids = torch.tensor([prompts[0] + prompts[1]], device=model.device)
    positions = torch.tensor([[*range(len(prompts[0])), *range(len(prompts[1]))]], device=model.device)
    rows = [AttentionRow(0, len(prompts[0]), [1]), AttentionRow(0, len(prompts[1]), [2])]
    attention.step = AttentionStep(rows, block_size=attention.block_size, device=model.device)
    attention.calls = 0
    name = type(model).__name__
    ours = model(ids, position_ids=positions, use_cache=False).logits[0].double()
    layers = model.config.get_text_config().num_hidden_layers
    if attention.calls != layers:
        raise UnsupportedModelError(
            f"{name} called this engine's attention {attention.calls} times for {layers} layers, so its attention is "
            f"of a kind that cannot be served exactly"
        )
    attention.step = None
    model.set_attn_implementation("eager")
    theirs = torch.cat([model(torch.tensor([p], device=model.device), use_cache=False).logits[0] for p in prompts])
    model.set_attn_implementation(attention.name)
    difference = ((ours - theirs.double()).norm() / theirs.double().norm()).item()
    if not difference <= PROBE_TOLERANCE[model.dtype]:
        raise UnsupportedModelError(
            f"{name} gives logits that differ by {difference:.2%} between this engine's attention and transformers', "
            f"so it cannot be served exactly"
        )
