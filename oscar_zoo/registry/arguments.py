"""What Python callers pass to the calls of `oscar_zoo`, as the values that verbs take, and those
values as words of a command line."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oscar_zoo.artifact.names import path_text
from oscar_zoo.errors import UsageError
from oscar_zoo.verb import Arg, parameters_of

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


def option_words(params: Any, **changes: Any) -> list[str]:
    """The options of a command line that mean `params`, with `changes` of fields."""
    words: list[str] = []
    for row in parameters_of(type(params)):
        value = changes.get(row.name, getattr(params, row.name))
        if isinstance(row.says, Arg) or (value == row.default and row.name not in changes):
            continue
        flag = row.says.flag or "--" + row.name.replace("_", "-")
        for one in value if isinstance(value, tuple) else (value,):
            if one is False and row.default is None:
                words.append(flag.replace("--", "--no-"))
            elif one is not None and one is not False:
                words += [flag] if one is True else [flag, str(one)]
    return words


def command_line(words: Sequence[str]) -> str:
    return f"oscar-zoo {shlex.join(words)}"
