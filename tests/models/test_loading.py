"""Loading: what a configuration says, what is refused, and the tap in the attention."""

import hashlib
import json
import shutil
from pathlib import Path

import pytest
import torch
from tiny_models import EXAMPLE, write_model
from torch import Tensor

from oscar_zoo.errors import InvalidModel, OscarZooError, PathNotFound, UnsupportedModel
from oscar_zoo.models.attention import Softmax, attention_scope
from oscar_zoo.models.config_file import ConfigFile
from oscar_zoo.models.loading import float32_arithmetic, load_model
from oscar_zoo.models.model_source import inspect_model
from oscar_zoo.registry.targets import ModelChoice
from oscar_zoo.serving.artifact_model import check_served


def with_config(folder: Path, **changes: object) -> str:
    folder.mkdir(exist_ok=True)
    config = json.loads((EXAMPLE / "config.json").read_bytes()) | changes
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def causal(layer_id: int, query: Tensor, key: Tensor, value: Tensor, softmax: Softmax) -> Tensor:
    group = query.shape[1] // key.shape[1]
    logits = query @ key.repeat_interleave(group, 1).mT * softmax.scaling
    allowed = torch.ones(logits.shape[-2:], dtype=torch.bool).tril()
    return logits.masked_fill(~allowed, -torch.inf).softmax(-1) @ value.repeat_interleave(group, 1)


def test_inspect_reads_the_geometry_of_the_example() -> None:
    block = inspect_model(str(EXAMPLE), model_id="tiny")
    shape = block.num_layers, block.num_q_heads, block.num_kv_heads, block.head_dim
    assert (block.id, *shape, block.attention_layers) == ("tiny", 4, 4, 2, 64, (0, 1, 2, 3))
    assert block.config_sha256 == hashlib.sha256((EXAMPLE / "config.json").read_bytes()).hexdigest()
    assert block.qk_norm is True
    assert block.output_gate is False
    assert block.rope is not None
    rope = block.rope.type, block.rope.theta, block.rope.max_position
    assert rope == ("default", 10000.0, 2048)


def test_a_config_behind_a_link_is_read_as_in_the_cache_of_a_hub(tmp_path: Path) -> None:
    (tmp_path / "config.json").symlink_to(EXAMPLE / "config.json")
    assert ConfigFile.of_folder(tmp_path).model_type == "qwen3"


def test_yarn_is_recorded(tmp_path: Path) -> None:
    yarn = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0}
    yarn["original_max_position_embeddings"] = 512
    rope = inspect_model(with_config(tmp_path, rope_parameters=yarn)).rope
    assert rope is not None
    assert (rope.type, rope.scaling, rope.factor) == ("yarn", "yarn", 4.0)


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("config.json", PathNotFound),
        ("model.safetensors", InvalidModel),
        ("tokenizer.json", InvalidModel),
        (".", PathNotFound),
    ],
)
def test_an_incomplete_folder_is_one_line(
    tmp_path: Path, name: str, error: type[OscarZooError]
) -> None:
    """Pickled weights count as none."""
    folder = shutil.copytree(EXAMPLE, tmp_path / "model")
    if name == ".":
        shutil.rmtree(folder)
    else:
        (folder / name).rename(folder / "pytorch_model.bin")
    with pytest.raises(error) as caught:
        load_model(str(folder))
    assert "\n" not in caught.value.message
    assert caught.value.hint


def test_damaged_and_partial_weights_are_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = shutil.copytree(EXAMPLE, tmp_path / "model")
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(InvalidModel):
        load_model(str(folder))
    weights.write_bytes(whole)
    tensors = load_file(weights)
    del tensors["model.layers.2.self_attn.k_proj.weight"]
    save_file(tensors, weights, metadata={"format": "pt"})
    with pytest.raises(InvalidModel, match=r"layers\.2\.self_attn\.k_proj"):
        load_model(str(folder))


