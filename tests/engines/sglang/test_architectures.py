"""The table of what works says the same as the code that refuses models by their `config.json`."""

from pathlib import Path

import pytest
from zoo_configs import write_config

from oscar_zoo.engines.sglang import refusals
from oscar_zoo.errors import UnsupportedModel
from oscar_zoo.models import config_file
from oscar_zoo.models.model_source import inspect_model
from oscar_zoo.registry.architectures import ARCHITECTURES, architecture
from oscar_zoo.registry.catalog import Catalog
from oscar_zoo.registry.recipe import ModelRecipe

RECIPES = Catalog.packaged().recipes()
FIRST = list({recipe.model_type: recipe for recipe in reversed(RECIPES)}.values())
"""One recipe of every model type."""


@pytest.mark.parametrize("recipe", FIRST, ids=lambda recipe: recipe.model_type)
def test_the_table_names_what_a_server_refuses(recipe: ModelRecipe, tmp_path: Path) -> None:
    written = config_file.ConfigFile(config_file.read_config(write_config(tmp_path, recipe)))
    row = architecture(recipe.model_type)
    assert row is not None
    try:
        refusals.check_config(written, recipe.name)
    except UnsupportedModel:
        assert (row.serve_cpu.state, row.serve_gpu.state) == ("does not work", "does not work")
    else:
        assert row.serve_gpu.state != "does not work"


@pytest.mark.parametrize("recipe", FIRST, ids=lambda recipe: recipe.model_type)
def test_the_table_names_what_cannot_be_computed(recipe: ModelRecipe, tmp_path: Path) -> None:
    row = architecture(recipe.model_type)
    assert row is not None
    try:
        inspect_model(str(write_config(tmp_path, recipe)))
    except UnsupportedModel:
        assert row.compute.state == "does not work"
    else:
        assert row.compute.state != "does not work"


def test_a_model_type_has_one_row_and_an_answer_one_kind_of_evidence() -> None:
    types = [name for row in ARCHITECTURES for name in row.model_types]
    assert len(types) == len({*types})
    assert all(architecture(recipe.model_type) for recipe in RECIPES)
    for row in ARCHITECTURES:
        for answer in (row.compute, row.evaluate, row.serve_cpu, row.serve_gpu):
            assert answer.tested is None or answer.reason is None
    assert architecture("unheard-of") is None
