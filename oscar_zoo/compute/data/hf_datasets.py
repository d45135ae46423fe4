"""Rows of Hugging Face datasets, streamed through the optional library `datasets`.

Only the needed rows are downloaded, in the order of the dataset. Their commit is recorded, so the
same rows can be requested again.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

from oscar_zoo.compute.data.dataset_names import GRAMMAR, DatasetName
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

OWN_FILE = "or give text of your own: --calib-data FILE"

_COMMIT = re.compile(r"@([0-9a-f]{40})(?:/|$)")
_OFFLINE = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "OSCAR_ZOO_OFFLINE")
_T = TypeVar("_T")


@dataclass(frozen=True)
class OpenedDataset:
    """A dataset whose rows can be read.

    Attributes:
        documents: of its rows.
        revision: commit; `None` for a folder.
        license: as the dataset itself says, rarely.
    """

    documents: Iterator[Document]
    revision: str | None
    license: str | None


def open_dataset(name: DatasetName) -> OpenedDataset:
    """Find a dataset of Hugging Face or a folder of one; reads rows only as they are taken."""
    library = load_library(f"the dataset {name.name}")
    builder = _asked(
        name, lambda: library.load_dataset_builder(name.name, name.config, revision=name.revision)
    )
    commit = _COMMIT.search(str(builder.base_path))
    license_text = getattr(builder.info, "license", None) or None
    return OpenedDataset(
        _documents(name, builder), commit.group(1) if commit else None, license_text
    )


def parquet_rows(paths: Sequence[Path]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Number and content of the rows of local Parquet files."""
    library = load_library(str(paths[0]))
    try:
        builder = library.load_dataset_builder(
            "parquet", data_files={"train": [str(path) for path in paths]}
        )
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


def _documents(name: DatasetName, builder: Any) -> Iterator[Document]:
    rows = _asked(name, lambda: iter(builder.as_streaming_dataset(split=name.split)))
    records = iter(lambda: _asked(name, lambda: next(rows, None)), None)
    return documents_of(enumerate(records, 1), name.name, "row", name.field)


def _asked(name: DatasetName, ask: Callable[[], _T]) -> _T:
    """The result of `ask`; its errors become ours."""
    here = Path(name.name).expanduser().exists()
    with nullcontext() if here else without_retries() as trouble:
        try:
            return ask()
        except (
            Exception
        ) as error:  # the library, its file formats and its HTTP client each raise what they like
            raise _failure(name, error, trouble) from None


def _failure(name: DatasetName, error: Exception, trouble: str | None) -> OscarZooError:
    """Our error for an error of the datasets library; `trouble` says why the hub was not asked.

    Errors are told apart by the names of their types, which are the same in all versions of the
    library and its clients.
    """
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
    if any(
        os.environ.get(variable, "").lower() in ("1", "true", "yes", "on") for variable in _OFFLINE
    ):
        return OfflineError(
            f"the dataset {name} is not on this machine, and offline mode fetches nothing.",
            hint=f"{go_online()}, {OWN_FILE}",
        )
    if trouble is not None:
        return HubUnreachable(
            f"the dataset {name} is not on this machine, and Hugging Face cannot be reached:"
            f" {trouble}.",
            hint=f"check the network, {OWN_FILE}",
        )
    return HubUnreachable(
        f"cannot fetch the dataset {name}: {cause}.", hint=f"check the connection, {OWN_FILE}"
    )


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200].rstrip(".:")
