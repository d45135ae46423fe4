"""What Python callers pass to the calls of `oscar_zoo`, as the values that requests hold."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from oscar_zoo.errors import UsageError

if TYPE_CHECKING:
    from oscar_zoo.artifact.specs import Clip


def clip_of(clip: tuple[float, float] | Clip | None) -> Clip | None:
    """Clip ratios of keys and values; raises `UsageError` when one is not between 0 and 1."""
    from oscar_zoo.artifact.specs import Clip

    if not isinstance(clip, tuple):
        return clip
    k, v = clip
    try:
        return Clip(k=k, v=v)
    except ValueError:
        raise UsageError(f"clip {k}, {v} is not two clip ratios between 0 and 1.") from None


def model_text(model: str | Path) -> str:
    """A model as text; a `Path` is written so that it can only mean a folder."""
    from oscar_zoo.artifact.names import path_text

    return path_text(model) if isinstance(model, Path) else model
