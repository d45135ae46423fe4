"""What Python callers pass to the calls of `oscar_zoo`, as the values that verbs take, and those
values as words of a command line."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oscar_zoo.artifact.names import path_text
from oscar_zoo.errors import UsageError

if TYPE_CHECKING:
    from oscar_zoo.artifact.specs import Clip

    Numbers = int | Sequence[int]
    Clips = tuple[float, float] | Clip | Sequence[tuple[float, float] | Clip] | None


def clip_of(clip: tuple[float, float] | Clip | None) -> Clip | None:
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
    return path_text(model) if isinstance(model, Path) else model


def option_words(values: Mapping[str, Any]) -> list[str]:
    """Options of a command line by their names without dashes; `None`, `False` and an empty tuple
    leave one out, and a tuple gives one several times."""
    words: list[str] = []
    for name, value in values.items():
        for each in value if isinstance(value, tuple) else (value,):
            if each is True:
                words.append(f"--{name}")
            elif each is not None and each is not False:
                words += [f"--{name}", str(each)]
    return words


def command_line(words: Sequence[str]) -> str:
    return f"oscar-zoo {shlex.join(words)}"
