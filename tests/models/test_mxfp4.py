"""gpt-oss as it is published: experts in MXFP4, read as the bfloat16 weights they stand for."""

from pathlib import Path

import pytest
import torch
from architectures import write_architecture
from safetensors.torch import load_file, save_file
from tiny_models import change_config
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from oscar_zoo.errors import InvalidModel
from oscar_zoo.models.checkpoint import unpack
from oscar_zoo.models.loading import load_model

WEIGHTS = "model.safetensors"


def packed(shape: torch.Size, seed: int) -> tuple[Tensor, Tensor]:
    """Random blocks and scales of a tensor of a shape."""
    experts, width, rows = shape
    draw = torch.Generator().manual_seed(seed)
    blocks = torch.randint(0, 256, (experts, rows, width // 32, 16), generator=draw)
    scales = torch.randint(118, 124, (experts, rows, width // 32), generator=draw)
    return blocks.byte(), scales.byte()


def packed_model(folder: Path) -> tuple[Path, dict[str, Tensor]]:
    """A checkpoint with experts in MXFP4, and what these stand for by transformers."""
    write_architecture("gpt_oss", folder)
    stored, meant = {}, {}
    for number, (name, weight) in enumerate(sorted(load_file(folder / WEIGHTS).items())):
        if ".experts." in name and weight.ndim == 3:
            blocks, scales = packed(weight.shape, number)
            stored[f"{name}_blocks"], stored[f"{name}_scales"] = blocks, scales
            meant[name] = convert_moe_packed_tensors(blocks.clone(), scales.clone())
        else:
            stored[name] = weight
    save_file(stored, folder / WEIGHTS, metadata={"format": "pt"})
    change_config(folder, quantization_config={"quant_method": "mxfp4"})
    return folder, meant


@pytest.mark.parametrize("stream", [False, True])
def test_experts_are_what_transformers_makes_of_them(stream: bool, tmp_path: Path) -> None:
    folder, meant = packed_model(tmp_path / "model")
    loaded = load_model(str(folder), stream=stream)
    assert loaded.dtype == "bfloat16"
    assert loaded.block.weights is not None
    assert loaded.block.weights.quantization == "mxfp4"
    with torch.inference_mode():
        assert loaded.model(torch.arange(20, 60)[None]).logits.isfinite().all()
    if not stream:
        weights = dict(loaded.model.named_parameters())
        assert len(meant) == 8
        assert all(torch.equal(weights[name], value) for name, value in meant.items())


def test_every_code_and_exponent_is_exact() -> None:
    codes = torch.arange(256, dtype=torch.uint8).reshape(1, 1, 16, 16)
    for exponent in (120, 127, 134):
        scales = torch.full((1, 1, 16), exponent, dtype=torch.uint8)
        want = convert_moe_packed_tensors(codes.clone(), scales.clone())
        assert torch.equal(unpack(codes, scales), want)


def test_scales_that_do_not_fit_are_named(tmp_path: Path) -> None:
    folder, _ = packed_model(tmp_path / "model")
    weights = load_file(folder / WEIGHTS)
    name = next(name for name in weights if name.endswith("_scales"))
    save_file({**weights, name: weights[name][:, :-1].contiguous()}, folder / WEIGHTS)
    with pytest.raises(InvalidModel, match=r"_blocks and its scales have shapes .*MXFP4"):
        load_model(str(folder))
