"""Configurations that a newer transformers wrote than the one that is installed."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Any

from oscar_zoo.errors import UnsupportedModel

PER_LAYER_SINCE = (5, 15)
"""The first transformers known to read `per_layer_config`."""


def refuse_misread(text: Any, model_id: str) -> None:
    """Refuse a model whose head sizes the installed transformers would replace by others.

    Newer releases write `per_layer_config` for Gemma 4, and leave out the names that older ones
    read. An older one takes its defaults without a word, and so does SGLang with it.
    """
    here = installed()
    if here is None or reads_layers(here):
        return
    if isinstance(getattr(text, "per_layer_config", None), dict):
        kind = getattr(text, "model_type", "of no type")
        raise UnsupportedModel(
            f"{model_id} ({kind}) gives the sizes of its heads as per_layer_config, which"
            f" transformers {here} does not read.",
            hint="install SGLang 0.5.23 with the transformers that it wants, or use a checkpoint"
            " whose config.json has global_head_dim",
        )


def written_by_newer(config: Any) -> str | None:
    """The release that wrote a configuration, where it is newer than the installed one."""
    here, there = installed(), getattr(config, "transformers_version", None)
    if here is None or not isinstance(there, str) or _numbers(there) <= _numbers(here):
        return None
    return there


def installed() -> str | None:
    """The release of transformers that is installed, if any."""
    try:
        return version("transformers")
    except PackageNotFoundError:
        return None


def reads_layers(release: str) -> bool:
    """Whether this release of transformers reads `per_layer_config`."""
    return _numbers(release) >= PER_LAYER_SINCE


def _numbers(release: str) -> tuple[int, ...]:
    return tuple(int(part) for part in release.split(".")[:3] if part.isdecimal())
