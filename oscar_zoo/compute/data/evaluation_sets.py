"""Evaluation sets as lists of questions, from files or from copies already on this machine.

A set known by name is looked for as `evaluation/NAME.jsonl` (or `.txt`, `.csv`) in this program's
data folder, then in the cache of the Hugging Face client. Nothing is downloaded.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oscar_zoo.compute.data import documents
from oscar_zoo.compute.data.dataset_names import DatasetName
from oscar_zoo.compute.data.hf_datasets import parquet_rows
from oscar_zoo.errors import OscarZooError, PathNotFound, UsageError
from oscar_zoo.paths import data_dir

FOLDER = "evaluation"
"""In the data folder: copies that the user put there."""
QUESTION_FIELDS = ("question", "problem", "prompt", "question_content", "text", "messages")
"""Fields that may hold the question in a record of an unknown set, in any case."""


@dataclass(frozen=True)
class EvaluationSet:
    """Questions that must not be in calibration text.

    Attributes:
        name: as manifests call it.
        items: the questions.
    """

    name: str
    items: tuple[str, ...]


@dataclass(frozen=True)
class KnownSet:
    """Where a set known by name comes from; `files` is a pattern inside the repository."""

    dataset: DatasetName
    files: str


KNOWN: Mapping[str, KnownSet] = {
    "gpqa_diamond": KnownSet(
        DatasetName("Idavidrein/gpqa", config="gpqa_diamond", field="Question"), "*diamond.csv"
    ),
    "aime_2024": KnownSet(DatasetName("HuggingFaceH4/aime_2024", field="problem"), "*.parquet"),
    "aime_2025": KnownSet(
        DatasetName("opencompass/AIME2025", split="test", field="question"), "*.jsonl"
    ),
    "math_500": KnownSet(
        DatasetName("HuggingFaceH4/MATH-500", split="test", field="problem"), "test.jsonl"
    ),
    "humaneval": KnownSet(
        DatasetName("openai/openai_humaneval", split="test", field="prompt"), "*.parquet"
    ),
    "livecodebench": KnownSet(
        DatasetName("livecodebench/code_generation_lite", split="test", field="question_content"),
        "test*.jsonl",
    ),
}


def evaluation_set(name_or_path: str | Path) -> EvaluationSet:
    """Read a set; an existing path wins over a name."""
    path = Path(name_or_path).expanduser()
    name = str(name_or_path)
    if path.is_file():
        return _from_files(path.name, [path], None)
    if name not in KNOWN:
        raise PathNotFound(
            f"no such evaluation set: {name}",
            hint=f"give a file, or a set known by name: {', '.join(KNOWN)}",
        )
    paths = copies(name)
    if not paths:
        raise PathNotFound(
            f"the evaluation set {name} is not on this machine.",
            hint=f"put a copy at {data_dir() / FOLDER}/{name}.jsonl",
        )
    return _from_files(
        name, paths, None if paths[0].parent == data_dir() / FOLDER else KNOWN[name].dataset.field
    )


def copies(name: str) -> list[Path]:
    """The files on this machine that hold the known set `name`, often none.

    The user's own copy comes first.
    """
    suffixes = (*documents.JSONL_SUFFIXES, *documents.TEXT_SUFFIXES, ".csv", ".parquet")
    own = (data_dir() / FOLDER / f"{name}{suffix}" for suffix in suffixes)
    return [path for path in own if path.is_file()][:1] or _cached_files(KNOWN[name])


def sets_on_this_machine() -> tuple[EvaluationSet, ...]:
    """Every known set that can be read here."""
    found = []
    for name in KNOWN:
        try:
            found.append(evaluation_set(name))
        except OscarZooError:  # absent, as Parquet without a reader, or not as it was published
            continue
    return tuple(found)


def _cached_files(known: KnownSet) -> list[Path]:
    """Files of the newest snapshot in the cache of the Hugging Face client."""
    snapshots = _hub_cache() / f"datasets--{known.dataset.name.replace('/', '--')}" / "snapshots"
    folders = [path for path in snapshots.glob("*") if path.is_dir()]
    newest = max(folders, key=lambda path: (path.stat().st_mtime, path.name), default=None)
    return sorted(path for path in newest.rglob(known.files) if path.is_file()) if newest else []


def _hub_cache() -> Path:
    """Where the Hugging Face client keeps repositories, by the variables it reads itself."""
    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if folder := os.environ.get(variable):
            return Path(folder).expanduser()
    home = (
        os.environ.get("HF_HOME") or f"{os.environ.get('XDG_CACHE_HOME') or '~/.cache'}/huggingface"
    )
    return Path(home).expanduser() / "hub"


def _from_files(name: str, paths: list[Path], field: str | None) -> EvaluationSet:
    if paths[0].suffix == ".parquet":
        rows = parquet_rows(paths)
        items = [text for at, row in rows for text in _questions(row, field, f"row {at} of {name}")]
    else:
        items = [text for path in paths for text in _file_items(path, field)]
    kept = tuple(item for item in items if item.strip())
    if not kept:
        raise UsageError(
            f"the evaluation set {paths[0]} is empty.", hint="give the questions, one per record"
        )
    return EvaluationSet(name, kept)


def _file_items(path: Path, field: str | None) -> Iterator[str]:
    suffix = path.suffix.lower()
    if suffix in documents.JSONL_SUFFIXES:
        for number, record in documents.read_records(path):
            yield from _questions(record, field, f"line {number} of {path}")
    elif suffix == ".csv":
        with documents.open_lines(path) as lines:
            for number, row in enumerate(_csv_rows(lines, path), 1):
                yield from _questions(row, field, f"row {number} of {path}")
    else:
        yield from (document.text for document in documents.read_file(path))


def _csv_rows(lines: Iterator[str], path: Path) -> Iterator[dict[str, str]]:
    try:
        yield from csv.DictReader(lines)
    except csv.Error as error:
        raise UsageError(
            f"{path} is not a CSV file: {error}.", hint="give text, JSONL or CSV"
        ) from None


def _questions(record: Any, field: str | None, where: str) -> list[str]:
    """The question of one record, or the messages of its user."""
    lower = (
        {str(key).lower(): value for key, value in record.items()}
        if isinstance(record, dict)
        else {}
    )
    names = (field.lower(),) if field else QUESTION_FIELDS
    value = next((lower[name] for name in names if lower.get(name) is not None), None)
    if isinstance(value, str):
        return [value]
    if isinstance(value, list):
        turns = [turn for turn in value if isinstance(turn, dict) and turn.get("role") == "user"]
        return [str(turn.get("content")) for turn in turns]
    raise UsageError(
        f"{where} has no question.", hint=f"one of the fields {', '.join(names)} must hold it"
    )
