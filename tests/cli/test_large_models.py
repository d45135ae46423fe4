"""A model larger than this machine: one line before anything is read, or the same result layer by
layer."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
from pathlib import Path

import pytest
from cli_output import parsed
from tiny_models import EXAMPLE, INDEX, TOKENIZER, change_config, write_model

from oscar_zoo.cli import main as cli

TEXT = EXAMPLE.parents[1] / "text/calibration.txt"
LAYERS, HIDDEN, INNER = 80, 8192, 1 << 19
SHAPES = {
    "mlp.gate_proj": (INNER, HIDDEN),
    "mlp.up_proj": (INNER, HIDDEN),
    "mlp.down_proj": (HIDDEN, INNER),
    "self_attn.q_proj": (256, HIDDEN),
    "self_attn.k_proj": (128, HIDDEN),
    "self_attn.v_proj": (128, HIDDEN),
    "self_attn.o_proj": (HIDDEN, 256),
    "self_attn.q_norm": (64,),
    "self_attn.k_norm": (64,),
    "input_layernorm": (HIDDEN,),
    "post_attention_layernorm": (HIDDEN,),
}


def run(*arguments: object) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = cli.run([str(argument) for argument in arguments])
    return status, out.getvalue(), err.getvalue()


@pytest.fixture
def huge(tmp_path: Path) -> Path:
    """Two terabytes of weights in files that take no room: all holes behind their headers."""
    folder = tmp_path / "huge"
    folder.mkdir()
    for name in ("config.json", *TOKENIZER):
        shutil.copyfile(EXAMPLE / name, folder / name)
    change_config(folder, hidden_size=HIDDEN, intermediate_size=INNER, num_hidden_layers=LAYERS)
    shapes = {"model.embed_tokens.weight": (2048, HIDDEN), "model.norm.weight": (HIDDEN,)}
    shapes |= {
        f"model.layers.{n}.{name}.weight": shape
        for n in range(LAYERS)
        for name, shape in SHAPES.items()
    }
    names = {}
    for number, (name, shape) in enumerate(shapes.items()):
        size = 2 * shape[0] * (shape[1] if len(shape) == 2 else 1)
        header = json.dumps(
            {name: {"dtype": "BF16", "shape": shape, "data_offsets": [0, size]}}
        ).encode()
        names[name] = f"model-{number:05}.safetensors"
        with (folder / names[name]).open("wb") as file:
            file.write(len(header).to_bytes(8, "little") + header)
            file.truncate(8 + len(header) + size)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": names}))
    return folder


def test_compute_says_how_much_is_missing_and_writes_nothing(huge: Path, tmp_path: Path) -> None:
    target = tmp_path / "made" / "rotation"
    status, out, err = run(
        "compute",
        huge,
        "--calib-data",
        TEXT,
        "--calib-tokens",
        "512",
        "--output-dir",
        target,
        "--device",
        "cpu",
        "--no-stream-weights",
    )
    assert (status, out) == (1, "")
    assert err.startswith("error: huge needs about 2064 GB on cpu, ") and " GB are free. " in err, (
        err
    )
    assert err.endswith("Use a device with more memory\n") and err.count("\n") == 1
    assert not target.parent.exists()


def test_a_streamed_computation_makes_the_same_artifact(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    made = []
    for choice in ("--stream-weights", "--no-stream-weights"):
        target = tmp_path / choice.strip("-")
        status, out, err = run(
            "compute",
            model,
            "--calib-data",
            TEXT,
            "--calib-tokens",
            "512",
            "--method",
            "wush",
            "--output-dir",
            target,
            "--device",
            "auto" if choice.startswith("--no") else "cpu",
            "--group-size",
            "16",
            choice,
            "--json",
        )
        assert status == 0, err
        made.append(parsed(out)["digest"])
    assert made[0] == made[1]
