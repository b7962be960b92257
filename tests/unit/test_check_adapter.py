"""`lora-worker check-adapter`, as an operator runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from support.tiny_models import save_adapter


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    code = "from lora_worker.cli import main; main()"
    command = [sys.executable, "-c", code, "check-adapter", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_it_says_what_would_be_served_or_why_not(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    base = tiny_model("llama")
    folder = save_adapter(base, tmp_path / "good", seed=1, r=4, target_modules=["q_proj"])
    table = run(str(folder), "--model", str(base))
    assert table.returncode == 0
    assert "yes, exactly as PEFT does" in table.stdout
    found = json.loads(run(str(folder), "--model", str(base), "--json").stdout)
    assert (found["served"], found["modules"], found["ranks"]) == (True, 2, [4])
    wide = save_adapter(base, tmp_path / "wide", seed=1, r=80, target_modules=["q_proj"])
    refused = run(str(wide), "--model", str(base))
    assert refused.returncode == 1
    assert refused.stdout.startswith("refused: ")
    assert "max_lora_rank" in refused.stdout
    found = json.loads(run(str(wide), "--model", str(base), "--json").stdout)
    assert not found["served"]
    assert "rank 80" in found["reason"]
    unasked = run(str(folder))
    assert unasked.returncode == 1
    assert "give --model" in unasked.stderr
    lost = run(str(folder), "--model", str(tmp_path / "nowhere"))
    assert lost.returncode == 1
    assert "nowhere" in lost.stderr
    assert "Traceback" not in lost.stderr
