"""Train the demo's three adapters with PEFT: `python -m lora_worker.demo.train_adapters OUT` (4 min on two cores)."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from lora_worker.demo.model import FOLDER_NAME, prepare_model
from lora_worker.demo.training_data import Example, json_answers, pirate, sentiment

ROWS_PER_STEP = 8
STEPS = 60
LEARNING_RATE = 1e-3
SEED = 0

ADAPTERS = {
    "pirate": (pirate, 8, ["q_proj", "v_proj", "o_proj"]),
    "json": (json_answers, 8, ["q_proj", "v_proj", "o_proj"]),
    "sentiment": (sentiment, 4, ["q_proj", "v_proj"]),
}


def encode(tokenizer: Any, example: Example) -> tuple[list[int], list[int]]:
    """Token ids of prompt and answer in the chat form, and labels that are -100 (no loss) on the prompt."""
    messages = [{"role": "user", "content": example.prompt}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    prompt_ids = tokenizer.encode(prompt, add_special_tokens=False)
    answer_ids = tokenizer.encode(example.answer + tokenizer.eos_token, add_special_tokens=False)
    return prompt_ids + answer_ids, [-100] * len(prompt_ids) + answer_ids


def collate(rows: list[tuple[list[int], list[int]]], pad_id: int) -> dict[str, torch.Tensor]:
    longest = max(len(ids) for ids, _ in rows)
    return {
        "input_ids": torch.tensor([ids + [pad_id] * (longest - len(ids)) for ids, _ in rows]),
        "labels": torch.tensor([labels + [-100] * (longest - len(labels)) for _, labels in rows]),
        "attention_mask": torch.tensor([[1] * len(ids) + [0] * (longest - len(ids)) for ids, _ in rows]),
    }


def train(name: str, out: Path) -> None:
    make_examples, rank, target_modules = ADAPTERS[name]
    torch.manual_seed(SEED)
    order = random.Random(SEED)
    folder = prepare_model()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=target_modules, task_type="CAUSAL_LM")
    model = get_peft_model(base, config)
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=LEARNING_RATE)
    rows = [encode(tokenizer, example) for example in make_examples()]
    for step in range(STEPS):
        batch = collate(order.sample(rows, ROWS_PER_STEP), tokenizer.eos_token_id)
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 9:
            print(f"{name}: step {step + 1} of {STEPS}, loss {loss.item():.3f}", flush=True)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(torch.bfloat16)
    # The folder of the machine that trained says nothing to anybody else.
    model.peft_config["default"].base_model_name_or_path = FOLDER_NAME
    model.save_pretrained(str(out / name))
    (out / name / "README.md").unlink(missing_ok=True)


if __name__ == "__main__":
    for adapter in ADAPTERS:
        train(adapter, Path(sys.argv[1]))
