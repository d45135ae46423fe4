"""What measurements share: texts known by name, the phases of long work, and words for tables.

Needs no torch. Each text has a calibration split and a validation split whose documents do not
overlap.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from oscar_zoo.errors import PathNotFound, UsageError

if TYPE_CHECKING:
    from oscar_zoo.artifact.manifest import ModelBlock

TEXTS = {"mix": "mix-{}.jsonl", "manuals": "{}.txt"}
"""Files of `oscar_zoo.texts` by the name of a text, with the split in place of the braces."""
Split = Literal["calibration", "validation"]
Progress = Callable[[int, int, str], None]
"""Called with `(done, total, name of the phase)`, counted in the unit of that phase. A total of 0
says only that the phase has begun; else it never changes. A phase may end early or be left out."""


@dataclass(frozen=True)
class Phase:
    """The `unit` is empty when nothing is counted; `seconds` are expected, or only a share of the
    sum where nothing is known."""

    name: str
    unit: str = ""
    seconds: float = 1.0


def text_path(name_or_path: str, split: Split) -> Path:
    """The file that a name of `TEXTS` or a path means; an existing path wins."""
    path = Path(name_or_path).expanduser()
    if path.is_dir():
        raise UsageError(f"{name_or_path} is a folder.", hint="give one text or .jsonl file")
    if path.exists():
        return path
    if name_or_path in TEXTS:
        return _shipped(name_or_path, split)
    raise PathNotFound(
        f"no such text: {name_or_path}",
        hint=f"give a file, or a text known by name: {', '.join(TEXTS)}",
    )


def read_text(name_or_path: str, split: Split) -> str:
    """The text itself, as strict UTF-8; the documents of `mix` are joined as they are in a text."""
    path = text_path(name_or_path, split)
    if name_or_path in TEXTS and path.suffix == ".jsonl":
        return "\n<|endoftext|>\n".join(one["text"] for one in mixed(split))
    try:
        return path.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{path} is not UTF-8 text (byte {error.start}).", hint="give a plain text file"
        ) from None


def mixed(split: Split) -> list[dict[str, str]]:
    lines = _shipped("mix", split).read_text("utf-8").rstrip("\n").split("\n")
    return [json.loads(line) for line in lines]


def _shipped(name: str, split: Split) -> Path:
    return Path(str(resources.files("oscar_zoo.texts") / TEXTS[name].format(split)))


def ticking(progress: Progress, total: int, unit: str = "") -> Callable[..., None]:
    """A callback that counts one more of `total`, or as many more as it is told."""
    done = 0

    def tick(more: int = 1) -> None:
        nonlocal done
        done += more
        progress(done, total, unit)

    return tick


def fitting(length: int, model: ModelBlock) -> int:
    return min(length, (model.rope and model.rope.max_position) or length)


def duration(seconds: float) -> str:
    """A duration in words, rounded up so that it does not look exact."""
    if seconds <= 50:
        return f"{10 * max(1, math.ceil(seconds / 10))} s"
    if seconds < 90 * 60:
        minutes = math.ceil(seconds / 60)
        return f"{minutes} minute{'s' if minutes > 1 else ''}"
    return f"{seconds / 3600:.0f} hours"


_TITLES = {
    "bf16": "BF16",
    "int2": "INT2, no transform",
    "int2-hadamard": "INT2, Hadamard",
    "int2-hadamard-clip": "INT2, Hadamard, clipped",
    "artifact": "INT2, this artifact",
}


def cache_title(cache: str) -> str:
    """The name for people of a cache, or of whatever else has that name, such as a server."""
    return _TITLES.get(cache, cache)


def length_text(length: int) -> str:
    """`4096` as `4k`, `1000` as `1,000`."""
    return f"{length // 1024}k" if length >= 1024 and length % 1024 == 0 else f"{length:,}"
