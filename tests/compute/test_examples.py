"""The scripts in `examples/` that made the example model."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch
from tiny_models import EXAMPLE, write_model
from torch import Tensor

EXAMPLES = EXAMPLE.parents[1]


def logits(folder: Path) -> Tensor:
    from transformers import Qwen3ForCausalLM

    model = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        result: Tensor = model(torch.arange(0, 1500, 15)[None]).logits
    return result


def test_the_hard_variant_computes_the_same_logits(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    source, target = write_model(tmp_path / "source"), tmp_path / "hard"
    script = [
        sys.executable,
        str(EXAMPLES / "make_hard_variant.py"),
        str(source),
        str(target),
        "--seed",
        "3",
    ]
    subprocess.run(script, check=True)
    assert torch.equal(logits(source), logits(target))
    before, after = (load_file(folder / "model.safetensors") for folder in (source, target))
    changed = {
        name.split(".", 3)[3] for name in before if not torch.equal(before[name], after[name])
    }
    assert changed == {
        f"self_attn.{name}.weight" for name in ("k_norm", "q_norm", "v_proj", "o_proj")
    }
    ratio = (
        after["model.layers.1.self_attn.k_norm.weight"]
        / before["model.layers.1.self_attn.k_norm.weight"]
    )
    assert torch.equal(ratio, torch.exp2(torch.log2(ratio).round()))
    assert ratio.max() >= 8


def test_training_rows_ask_for_what_they_told(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    shutil.copy(EXAMPLES / "recall_tasks.py", tmp_path)
    sys.path.insert(0, str(tmp_path))
    try:
        from recall_tasks import ANSWER_WEIGHT, RecallTasks
    finally:
        sys.path.remove(str(tmp_path))
    tokenizer = Tokenizer.from_file(str(EXAMPLE / "tokenizer.json"))
    text = (EXAMPLES / "text/calibration.txt").read_text("utf-8")[:100_000]
    filler = np.array(tokenizer.encode(text, add_special_tokens=False).ids, dtype=np.uint16)
    tasks, answers = RecallTasks(tokenizer, filler, seed=1), 0
    for _ in range(20):
        tokens, weights = tasks.row(2049)
        assert len(tokens) == len(weights) == 2049
        row = tokenizer.decode(tokens)
        marked = [
            token if weight == ANSWER_WEIGHT else 0
            for token, weight in zip(tokens, weights, strict=True)
        ]
        for answer in (
            tokenizer.decode(marked, skip_special_tokens=False)
            .replace("<|endoftext|>", " ")
            .split()
        ):
            # a cut at the end of the row may leave part of an answer
            if len(answer) in (4, 6):
                assert row.count(answer) >= 2
                answers += 1
    assert answers > 50
