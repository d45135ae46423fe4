"""The scripts in `examples/` that made the example model."""

import subprocess
import sys
from pathlib import Path

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
    script = EXAMPLES / "make_hard_variant.py"
    subprocess.run([sys.executable, script, source, target, "--seed", "3"], check=True)
    assert torch.equal(logits(source), logits(target))
    before, after = (load_file(folder / "model.safetensors") for folder in (source, target))
    changed = [name for name in before if not torch.equal(before[name], after[name])]
    assert {name.split(".")[4] for name in changed} == {"k_norm", "q_norm", "v_proj", "o_proj"}
    norm = "model.layers.1.self_attn.k_norm.weight"
    ratio = after[norm] / before[norm]
    assert torch.equal(ratio, torch.exp2(torch.log2(ratio).round()))
    assert ratio.max() >= 8