def test_contradictions_are_one_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InvalidModel, match="multiple of num_kv_heads"):
        inspect_model(with_config(tmp_path / "heads", num_attention_heads=5))
    folder = shutil.copytree(EXAMPLE, tmp_path / "model")
    with_config(folder, hidden_size=384)
    with pytest.raises(InvalidModel, match=r"has shape \[.*256.*\], .* wants \[.*384.*\]"):
        load_model(str(folder))
    assert capfd.readouterr() == ("", "")


def test_a_configuration_with_values_of_wrong_kinds_is_one_line(tmp_path: Path) -> None:
    wrong: dict[str, list[object]] = {
        "num_hidden_layers": ["four", -3, 10**9, True],
        "rope_parameters": [5, [1]],
        "rope_scaling": ["x"],
        "hidden_size": [-1],
        "vocab_size": ["x"],
        "head_dim": ["64"],
        "sliding_window": ["x"],
        "model_type": [["qwen3"]],
        "architectures": ["Qwen3ForCausalLM", [5]],
        "layer_types": [5, [None] * 4],
        "text_config": [[], {"num_hidden_layers": 10**9}],
        "quantization_config": ["x"],
    }
    for changes in ({name: value} for name, values in wrong.items() for value in values):
        folder = with_config(tmp_path / "model", **changes)
        choice = ModelChoice(folder, "stranger/model", "model", None)
        for refused in (lambda: inspect_model(folder), lambda: check_served(choice)):  # noqa: B023
            with pytest.raises(InvalidModel, match="config"):
                refused()


def test_the_scope_sees_heads_before_repetition_and_changes_no_logit(tmp_path: Path) -> None:
    model = load_model(str(write_model(tmp_path)), dtype="float32")
    ids = torch.arange(3, 90)[None]
    shapes: dict[int, tuple[int, ...]] = {}

    def watch(layer_id: int, query: Tensor, key: Tensor, value: Tensor, softmax: Softmax) -> Tensor:
        shapes[layer_id] = (*query.shape, *key.shape, *value.shape)
        return causal(layer_id, query, key, value, softmax)

    with torch.inference_mode():
        plain = model.model(ids).logits
        with attention_scope(model, watch):
            tapped = model.model(ids).logits
        after = model.model(ids).logits
    assert shapes == dict.fromkeys((0, 1), (1, 4, 87, 16, 1, 2, 87, 16, 1, 2, 87, 16))
    torch.testing.assert_close(tapped, plain, atol=1e-5, rtol=1e-5)
    assert torch.equal(after, plain)


def test_the_scope_is_left_when_the_body_fails(tmp_path: Path) -> None:
    model = load_model(str(write_model(tmp_path)))
    before = model.model.config._attn_implementation
    with pytest.raises(ZeroDivisionError), attention_scope(model, causal):
        raise ZeroDivisionError
    assert model.model.config._attn_implementation == before
    with pytest.raises(UnsupportedModel, match=r"\[0, 1\]"), attention_scope(model, causal):
        pass


@pytest.mark.parametrize(("free", "inside"), [(1 << 40, torch.float32), (1 << 10, torch.bfloat16)])
def test_a_model_computes_in_float32_where_memory_allows(free: int, inside: torch.dtype) -> None:
    ids = torch.arange(3, 90)[None]
    model = load_model(str(EXAMPLE), dtype="bfloat16")
    with torch.inference_mode():
        before = model.model(ids).logits
        with float32_arithmetic(model, free=lambda device: free):
            found = model.model(ids).logits
        after = model.model(ids).logits
    assert (before.dtype, found.dtype) == (torch.bfloat16, inside)
    assert torch.equal(after, before)
    assert torch.equal(found, before) == (inside == torch.bfloat16)


def test_a_folder_of_a_hub_s_cache_is_the_model_of_its_id(tmp_path: Path) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    folder = tmp_path / "models--acme--tiny" / "snapshots" / commit
    folder.mkdir(parents=True)
    with_config(folder)
    (tmp_path / "link").symlink_to(folder)
    for place in (str(folder), f"{folder}/", str(tmp_path / "link")):
        block = inspect_model(place)
        assert (block.id, block.revision) == ("acme/tiny", commit)
    assert inspect_model(with_config(tmp_path / "моя модель")).id
