"""A `config.json` in the spelling of newer releases of transformers (5.15 to 5.23) has the geometry
that it has in the older spelling, and what the installed release misreads is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from architectures import write_config

from oscar_zoo.engines.sglang.refusals import check_config
from oscar_zoo.errors import UnsupportedModel
from oscar_zoo.models.config_file import ConfigFile, describe, geometry_of_folder, says_all
from oscar_zoo.models.geometry import installed, reads_layers
from oscar_zoo.models.model_source import inspect_model

Values = dict[str, Any]
NEWER = "5.23.0"


def rewritten(folder: Path, change: Callable[[Values], None]) -> ConfigFile:
    """The file as a newer transformers writes it."""
    path = folder / "config.json"
    values = json.loads(path.read_text())
    change(values.get("text_config", values))
    path.write_text(json.dumps(values | {"transformers_version": NEWER}))
    return ConfigFile.of_folder(folder)


def gemma4(text: Values) -> None:
    own = {"head_dim": text.pop("global_head_dim")}
    own["num_key_value_heads"] = text.pop("num_global_key_value_heads")
    full = [i for i, kind in enumerate(text["layer_types"]) if kind == "full_attention"]
    text["per_layer_config"] = {str(i): own for i in full}


def hybrid(text: Values) -> None:
    words = {"mamba": "linear_attention", "attention": "full_attention"}
    name = "layer_types" if "layer_types" in text else "layers_block_type"
    text[name] = [words[kind] for kind in text[name]]


SPELLINGS = {
    "gemma4": gemma4,
    "gemma4-experts": gemma4,
    "gemma4_unified": gemma4,
    "granite-4-h": hybrid,
    "nemotron_h": hybrid,
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_the_geometry_is_that_of_the_older_spelling(name: str, tmp_path: Path) -> None:
    folder = write_config(name, tmp_path / name)
    wanted = geometry_of_folder(folder)
    file = rewritten(folder, SPELLINGS[name])
    assert describe(file, name).geometry == wanted
    assert not name.startswith("gemma4") or says_all(file)


@pytest.mark.skipif(reads_layers(installed() or ""), reason="this transformers reads them")
def test_head_sizes_by_layer_are_refused_where_transformers_replaces_them(tmp_path: Path) -> None:
    """The installed release would take 512 channels and the KV heads of the other layers."""
    folder = write_config("gemma4", tmp_path / "tuned")
    file = rewritten(folder, gemma4)
    for refused in (lambda: inspect_model(str(folder)), lambda: check_config(file, "tuned")):
        with pytest.raises(UnsupportedModel, match="as per_layer_config, which") as refusal:
            refused()
        assert "SGLang 0.5.23" in (refusal.value.hint or "")
