"""Recipes of models: how one is read, what it means for serving, and that what it says in the words
of `config.json` agrees with its geometry and with the sizes that the makers of the models state."""

from importlib import resources

import pytest
from tiny_artifacts import TINY

from oscar_kernels.spec import QuantSpec, group_channels
from oscar_zoo.errors import MalformedFile
from oscar_zoo.models.config_file import ConfigFile
from oscar_zoo.models.geometry import FULL_KINDS, layer_kinds
from oscar_zoo.models.weight_count import weights_of_config, weights_of_name
from oscar_zoo.registry.catalog import Catalog, recipe_for
from oscar_zoo.registry.recipe import ModelRecipe, config_of_recipe, load_recipe, serving_recipe

TEXT = """
name = "m"
hf_id = "org/m"
family = "M"
model_type = "qwen3"
[geometry]
num_layers = 8
num_q_heads = 8
num_kv_heads = 2
head_dim = 128
attention_layers = { every = 4, from = 3 }
[serving]
group_size = 64
clip = { k = 0.96, v = 0.92 }
[calibration]
sequences = 2
sequence_length = 512
[sources]
geometry = "a test"
"""


@pytest.mark.parametrize(
    ("written", "layers"),
    [
        ('"all"', tuple(range(8))),
        ("{ every = 4, from = 3 }", (3, 7)),
        ("{ every = 3 }", (0, 3, 6)),
        ("[1, 5]", (1, 5)),
    ],
)
def test_attention_layers_are_expanded(written: str, layers: tuple[int, ...]) -> None:
    recipe = load_recipe(TEXT.replace("{ every = 4, from = 3 }", written))
    assert recipe.geometry.attention_layers == layers
    assert recipe.geometry.v_head_dim == 128
    assert recipe.calibration.tokens == 1024


@pytest.mark.parametrize(
    ("old", "new", "seen"),
    [
        ('name = "m"', 'name = "m"\nhardware = "x"', "hardware"),
        ('name = "m"', 'name = "../m"', "../m"),
        ('name = "m"', 'name = "m"\non_hub = 0', "on_hub"),
        ('hf_id = "org/m"', 'hf_id = "m"', "hf_id"),
        ('hf_id = "org/m"', 'hf_id = "org/m"\ntensor_parallel = 3', "tensor_parallel"),
        ("group_size = 64", "group_size = 48", "group_size 48"),
        ("num_layers = 8", 'num_layers = "8"', "num_layers"),
        ("{ every = 4, from = 3 }", "{ every = 4, start = 3 }", "every"),
        ("{ every = 4, from = 3 }", "[3, 9]", "attention_layers"),
        ("[sources]", "[drafts]\nlayers = 1\nsteps = 3\n[sources]", "no entry in sources"),
        ("[sources]", "[drafts]\nlayers = 1\nsteps = 32\n[sources]\ndrafts = 'x'", "steps"),
        ("[sources]", "[drafts]\nlayers = 0\nsteps = 3\n[sources]\ndrafts = 'x'", "layers"),
        ("[sources]", "[drafts]\nlayers = 1\ntree = 2\n[sources]\ndrafts = 'x'", "steps"),
        ("[sources]", "[config]\nhidden_size = 64\n[sources]", "config has no entry"),
        ("[sources]", "[config]\nhidden_size = [1]\n[sources]\nconfig = 'x'", "hidden_size"),
        ("[sources]", "[sources", "not TOML"),
        ('[sources]\ngeometry = "a test"', "", "sources"),
    ],
)
def test_a_bad_recipe_is_refused_with_what_was_seen(old: str, new: str, seen: str) -> None:
    with pytest.raises(MalformedFile) as caught:
        load_recipe(TEXT.replace(old, new), what="m.toml")
    assert caught.value.reason.startswith("recipe.")
    assert seen in caught.value.message
    assert "m.toml" in caught.value.message


def test_every_packaged_recipe_gives_its_sources() -> None:
    texts = [e for e in resources.files("oscar_zoo.recipes").iterdir() if e.name.endswith(".toml")]
    assert len(texts) >= 50
    for entry in texts:
        recipe = load_recipe(entry.read_text("utf-8"), what=entry.name)
        assert entry.name == f"{recipe.name}.toml"
        assert {"geometry", "serving", "calibration"} <= set(recipe.sources)
        assert recipe.serving.windows.sink == 64
        assert recipe.serving.windows.recent == 256
        assert recipe.hf_id.endswith(f"/{recipe.name}")


