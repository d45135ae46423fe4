"""How a model's authors want it to be sampled: its `generation_config.json`. Needs no torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from oscar_zoo.errors import InvalidModel
from oscar_zoo.models import model_hub

NAME = "generation_config.json"


def read_generation_config(source: str, revision: str | None = None) -> dict[str, Any]:
    """The object in `generation_config.json` of a model, empty when it has none."""
    path = Path(source) / NAME if Path(source).is_dir() else _of_hub(source, revision)
    if path is None or not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        value = None
    if not isinstance(value, dict):
        raise InvalidModel(f"{path} is no JSON object.", hint="fetch the model again")
    return value


def _of_hub(source: str, revision: str | None) -> Path | None:
    from transformers.utils import cached_file

    try:
        found = cached_file(source, NAME, revision=revision or "main", **model_hub.search_limits())
    except OSError:  # the repository has none, or it cannot be had: then the defaults are taken
        return None
    return Path(found) if found else None
