"""Tiny random base models, a tokenizer whose text and tokens are each other's inverse, and adapters made by PEFT."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

VOCABULARY = 128
EOS = VOCABULARY - 1
MAX_POSITIONS = 256
# Wide weights, so that the best two logits are seldom close.
SPREAD = 0.6

CHAT_TEMPLATE = "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} {% endfor %}"


def make_model(family: str) -> PreTrainedModel:
    torch.manual_seed(sum(family.encode()))
    common: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "initializer_range": SPREAD,
        "bos_token_id": None,
        "eos_token_id": EOS,
        "tie_word_embeddings": False,
    }
    shape: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": MAX_POSITIONS,
    }
    if family == "llama":
        return LlamaForCausalLM(LlamaConfig(**common, **shape))
    if family == "qwen2":
        model: PreTrainedModel = Qwen2ForCausalLM(Qwen2Config(**common, **shape))
        for name, parameter in model.named_parameters():
            if name.endswith("proj.bias"):  # transformers starts them at zero, which would test nothing
                torch.nn.init.normal_(parameter, std=SPREAD)
        return model
    assert family == "gpt2"
    return GPT2LMHeadModel(GPT2Config(**common, n_embd=32, n_layer=2, n_head=4, n_positions=MAX_POSITIONS))


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Words 'w0' to 'w127'; 'w127' is the end-of-sequence token."""
    words = {f"w{i}": i for i in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=f"w{EOS}")
    fast.chat_template = CHAT_TEMPLATE
    return fast


def save_model(family: str, folder: Path) -> Path:
    make_model(family).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


def save_adapter(base: Path, folder: Path, *, seed: int, **config: Any) -> Path:
    """An adapter with random weights, large enough to change what the model says."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_pretrained(base)
    adapted = get_peft_model(model, LoraConfig(init_lora_weights=False, task_type="CAUSAL_LM", **config))
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    adapted.save_pretrained(str(folder))
    return folder


def text_of(ids: list[int]) -> str:
    return " ".join(f"w{i}" for i in ids)


def ids_of(text: str) -> list[int]:
    """The inverse of both `text_of` and decoding; some families' tokenizers leave the spaces out."""
    assert re.fullmatch(r"(\s*w\d+)*", text), f"{text!r} is not made of the tiny tokenizer's words"
    return [int(number) for number in re.findall(r"w(\d+)", text)]
