"""Texts known by name, so `compute` and `eval` work without a file. Needs no torch.

Each name has a calibration split and a validation split whose documents do not overlap.
"""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Literal

from oscar_zoo.errors import PathNotFound, UsageError

NAMES = ("manuals",)
Split = Literal["calibration", "validation"]


def text_path(name_or_path: str, split: Split) -> Path:
    """The file that `name_or_path` means.

    Args:
        name_or_path: a name of `NAMES` or a path; an existing path wins.
    """
    path = Path(name_or_path).expanduser()
    if path.is_dir():
        raise UsageError(f"{name_or_path} is a folder.", hint="give one text or .jsonl file")
    if path.exists():
        return path
    if name_or_path in NAMES:
        return Path(str(resources.files("oscar_zoo.texts") / f"{split}.txt"))
    raise PathNotFound(
        f"no such text: {name_or_path}",
        hint=f"give a file, or a text known by name: {', '.join(NAMES)}",
    )


def read_text(name_or_path: str, split: Split) -> str:
    """The text itself, as strict UTF-8.

    Raises what `text_path` raises, and `UsageError` when the file is not text.
    """
    path = text_path(name_or_path, split)
    try:
        return path.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{path} is not UTF-8 text (byte {error.start}).", hint="give a plain text file"
        ) from None
