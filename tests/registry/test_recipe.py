from __future__ import annotations

from importlib import resources

import pytest

from oscar_zoo.errors import MalformedFile
from oscar_zoo.registry.recipe import load_recipe

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
