"""The geometry of every recipe is what this package reads from a configuration of that model."""

from pathlib import Path

import pytest
from zoo_configs import write_config

from oscar_zoo.models.model_source import inspect_model
from oscar_zoo.registry.catalog import Catalog
from oscar_zoo.registry.recipe import ModelRecipe


@pytest.mark.parametrize("recipe", Catalog.packaged().recipes(), ids=lambda recipe: recipe.name)
def test_a_configuration_has_the_geometry_of_a_recipe(recipe: ModelRecipe, tmp_path: Path) -> None:
    assert inspect_model(str(write_config(tmp_path, recipe))).geometry == recipe.geometry
