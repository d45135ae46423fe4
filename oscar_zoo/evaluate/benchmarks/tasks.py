"""Benchmarks known by name: which task of the harness each one is, and how it is asked.

A server answers in chat form. Where the prompt of the harness does not say how the answer must look
so that its filter finds it, one sentence is added. That sentence is part of the benchmark here and
of the key under which answers are kept.
"""

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
from typing import Any, Literal

from oscar_zoo.artifact.files import sha256_hex
from oscar_zoo.errors import (
    GatedRepository,
    HubUnreachable,
    OfflineError,
    OscarZooError,
    PathNotFound,
    UsageError,
)

Kind = Literal["generated", "choice"]

_BOXED = "\nPlease reason step by step, and put your final answer within \\boxed{}."
_LETTER = (
    "What is the correct answer to this question: {{Question}}\nChoices:\n(A) {{choice1}}\n"
    "(B) {{choice2}}\n(C) {{choice3}}\n(D) {{choice4}}\nThink step by step, then finish with the"
    ' line "The answer is (X).", where X is the letter of your choice.'
)
_CODE = (
    "Complete this Python function. Answer with the whole function in one code block.\n"
    "```python\n{{prompt}}\n```"
)


@dataclass(frozen=True)
class Benchmark:
    """One benchmark: metric and filter are the harness's.

    Attributes:
        file: the task's configuration, below the harness's folder of tasks.
        kind: `choice`: log-probabilities of the choices are compared.
        cap: tokens that an answer may have, with its reasoning, unless the user says otherwise.
        measures: what the score is called in records.
        prompt, scored_by: a template in place of the harness's, and the file of a task whose
            function judges the answer instead.
        fewshot: examples before the question, when data comes from the hub.
        gated: page on which the terms of the data must be accepted.
        runs_code: whether judging runs what the model wrote.
        calibration_name: how manifests call the set when calibration overlaps with it.
    """

    name: str
    file: str
    metric: str = "exact_match"
    filter: str = "none"
    kind: Kind = "generated"
    cap: int = 32768
    measures: str = "accuracy"
    prompt: str | None = None
    scored_by: str | None = None
    fewshot: int = 0
    gated: str | None = None
    runs_code: bool = False
    calibration_name: str | None = None


def _gpqa(subset: str) -> Benchmark:
    return Benchmark(
        f"gpqa_{subset}",
        f"gpqa/cot_zeroshot/gpqa_{subset}_cot_zeroshot.yaml",
        filter="flexible-extract",
        prompt=_LETTER,
        gated="https://huggingface.co/datasets/Idavidrein/gpqa",
        calibration_name=f"gpqa_{subset}",
    )


def _aime(year: int) -> Benchmark:
    return Benchmark(
        f"aime{year}",
        f"aime/aime{year}.yaml",
        prompt="{{problem}}" + _BOXED if year == 25 else "{{Problem}}" + _BOXED,
        calibration_name=f"aime_20{year}",
    )


SAMPLE = "sample"
"""The freely licensed sample in GPQA's format that is part of this package."""
MMLU = "mmlu"
_MMLU_FILE = "mmlu/default/mmlu_{}.yaml"
_MMLU_SUBJECT = re.compile(r"mmlu_([a-z_]+)")

BENCHMARKS: Mapping[str, Benchmark] = {
    one.name: one
    for one in (
        _gpqa("diamond"),
        _gpqa("main"),
        _gpqa("extended"),
        _aime(24),
        _aime(25),
        Benchmark(
            "math500",
            "hendrycks_math/hendrycks_math500.yaml",
            prompt="{{problem}}" + _BOXED,
            scored_by="aime/aime25.yaml",
            calibration_name="math_500",
        ),
        Benchmark("gsm8k", "gsm8k/gsm8k-cot-zeroshot.yaml", filter="flexible-extract", cap=16384),
        Benchmark(
            "humaneval",
            "humaneval/humaneval.yaml",
            metric="pass@1",
            filter="create_test",
            measures="pass@1",
            prompt=_CODE,
            runs_code=True,
            calibration_name="humaneval",
        ),
        Benchmark(
            "ifeval",
            "ifeval/ifeval.yaml",
            metric="prompt_level_strict_acc",
            measures="prompt-level strict accuracy",
            cap=16384,
        ),
        Benchmark(MMLU, _MMLU_FILE, metric="acc", kind="choice", fewshot=5),
        Benchmark(
            SAMPLE,
            "gpqa/cot_zeroshot/gpqa_main_cot_zeroshot.yaml",
            filter="flexible-extract",
            prompt=_LETTER,
            cap=2048,
        ),
    )
}
NAMES = (*BENCHMARKS, "mmlu_SUBJECT")
"""For people; `mmlu_anatomy` is one subject of MMLU."""


def is_benchmark(name: str) -> bool:
    return name in BENCHMARKS or bool(_MMLU_SUBJECT.fullmatch(name))


def benchmark(name: str) -> Benchmark:
    if name in BENCHMARKS:
        return BENCHMARKS[name]
    subject = _MMLU_SUBJECT.fullmatch(name)
    if subject is None:
        raise UsageError(f"no such task: {name}.", hint=f"tasks: {', '.join(NAMES)}")
    return Benchmark(name, _MMLU_FILE.format(subject[1]), metric="acc", kind="choice", fewshot=5)


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
        return self.splits.get(split, self.splits.get(""))


def sample_rows() -> Rows:
    """The packaged sample: 40 questions in GPQA's columns."""
    path = files("oscar_zoo") / "evaluate/benchmarks/sample/questions.jsonl"
    return _rows(path.read_bytes(), ".jsonl", "the sample")


def read_rows(path: Path) -> Rows:
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
    import pyarrow
    from pyarrow import ipc, parquet

    source = pyarrow.BufferReader(data)
    try:
        if suffix == ".parquet":
            return parquet.read_table(source).to_pylist()
        opened = ipc.open_file if data.startswith(b"ARROW1") else ipc.open_stream
        return opened(source).read_all().to_pylist()
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        raise UsageError(f"cannot read {what}: {error}.", hint="is it complete?") from None


def hub_rows(dataset: str, config: str | None, *, gated: str | None = None) -> Rows:
    """All rows of a data set of the Hugging Face hub, or of its subset `config`, of the newest
    commit that can be had; `gated` is the page on which its terms must be accepted, if any."""
    import datasets

    from oscar_zoo.models.model_hub import without_retries

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
    own, kinds = "or give the rows: --data FILE", {kind.__name__ for kind in type(error).__mro__}
    cause = (str(error).strip().splitlines() or [type(error).__name__])[0][:200].rstrip(".:")
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
