"""Whether calibration text holds questions of an evaluation set.

Both are compared as words: case, punctuation and spacing do not count, and a character of a script
without spaces is a word. A question overlaps when 13 of its consecutive words occur in the
calibration text, or all of its words when it has fewer than 13. Questions of fewer than 6 words are
not compared, because they would be found anywhere.

A set known by name is looked for as `evaluation/NAME.jsonl` (or `.txt`, `.csv`) in this program's
data folder, then in the cache of the Hugging Face client. Nothing is downloaded.

Source: 13-grams are the measure of contamination of "Language Models are Few-Shot Learners",
appendix C.
"""

from __future__ import annotations

import csv
import os
import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oscar_zoo.artifact.manifest import Disjoint
from oscar_zoo.compute.data import documents
from oscar_zoo.compute.data.hf_datasets import DatasetName, parquet_rows
from oscar_zoo.errors import OscarZooError, PathNotFound, UsageError
from oscar_zoo.next_step import AddOption

if TYPE_CHECKING:  # which reads evaluation sets with this module
    from oscar_zoo.compute.data.calibration import CalibrationData
from oscar_zoo.paths import data_dir

FOLDER = "evaluation"
"""In the data folder: copies that the user put there."""
QUESTION_FIELDS = ("question", "problem", "prompt", "question_content", "text", "messages")
"""Fields that may hold the question in a record of an unknown set, in any case."""


Questions = tuple[str, ...]
"""Of an evaluation set, which must not be in calibration text."""

KNOWN: Mapping[str, tuple[DatasetName, str]] = {
    "gpqa_diamond": (
        DatasetName("Idavidrein/gpqa", config="gpqa_diamond", field="Question"),
        "*diamond.csv",
    ),
    "aime_2024": (DatasetName("HuggingFaceH4/aime_2024", field="problem"), "*.parquet"),
    "aime_2025": (DatasetName("opencompass/AIME2025", split="test", field="question"), "*.jsonl"),
    "math_500": (
        DatasetName("HuggingFaceH4/MATH-500", split="test", field="problem"),
        "test.jsonl",
    ),
    "humaneval": (
        DatasetName("openai/openai_humaneval", split="test", field="prompt"),
        "*.parquet",
    ),
    "livecodebench": (
        DatasetName("livecodebench/code_generation_lite", split="test", field="question_content"),
        "test*.jsonl",
    ),
}
"""Sets known by name: where each comes from, and a pattern for its files in the repository."""


def evaluation_set(name_or_path: str | Path) -> tuple[str, Questions]:
    """Read a set, and its name in manifests; an existing path wins over a name."""
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
    own = paths[0].parent == data_dir() / FOLDER
    return _from_files(name, paths, None if own else KNOWN[name][0].field)


def copies(name: str) -> list[Path]:
    """The files on this machine that hold the known set `name`, often none. The user's own copy
    comes first."""
    suffixes = (*documents.JSONL_SUFFIXES, *documents.TEXT_SUFFIXES, ".csv", ".parquet")
    own = (data_dir() / FOLDER / f"{name}{suffix}" for suffix in suffixes)
    return [path for path in own if path.is_file()][:1] or _cached_files(*KNOWN[name])


def sets_on_this_machine() -> dict[str, Questions]:
    """Every known set that can be read here."""
    found: dict[str, Questions] = {}
    for name in KNOWN:
        # absent, as Parquet without a reader, or not as it was published
        with suppress(OscarZooError):
            found |= [evaluation_set(name)]
    return found


def _cached_files(dataset: DatasetName, pattern: str) -> list[Path]:
    """Files of the newest snapshot in the cache of the Hugging Face client."""
    snapshots = _hub_cache() / f"datasets--{dataset.name.replace('/', '--')}" / "snapshots"
    folders = [path for path in snapshots.glob("*") if path.is_dir()]
    newest = max(folders, key=lambda path: (path.stat().st_mtime, path.name), default=None)
    return sorted(path for path in newest.rglob(pattern) if path.is_file()) if newest else []


def _hub_cache() -> Path:
    """Where the Hugging Face client keeps repositories, by the variables it reads itself."""
    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if folder := os.environ.get(variable):
            return Path(folder).expanduser()
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.environ.get("HF_HOME") or f"{cache}/huggingface").expanduser() / "hub"


def _from_files(name: str, paths: list[Path], field: str | None) -> tuple[str, Questions]:
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
    return name, kept


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
    given = record.items() if isinstance(record, dict) else ()
    lower = {str(key).lower(): value for key, value in given}
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


NGRAM = 13
SHORTEST = 6
METHOD = "exact+13-gram/1"
"""Names this measure in manifests."""

_WORD = re.compile(r"[^\W_]+")
_UNSPACED = re.compile("[\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff]")  # Han and Kana


def words(text: str) -> list[str]:
    """Words of `text` in one spelling: compatibility forms and case folded, punctuation dropped."""
    folded = unicodedata.normalize("NFKC", text).casefold()
    return _WORD.findall(_UNSPACED.sub(r" \g<0> ", folded))


def measure_overlap(texts: Iterable[str], questions: Questions) -> tuple[int, set[int], set[int]]:
    """Compare calibration texts with one evaluation set: how many questions are long enough to be
    compared, which of them share 13 words in a row with a text, and which are in one whole. Runs of
    equal words are looked for inside one text at a time."""
    items = [words(question) for question in questions]
    wanted: dict[int, dict[str, set[int]]] = {}
    for at, item in enumerate(items):
        if len(item) >= SHORTEST:
            length = min(NGRAM, len(item))
            for gram in _grams(item, length):
                wanted.setdefault(length, {}).setdefault(gram, set()).add(at)
    found: set[int] = set()
    whole: set[int] = set()
    for text in texts:
        stream = words(text)
        here = {
            at
            for length, grams in wanted.items()
            for gram in _grams(stream, length)
            for at in grams.get(gram, ())
        }
        spaced = f" {' '.join(stream)} "
        whole |= {at for at in here if f" {' '.join(items[at])} " in spaced}
        found |= here
    return sum(len(item) >= SHORTEST for item in items), found, whole


def check_overlap(
    data: CalibrationData,
    sets: Mapping[str, Questions] | None = None,
    *,
    allow_overlap: bool = False,
) -> CalibrationData:
    """`data` with the result of comparing calibration and held-out text with evaluation sets, by
    default every known set that is on this machine."""
    sets = sets_on_this_machine() if sets is None else sets
    disjoint, notes, names = [], list(data.notes), dict.fromkeys(data.overlaps_with)
    for name, items in sets.items():
        compared, some, whole = measure_overlap(data.texts, items)
        chosen = name in data.overlaps_with
        if some:
            found = (
                f"{data.source} holds {len(some)} of {len(items)} questions of {name}"
                f" ({len(whole)} whole, the others by {NGRAM} words in a row; the first is number"
                f" {min(some) + 1})"
            )
            if not allow_overlap and not chosen:
                step = AddOption("--allow-overlap")
                raise UsageError(f"{found}.", hint="use other text", next_step=step)
            notes.append(f"{found}: scores on it say nothing.")
            names[name] = None
        elif compared and not chosen:
            method = f"{METHOD}, {compared} of {len(items)} items"
            disjoint.append(Disjoint(dataset=name, method=method))
    return replace(
        data,
        disjoint_from=tuple(disjoint) if sets else None,
        overlaps_with=tuple(names),
        notes=tuple(notes),
    )


def _grams(stream: Sequence[str], length: int) -> Iterable[str]:
    return (" ".join(stream[at : at + length]) for at in range(len(stream) - length + 1))