@pytest.mark.parametrize(
    ("head_dim", "v_head_dim", "group"),
    [
        (128, 128, 128),
        (256, 128, 128),
        (64, 64, 64),
        (128, 64, 64),
        (64, 128, 64),
        (256, 64, 64),
        (96, 96, 96),
        (192, 128, 128),
    ],
)
def test_default_groups_cut_rows_of_k_and_v(head_dim: int, v_head_dim: int, group: int) -> None:
    geometry = TINY.model_copy(update={"head_dim": head_dim, "v_head_dim": v_head_dim})
    recipe = serving_recipe(None, geometry)
    assert recipe.group_size == group
    for width in (head_dim, v_head_dim):
        assert QuantSpec(width, group_channels(width, group)).num_groups in (1, 2, 4)


RECIPES = Catalog.packaged().recipes()
STATED = {
    "DeepSeek-R1-0528": 671, "DeepSeek-V2-Lite-Chat": 15.7, "GLM-4.5": 355,
    "GLM-4.5-Air": 106, "GLM-4.7-FP8": 355, "GLM-4.7-Flash": 30, "MiniMax-M2": 230,
    "MiniMax-M2.5": 230, "MiniMax-M2.7": 230, "Mistral-Large-Instruct-2411": 123,
    "Mixtral-8x22B-Instruct-v0.1": 141, "Mixtral-8x7B-Instruct-v0.1": 46.7,
    "Phi-4-mini-instruct": 3.8, "c4ai-command-r7b-12-2024": 8, "gpt-oss-120b": 117,
    "gpt-oss-20b": 21, "granite-4.0-h-tiny": 7, "phi-4": 14.7,
}  # fmt: skip
"""Billions of numbers that makers state, where names have no size; embeddings count for R7B."""


def numbers(recipe: ModelRecipe) -> float | None:
    """All numbers of a model by the shapes in its recipe, in whatever format they are."""
    values = config_of_recipe(recipe).as_written
    counted = weights_of_config(ConfigFile(values | {"quantization_config": None}))
    return None if counted is None else counted / 2


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda one: one.name)
def test_shapes_have_as_many_numbers_as_the_maker_states(recipe: ModelRecipe) -> None:
    """Names are rounded, and count towers for images, which the shapes leave out."""
    counted = numbers(recipe)
    if recipe.name in STATED:
        assert counted is not None and abs(counted / (STATED[recipe.name] * 1e9) - 1) < 0.025
    elif counted is not None and recipe.model_type != "qwen3":
        named = weights_of_name(recipe.name.replace("-FP8", ""))
        assert named is not None and abs(2 * counted / named - 1) < 0.09


@pytest.mark.parametrize(
    ("name", "states"),
    [
        ("NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", 23),
        ("NVIDIA-Nemotron-3-Super-120B-A12B-FP8", 40),
        ("NVIDIA-Nemotron-3-Ultra-550B-A55B-FP8", 48),
    ],
)
def test_the_pattern_of_nemotron_has_the_attention_of_its_geometry(name: str, states: int) -> None:
    recipe = recipe_for(name)
    assert recipe is not None
    kinds = layer_kinds(config_of_recipe(recipe))
    assert kinds is not None and len(kinds) == recipe.geometry.num_layers
    attention = tuple(layer for layer, kind in enumerate(kinds) if kind in FULL_KINDS)
    assert attention == recipe.geometry.attention_layers
    assert sum(kind in ("M", "mamba") for kind in kinds) == states


def test_windows_are_shorter_than_the_context() -> None:
    for recipe in RECIPES:
        window = recipe.config.get("sliding_window")
        longest = recipe.config.get("max_position_embeddings", 32_768)
        if window is not None:
            assert isinstance(window, int) and isinstance(longest, int)
            assert 128 <= window < longest and window & (window - 1) == 0
            assert len(recipe.geometry.attention_layers) < recipe.geometry.num_layers
