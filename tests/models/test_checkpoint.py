"""Weights from files: what transformers would have made of them, float8 included, and what is
refused before."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tiny_models import EXAMPLE, INDEX, build, change_config, float8_pair, save_model
from torch import nn

from oscar_zoo.errors import InvalidModel, UnsupportedModel
from oscar_zoo.models.checkpoint import LazyTensor, dequantize, materialize, sources
from oscar_zoo.models.loading import load_model


def same_weights(one: nn.Module, other: nn.Module) -> bool:
    mine, theirs = (dict(model.state_dict()) for model in (one, other))
    return mine.keys() == theirs.keys() and all(torch.equal(mine[key], theirs[key]) for key in mine)


@pytest.mark.parametrize("family", ["Qwen3", "Qwen3Moe", "Qwen3Next"])
def test_a_saved_model_comes_back_to_the_bit(family: str, tmp_path: Path) -> None:
    """Experts are many tensors in the files and one in the model."""
    before = build(family, torch.float32).model
    loaded = load_model(str(save_model(tmp_path / "model", family, shard="20KB")))
    assert len(list((tmp_path / "model").glob("*.safetensors"))) > 2
    assert same_weights(loaded.model, before)
    assert not any(isinstance(tensor, LazyTensor) for tensor in loaded.model.state_dict().values())


def test_tied_embeddings_stay_one_tensor() -> None:
    model = load_model(str(EXAMPLE)).model
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_notes_of_operations_give_what_the_operations_give() -> None:
    class Source:
        def __init__(self, tensor: torch.Tensor) -> None:
            self.tensor, self.shape, self.dtype = tensor, tensor.shape, tensor.dtype

    parts = [torch.randn(4, 6) for _ in range(3)]

    def loader(given: list[torch.Tensor]) -> list[torch.Tensor]:
        joined = torch.cat([torch.stack(given[:2]).flatten(0, 1), given[2]]).to(torch.bfloat16)
        left, right = joined.chunk(2, 1)
        return [left.t().contiguous(), (right * 2).to(device="cpu", dtype=torch.float32)]

    lazy = loader([LazyTensor.of(Source(one)) for one in parts])
    for got, want in zip(lazy, loader(parts), strict=True):
        assert got.is_meta and got.shape == want.shape
        assert torch.equal(materialize(got, lambda source: source.tensor), want)


def test_unread_weights_that_were_changed_are_known_no_more() -> None:
    unread = LazyTensor.of(torch.zeros(3))
    later = unread.add_(1) * 2
    for one in (unread, later):
        with pytest.raises(RuntimeError, match=r"add_.* not read"):
            materialize(one, lambda source: source)
        with pytest.raises(RuntimeError, match="not read"):
            list(sources(one))


@pytest.mark.parametrize(
    ("family", "block"), [(None, (128, 128)), (None, (96, 40)), ("Qwen3Moe", (16, 16))], ids=str
)
def test_float8_is_dequantized(family: str | None, block: tuple[int, int], tmp_path: Path) -> None:
    """704 rows and 256 columns of the example: the last blocks are ragged. Experts are dequantized
    before they are joined."""
    source = EXAMPLE if family is None else save_model(tmp_path / "model", family)
    quantized, plain = (load_model(str(folder)) for folder in float8_pair(source, tmp_path, block))
    assert same_weights(quantized.model, plain.model)
    assert quantized.dtype == plain.dtype == ("bfloat16" if family is None else plain.dtype)
    assert quantized.block.weights is not None
    assert quantized.block.weights.quantization == "fp8"


def test_one_scale_for_a_whole_weight() -> None:
    weight = torch.randn(5, 7).to(torch.float8_e4m3fn)
    want = (weight.float() / 4).bfloat16()
    assert torch.equal(dequantize(weight, torch.tensor(0.25), (128, 128)), want)


def test_other_quantizations_are_refused_by_name(tmp_path: Path) -> None:
    folder = shutil.copytree(EXAMPLE, tmp_path / "model")
    change_config(folder, quantization_config={"quant_method": "gptq", "bits": 4})
    with pytest.raises(UnsupportedModel, match="quantized with gptq"):
        load_model(str(folder))


def rewrite_index(folder: Path, change: Callable[[dict[str, str]], object]) -> None:
    index = json.loads((folder / INDEX).read_bytes())
    change(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index))


def shorten(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


Change = Callable[[Path], object]
BROKEN: dict[str, tuple[Change, str]] = {
    "no index": (lambda f: (f / INDEX).unlink(), f"but no {INDEX}"),
    "missing shard": (
        lambda f: sorted(f.glob("*.safetensors"))[1].unlink(),
        "lacks 1 of .* weight",
    ),
    "index without names": (lambda f: (f / INDEX).write_text('{"weight_map": {}}'), "is no index"),
    "index that is no JSON": (lambda f: (f / INDEX).write_text("{"), "is no index"),
    "index with a path": (
        lambda f: rewrite_index(f, lambda names: names.update(a="../model.safetensors")),
        "is no index",
    ),
    "tensor of another shard": (
        lambda f: rewrite_index(f, lambda names: names.update(extra=min(names.values()))),
        "lacks extra",
    ),
    "half a shard": (lambda f: shorten(min(f.glob("*.safetensors"))), "cannot load .*00001-of"),
}


@pytest.mark.parametrize("broken", BROKEN)
def test_a_broken_checkpoint_is_one_line(broken: str, tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", shard="20KB")
    breaking, said = BROKEN[broken]
    breaking(folder)
    with pytest.raises(InvalidModel, match=said) as refusal:
        load_model(str(folder))
    assert "\n" not in refusal.value.message
    assert refusal.value.hint


@pytest.mark.parametrize(
    ("size", "said"),
    [([64, 64], r"has shape \[2, 6\], blocks of 64 x 64"), ([0], "weight_block_size")],
)
def test_contradictory_float8_is_refused(size: list[int], said: str, tmp_path: Path) -> None:
    folder, _ = float8_pair(EXAMPLE, tmp_path)
    config = json.loads((folder / "config.json").read_bytes())["quantization_config"]
    change_config(folder, quantization_config=config | {"weight_block_size": size})
    with pytest.raises(InvalidModel, match=said):
        load_model(str(folder))
