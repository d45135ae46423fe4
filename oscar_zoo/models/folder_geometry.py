"""Geometry of a model in a folder.

It is read from `config.json` when that file says everything, and otherwise from transformers.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

from oscar_zoo.artifact.specs import Geometry
from oscar_zoo.models import config_file
from oscar_zoo.models.config_file import ConfigFile


def geometry_of_folder(
    folder: Path, model_id: str | None = None, config: ConfigFile | None = None
) -> Geometry:
    """The shape of the KV cache of the model in `folder`, which messages call `model_id`."""
    model_id = model_id or folder.resolve().name
    config = config or ConfigFile.of_folder(folder)
    if config_file.says_all(config) or importlib.util.find_spec("transformers") is None:
        return config_file.describe(config, model_id).geometry
    from oscar_zoo.models.model_source import inspect_model

    return inspect_model(str(folder.absolute()), model_id=model_id).geometry
