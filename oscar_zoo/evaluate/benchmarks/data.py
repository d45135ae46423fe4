"""The data of a benchmark: rows of a file of the user, of the packaged sample, or of the hub."""

from __future__ import annotations

import csv
import io
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from oscar_zoo.artifact.files import sha256_hex
from oscar_zoo.errors import (
    GatedRepository,
    HubUnreachable,
    MissingDependency,
    OfflineError,
    OscarZooError,
    PathNotFound,
    UsageError,
)
from oscar_zoo.models.model_hub import without_retries

Row = dict[str, Any]
SUFFIXES = (".jsonl", ".json", ".csv", ".parquet", ".arrow")
_COMMIT = re.compile(r"@([0-9a-f]{40})(?:/|$)")
_OFFLINE = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "OSCAR_ZOO_OFFLINE")


@dataclass(frozen=True)
class Rows:
    """Rows by the name of their split; the one split `""` stands for every split. The revision
    names them in a record: a commit of the hub, or `sha256:<64 hex>` of a file."""

    splits: Mapping[str, Sequence[Row]]
    revision: str | None

    def of(self, split: str) -> Sequence[Row] | None:
        """The rows of `split`, or `None`."""
        return self.splits.get(split, self.splits.get(""))


def sample_rows() -> Rows:
    """The packaged sample: 40 questions in GPQA's columns."""
    path = files("oscar_zoo") / "evaluate/benchmarks/sample/questions.jsonl"
    return _rows(path.read_bytes(), ".jsonl", "the sample")


def read_rows(path: Path) -> Rows:
    """The rows of a file of JSON lines, JSON, CSV, Parquet or Arrow."""
    if not path.is_file():
        raise PathNotFound.for_path(path, "data file")
    if path.suffix.lower() not in SUFFIXES:
        raise UsageError(
            f"{path} is of no kind that is read here.", hint=f"one of {' '.join(SUFFIXES)}"
        )
    return _rows(path.read_bytes(), path.suffix.lower(), str(path))


def _rows(data: bytes, suffix: str, what: str) -> Rows:
    if suffix in (".parquet", ".arrow"):
        rows = _table(data, suffix, what)
    else:
        try:
            text = data.decode("utf-8-sig")
        except UnicodeDecodeError:
            raise UsageError(f"{what} is not UTF-8 text.", hint="convert it to UTF-8") from None
        if suffix == ".csv":
            rows = [dict(row) for row in csv.DictReader(io.StringIO(text))]
        elif suffix == ".json":
            rows = _json(text, what)
        else:  # not splitlines: U+2028 may stand inside a string
            lines = enumerate(text.split("\n"), 1)
            rows = [_json(line, f"line {at} of {what}") for at, line in lines if line]
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise UsageError(f"{what} is no list of objects.", hint="give one object per row")
    if not rows:
        raise UsageError(f"{what} has no rows.", hint="give one question per row")
    return Rows({"": rows}, f"sha256:{sha256_hex(data)}")


def _json(text: str, what: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        raise UsageError(f"{what} is not JSON.", hint="give one object per row") from None


def _table(data: bytes, suffix: str, what: str) -> Any:
    try:
        import pyarrow
        from pyarrow import ipc, parquet
    except ImportError:
        raise MissingDependency.for_extra("pyarrow", "eval") from None
    source = pyarrow.BufferReader(data)
    try:
        if suffix == ".parquet":
            return parquet.read_table(source).to_pylist()
        if data.startswith(b"ARROW1"):
            return ipc.open_file(source).read_all().to_pylist()
        return ipc.open_stream(source).read_all().to_pylist()
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        raise UsageError(f"cannot read {what}: {error}.", hint="is it complete?") from None


def hub_rows(dataset: str, config: str | None, *, gated: str | None = None) -> Rows:
    """All rows of a data set of the Hugging Face hub, or of its subset `config`, of the newest
    commit that can be had; `gated` is the page on which its terms must be accepted, if any."""
    import datasets

    datasets.disable_progress_bars()
    with without_retries() as trouble:
        try:
            builder = datasets.load_dataset_builder(dataset, config)
            found = datasets.load_dataset(dataset, config)
        except Exception as error:  # the library, its formats and its client raise what they like
            raise _failure(dataset, gated, error, trouble) from None
    commit = _COMMIT.search(str(builder.base_path))
    splits = {str(name): split.to_list() for name, split in found.items()}
    return Rows(splits, commit.group(1) if commit else None)


def _failure(
    dataset: str, gated: str | None, error: Exception, trouble: str | None
) -> OscarZooError:
    """Our error for one of the datasets library; types are told apart by their names. `trouble`
    says why the hub was not asked."""
    own = "or give the rows: --data FILE"
    cause = (str(error).strip().splitlines() or [type(error).__name__])[0][:200].rstrip(".:")
    kinds = {kind.__name__ for kind in type(error).__mro__}
    if any(os.environ.get(name, "").lower() in ("1", "true", "yes", "on") for name in _OFFLINE):
        return OfflineError(
            f"the data set {dataset} is not on this machine, and offline mode fetches nothing.",
            hint=f"run it with a network, {own}",
        )
    if gated is not None and ("gated" in cause.lower() or "DatasetNotFoundError" in kinds):
        return GatedRepository(
            f"the data set {dataset} is given only to those who accept its terms.",
            hint=f"accept them at {gated}, then log in: oscar-zoo login; {own}",
        )
    if trouble is None and kinds & {"DatasetNotFoundError", "DataFilesNotFoundError", "ValueError"}:
        return UsageError(f"cannot read the data set {dataset}: {cause}.", hint=own[3:])
    if trouble is not None:
        cause = f"Hugging Face cannot be reached: {trouble}"
    return HubUnreachable(
        f"cannot fetch the data set {dataset}: {cause}.", hint=f"check the network, {own}"
    )
