"""Models and artifacts of random numbers have the shapes of real ones and pass the same checks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from oscar_zoo.artifact.artifact_folder import verify_path
from oscar_zoo.artifact.outcome import Verified
from oscar_zoo.evaluate.bench import sides
from oscar_zoo.models.model_source import inspect_model
from oscar_zoo.registry.catalog import Catalog
from oscar_zoo.registry.recipe import ModelRecipe

MODEL = Path(__file__).resolve().parents[2] / "examples" / "models" / "tiny-qwen3-hard"
KNOWN: list[ModelRecipe] = [
    recipe for recipe in Catalog.packaged().recipes() if recipe.weights is not None
]


@pytest.mark.parametrize("recipe", KNOWN, ids=lambda recipe: recipe.name)
def test_a_model_of_the_zoo_has_the_cache_of_its_recipe(
    recipe: ModelRecipe, tmp_path: Path
) -> None:
    sides.write_model(tmp_path / "m", sides.config_of_recipe(recipe), longest=1)
    assert inspect_model(str(tmp_path / "m")).geometry == recipe.geometry


@pytest.mark.parametrize("nested", [False, True])
def test_positions_grow_to_the_longest_request_and_never_shrink(
    nested: bool, tmp_path: Path
) -> None:
    inner = {"max_position_embeddings": 2048}
    config = {"text_config": inner} if nested else inner
    for number, (longest, want) in enumerate([(100, 2048), (5000, 5000 + sides.ROOM)]):
        sides.write_model(tmp_path / str(number), config, longest=longest)
        written = json.loads((tmp_path / str(number) / "config.json").read_text())
        assert sides.longest_context(written) == want
    assert inner == {"max_position_embeddings": 2048}
    assert sides.longest_context({"text_config": {}}) is None


def test_the_made_artifact_passes_verification(tmp_path: Path) -> None:
    geometry = inspect_model(str(MODEL)).geometry
    sides.write_rotations(tmp_path / "r", geometry)
    assert isinstance(verify_path(tmp_path / "r", geometry=geometry), Verified)


def test_what_prepares_images_and_text_comes_along_and_weights_do_not(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "given").mkdir()
    for name in ("preprocessor_config.json", "tokenizer.json", "model.safetensors"):
        (tmp_path / "given" / name).write_text(name)
    sides.copy_what_prepares_input(tmp_path / "given", tmp_path / "m")
    assert {path.name: path.read_text() for path in (tmp_path / "m").iterdir()} == {
        "preprocessor_config.json": "preprocessor_config.json",
        "tokenizer.json": "tokenizer.json",
    }
