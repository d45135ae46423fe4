"""The size of weights: counted at their bits from a `config.json` alone, and of files."""

import json
from pathlib import Path

import pytest
from cli_output import Cli

from oscar_zoo.models.config_file import ConfigFile
from oscar_zoo.models.weight_count import weights_of_config
from oscar_zoo.models.weight_files import INDEX, stored_weights

MODELS = Path(__file__).parents[2] / "docs/figures/models"


N = 1024 * 4096
DENSE = {
    "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 2, "vocab_size": 4096,
    "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 128,
}  # fmt: skip
"""Attention has 2 N numbers, dense layers have 6 N, and the embeddings N at either end."""
INT4 = {"num_bits": 4, "type": "int", "group_size": 128, "strategy": "group", "symmetric": True}
FP4 = {"num_bits": 4, "type": "float", "group_size": 16}
FP8 = {"num_bits": 8, "type": "float", "strategy": "channel"}


def groups(*targets: str, weights: object = INT4, **more: object) -> dict[str, object]:
    """The configuration of compressed-tensors, and of newer modelopt."""
    group = {"targets": list(targets), "weights": weights}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}} | more


def by_method(method: str, **more: object) -> dict[str, object]:
    return {"quant_method": method} | more


@pytest.mark.parametrize(
    ("quantization", "bits"),
    [
        (None, (16, 16, 16)),
        (by_method("fp8"), (8, 8, 16)),
        (by_method("fp8", modules_to_not_convert=["lm_head", "model.layers.0"]), (12, 12, 16)),
        (by_method("awq", bits=4, group_size=128), (4 + 20 / 128, 4 + 20 / 128, 16)),
        (
            by_method("awq", bits=4, group_size=64, modules_to_not_convert=["self_attn"]),
            (16, 4 + 20 / 64, 16),
        ),
        (by_method("gptq", bits=8, group_size=-1), (8, 8, 16)),
        (by_method("gptq", bits=4, group_size=128, lm_head=True), (4 + 20 / 128,) * 3),
        (groups("Linear", ignore=["lm_head"]), (4 + 16 / 128, 4 + 16 / 128, 16)),
        (groups("Linear"), (4 + 16 / 128,) * 3),
        (groups("Linear", weights=FP8, ignore=["re:.*lm_head", "re:.*self_attn.*"]), (16, 8, 16)),
        (groups("Linear", weights=FP8, ignore=[r"re:.*layers\.0\..*gate$"]), (8, 8, 8)),
        (groups("Linear", weights=FP4, ignore=["*self_attn*", "lm_head"]), (16, 4.5, 16)),
        (by_method("bitsandbytes", load_in_8bit=True), (8, 8, 16)),
        (by_method("bitsandbytes", load_in_4bit=True), (4.5, 4.5, 16)),
        (
            {
                "load_in_4bit": True,
                "bnb_4bit_use_double_quant": True,
                "llm_int8_skip_modules": ["model.language_model.layers.1.mlp"],
            },
            (4.125, 10.0625, 16),
        ),
        (by_method("modelopt", quant_algo="FP8"), (8, 8, 16)),
        (by_method("modelopt", quant_algo="NVFP4", ignore=["*layers.1.*"]), (10.25, 10.25, 16)),
        (by_method("modelopt", quant_algo="W4A16_AWQ", group_size=128), (4.125, 4.125, 16)),
    ],
)  # fmt: skip
def test_quantized_weights_count_at_their_bits(
    quantization: object, bits: tuple[float, float, float]
) -> None:
    """Bits of attention, of dense layers and of the head; embeddings stay whole."""
    counted = weights_of_config(ConfigFile(DENSE | {"quantization_config": quantization}))
    attention, dense, head = bits
    wanted = N * (2 * attention + 6 * dense + head + 16) / 8
    assert counted == pytest.approx(wanted, rel=1e-3)


@pytest.mark.parametrize(
    "quantization",
    [
        by_method("of-tomorrow"), by_method("awq"), by_method("awq", bits="4", group_size=128),
        by_method("gptq", bits=4, group_size=128, dynamic={"-:.*attn.*": {}}), {"bits": 4},
        groups("FusedLinear"), groups("re:.*mlp.experts.*"), groups("Linear", weights=None),
        groups("Linear", weights=INT4 | {"num_bits": 40}),
        groups("Linear", ignore=["re:(a+)+$"]), groups("Linear", ignore="lm_head"),
        groups("Linear", sparsity_config={"format": "sparse-24-bitmask"}),
        by_method("modelopt", quant_algo="MIXED_PRECISION"), by_method("bitsandbytes"),
    ],
)  # fmt: skip
def test_weights_in_an_unknown_format_have_no_known_size(
    cli: Cli, tmp_path: Path, quantization: object
) -> None:
    """Neither in 16 bits, nor by the size in the name of the folder."""
    config = ConfigFile.of_folder(MODELS / "Qwen3-30B-A3B").as_written
    folder = tmp_path / "Mine-30B"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    assert weights_of_config(ConfigFile.of_folder(folder)) is None
    assert "--weights" in cli.json(2, "fit-gpu", folder, "--memory", "80GB")["error"]["hint"]


@pytest.mark.parametrize(
    ("files", "size"),
    [
        (("model.safetensors", "consolidated.safetensors"), 1000),
        (("a.safetensors", "b.safetensors", "consolidated.safetensors", INDEX), 2000),
        (("a.safetensors", "consolidated.safetensors", INDEX), 0),  # b is missing
        (("a.safetensors", "c.safetensors"), 2000),
    ],
)
def test_files_stored_twice_count_once(tmp_path: Path, files: tuple[str, ...], size: int) -> None:
    for name in files:
        (tmp_path / name).write_bytes(bytes(1000))
    if INDEX in files:
        index = {"weight_map": {"x": "a.safetensors", "y": "a.safetensors", "z": "b.safetensors"}}
        (tmp_path / INDEX).write_text(json.dumps(index))
    assert stored_weights(tmp_path, ConfigFile({})) == (size, "bfloat16")
