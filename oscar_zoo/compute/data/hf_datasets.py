"""Rows of Hugging Face datasets, streamed through the optional library `datasets`.

Only the needed rows are downloaded, in the order of the dataset. Their commit is recorded, so the
same rows can be requested again.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Self, TypeVar

from oscar_zoo.compute.data.documents import Document, documents_of
from oscar_zoo.errors import (
    HubUnreachable,
    MissingDependency,
    OfflineError,
    OscarZooError,
    UsageError,
    go_online,
)
from oscar_zoo.models.model_hub import without_retries
from oscar_zoo.next_step import Install

GRAMMAR = "ORG/NAME[@REVISION][:CONFIG][:SPLIT][#FIELD]"
DEFAULT_SPLIT = "train"
SPLITS = ("train", "training", "validation", "valid", "val", "dev", "test")
"""A single part after the name is a split if it is one of these or starts with one and `_`, and a
config otherwise."""

_NAME = r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*"
_FORM = re.compile(r"([^@:#]+)(?:@([\w./-]+))?(?::([\w.-]*))?(?::([\w.-]+))?(?:#(.+))?")
OWN_FILE = "or give text of your own: --calib-data FILE"
_COMMIT = re.compile(r"@([0-9a-f]{40})(?:/|$)")
_OFFLINE = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "OSCAR_ZOO_OFFLINE")
_T = TypeVar("_T")


@dataclass(frozen=True)
class DatasetName:
    """A dataset, or the path of a folder of one, and what to read of it: `None` stands for the
    newest revision, the only or default config, and the first of `documents.FIELDS` in the first
    row."""

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
        name, revision, first, second, field = match.groups()
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


def open_dataset(name: DatasetName) -> tuple[Iterator[Document], str | None, str | None]:
    """A dataset of Hugging Face or a folder of one: documents of its rows, which are read as they
    are taken; commit, `None` for a folder; license, as the dataset itself says, rarely."""
    library = load_library(f"the dataset {name.name}")
    builder = _asked(
        name, lambda: library.load_dataset_builder(name.name, name.config, revision=name.revision)
    )

    def documents() -> Iterator[Document]:
        rows = _asked(name, lambda: iter(builder.as_streaming_dataset(split=name.split)))
        records = iter(lambda: _asked(name, lambda: next(rows, None)), None)
        yield from documents_of(enumerate(records, 1), name.name, "row", name.field)

    commit = _COMMIT.search(str(builder.base_path))
    license_text = getattr(builder.info, "license", None) or None
    return documents(), commit.group(1) if commit else None, license_text


def parquet_rows(paths: Sequence[Path]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Number and content of the rows of local Parquet files."""
    library, files = load_library(str(paths[0])), {"train": list(map(str, paths))}
    try:
        builder = library.load_dataset_builder("parquet", data_files=files)
        yield from enumerate(builder.as_streaming_dataset(split="train"), 1)
    except Exception as error:  # as in `_asked`
        raise UsageError(
            f"cannot read {paths[0]}: {_first_line(error)}.", hint="give text or JSONL"
        ) from None


def load_library(wanted: str) -> Any:
    """The module `datasets`, or `MissingDependency`, naming what is `wanted` of it."""
    try:
        library = import_module("datasets")
    except ImportError:
        raise MissingDependency(
            f"{wanted} is read through the library datasets, which is not installed.",
            hint=f"{Install('datasets')}, {OWN_FILE}",
        ) from None
    library.disable_progress_bars()  # the caller decides what is printed
    return library


def _asked(name: DatasetName, ask: Callable[[], _T]) -> _T:
    """The result of `ask`; its errors become ours."""
    here = Path(name.name).expanduser().exists()
    with nullcontext() if here else without_retries() as trouble:
        try:
            return ask()
        except Exception as error:  # the library, its formats and its client raise what they like
            raise _failure(name, error, trouble) from None


def _failure(name: DatasetName, error: Exception, trouble: str | None) -> OscarZooError:
    """Our error for an error of the datasets library; `trouble` says why the hub was not asked.
    Errors are told apart by the names of their types, which are the same in all versions of the
    library and its clients."""
    cause = _first_line(error)
    kinds = {kind.__name__ for kind in type(error).__mro__}
    if "gated" in cause.lower():
        return UsageError(
            f"the dataset {name.name} is gated.", hint=f"ask for access on its page, {OWN_FILE}"
        )
    if kinds & {"DatasetNotFoundError", "DataFilesNotFoundError", "ValueError"}:
        return UsageError(
            f"cannot read the dataset {name}: {cause}.", hint=f"datasets are called {GRAMMAR}"
        )
    said = (os.environ.get(variable, "").lower() for variable in _OFFLINE)
    if any(one in ("1", "true", "yes", "on") for one in said):
        return OfflineError(
            f"the dataset {name} is not on this machine, and offline mode fetches nothing.",
            hint=f"{go_online()}, {OWN_FILE}",
        )
    return HubUnreachable(
        f"cannot fetch the dataset {name}: {trouble or cause}.",
        hint=f"check the network, {OWN_FILE}",
    )


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200].rstrip(".:")


NAMED: Mapping[str, DatasetName] = {
    "wikitext": DatasetName("Salesforce/wikitext", config="wikitext-2-raw-v1", field="text"),
    "mmlu": DatasetName("cais/mmlu", config="all", split="validation", field="question"),
}
"""Names by which others call public datasets; of MMLU not the questions that are scored."""
