"""Names of Hugging Face datasets: `ORG/NAME[@REVISION][:CONFIG][:SPLIT][#FIELD]`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Self

from oscar_zoo.errors import UsageError

GRAMMAR = "ORG/NAME[@REVISION][:CONFIG][:SPLIT][#FIELD]"
DEFAULT_SPLIT = "train"
SPLITS = ("train", "training", "validation", "valid", "val", "dev", "test")
"""A single part after the name is a split if it is one of these or starts with one and `_`, and a
config otherwise."""

_NAME = r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*"
_FORM = re.compile(
    r"(?P<name>[^@:#]+)(?:@(?P<revision>[\w./-]+))?(?::(?P<first>[\w.-]*))?(?::(?P<second>[\w.-]+))?(?:#(?P<field>.+))?"
)


@dataclass(frozen=True)
class DatasetName:
    """A dataset, or a folder of one, and what to read of it.

    Attributes:
        name: `ORG/NAME`, or the path of a folder.
        revision: commit, tag or branch; `None` for the newest.
        config: subset; `None` for the only or default one.
        split: of the config.
        field: to read; `None` for the first of `documents.FIELDS` that the first row has.
    """

    name: str
    revision: str | None = None
    config: str | None = None
    split: str = DEFAULT_SPLIT
    field: str | None = None

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read the form that the module docstring gives; `ORG/NAME::SPLIT` leaves it open."""
        match = _FORM.fullmatch(text)
        if match is None:
            raise UsageError(
                f"{text!r} is not the name of a dataset.", hint=f"datasets are called {GRAMMAR}"
            )
        name, revision, first, second, field = match.group(
            "name", "revision", "first", "second", "field"
        )
        if second is None and first and (first in SPLITS or first.split("_")[0] in SPLITS):
            first, second = None, first
        return cls(name, revision, first or None, second or DEFAULT_SPLIT, field)

    def __str__(self) -> str:
        revision = f"@{self.revision}" if self.revision else ""
        field = f"#{self.field}" if self.field else ""
        return f"{self.name}{revision}:{self.config or ''}:{self.split}{field}"

    @property
    def is_on_hub(self) -> bool:
        """Whether `name` has the form of a repository; it may be a folder all the same."""
        return re.fullmatch(_NAME, self.name) is not None
