"""The door to lm-evaluation-harness: its tasks with rows of ours, and its judgement of answers.

Tasks are read from their own files, one at a time. The harness's own manager reads all of its
thousands of files first, and its task for HumanEval fetches a program from the hub when it is read.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import datasets
import lm_eval
import lm_eval.api.task
from lm_eval.api.model import LM
from lm_eval.evaluator import evaluate
from lm_eval.tasks._yaml_loader import _import_fun_from_str, load_yaml

from oscar_zoo.artifact.specs import Harness
from oscar_zoo.errors import OscarZooError, UsageError
from oscar_zoo.evaluate.benchmarks import code
from oscar_zoo.evaluate.benchmarks.data import Rows, hub_rows, sample_rows
from oscar_zoo.evaluate.benchmarks.tasks import MMLU, SAMPLE, Benchmark

NAME = "lm-evaluation-harness"
CHOICES = 4
"""Of a question whose choices are compared."""
SHUFFLE_SEED = 0
"""Of the order of choices, which GPQA's task draws at random."""
_MMLU_DESCRIPTION = "The following are multiple choice questions (with answers).\n\n"
_TASKS = Path(lm_eval.__file__).parent / "tasks"
_SPLITS = ("training_split", "validation_split", "test_split", "fewshot_split")
_NOT_OURS = ("tag", "task_alias", "group", "include", "dataset_kwargs")


@dataclass(frozen=True)
class LoadedTask:
    """A benchmark with its questions.

    Attributes:
        benchmark: what was asked for.
        parts: the harness's tasks by name; more than one for MMLU.
        revision: of the data, for records.
        requests: what one repeat asks; a choice is asked for each of four answers.
    """

    benchmark: Benchmark
    parts: Mapping[str, Any]
    revision: str | None
    requests: int


@dataclass(frozen=True)
class Judged:
    """The worth of one answer.

    Attributes:
        part: the harness's task.
        question: number of the question in it.
        value: usually 0 or 1.
    """

    part: str
    question: int
    value: float


def harness_version() -> Harness:
    """Name and version of the harness."""
    return Harness(name=NAME, version=version("lm_eval"))


def load_task(benchmark: Benchmark, rows: Rows | None, *, limit: int | None = None) -> LoadedTask:
    """Read a task of the harness, and give it its questions.

    Args:
        rows: in place of its data set; `None` for the data of the hub, or of this package.
        limit: take only the first questions of every part.
    """
    if benchmark.name == SAMPLE and rows is None:
        rows = sample_rows()
    parts: dict[str, Any] = {}
    revisions = dict[str, None]()
    for file in _files(benchmark, with_rows=rows is not None):
        part, revision = _part(benchmark, file, rows)
        parts[part.config.task] = part
        revisions[revision or ""] = None
    counts = [len(part.eval_docs) for part in parts.values()]
    questions = sum(count if limit is None else min(count, limit) for count in counts)
    requests = questions * (CHOICES if benchmark.kind == "choice" else 1)
    return LoadedTask(benchmark, parts, " ".join(revisions) or None, requests)


def judge(
    loaded: LoadedTask, model: LM, *, limit: int | None = None, run_code: bool = False
) -> list[Judged]:
    """Have the harness ask `model` every question once, and judge the answers.

    Args:
        run_code: whether programs of the model may run.
    """
    benchmark = loaded.benchmark
    with _quiet():
        found = evaluate(
            lm=model,
            task_dict={"tasks": dict(loaded.parts), "groups": {}},
            limit=limit,
            bootstrap_iters=0,
            apply_chat_template=benchmark.kind == "generated",
            fewshot_as_multiturn=benchmark.kind == "generated",
            confirm_run_unsafe_code=run_code,
        )
    return [
        Judged(part, int(sample["doc_id"]), float(sample[benchmark.metric]))
        for part, samples in found["samples"].items()
        for sample in samples
        if sample["filter"] == benchmark.filter
    ]


def _files(benchmark: Benchmark, *, with_rows: bool) -> list[Path]:
    """The configuration files of a benchmark; all subjects of MMLU only for the hub's data."""
    if benchmark.name == MMLU:
        subjects = sorted((_TASKS / benchmark.file).parent.glob("mmlu_*.yaml"))
        return subjects[:1] if with_rows else subjects
    path = _TASKS / benchmark.file
    if not path.is_file():
        raise UsageError(
            f"the harness has no task {benchmark.name}.", hint="its subjects are those of MMLU"
        )
    return [path]


def _part(benchmark: Benchmark, file: Path, rows: Rows | None) -> tuple[Any, str | None]:
    """A task of the harness with its rows, and what names the rows."""
    config = _config(benchmark, file)
    if rows is None:
        rows = hub_rows(config["dataset_path"], config.get("dataset_name"), gated=benchmark.gated)
        config["num_fewshot"] = benchmark.fewshot
    else:
        config["num_fewshot"] = 0
        if benchmark.name == MMLU:  # rows of any subject
            config |= {"task": MMLU, "description": _MMLU_DESCRIPTION}
    try:
        with _quiet():
            config["custom_dataset"] = _dataset(config, rows)
            part = lm_eval.api.task.ConfigurableTask(config=config)
            part.set_fewshot_seed(SHUFFLE_SEED)
    except OscarZooError:
        raise
    except Exception as error:  # templates and functions of the task raise what they like
        cause = (str(error).strip().splitlines() or [""])[0][:200].rstrip(".")
        raise UsageError(
            f"the rows are not in the format of {benchmark.name}: {type(error).__name__}: {cause}.",
            hint="give rows with the columns of its data set on the hub",
        ) from None
    return part, rows.revision


def _config(benchmark: Benchmark, file: Path) -> dict[str, Any]:
    """The harness's configuration of one task, with what we change."""
    config = load_yaml(file, resolve_func=False)
    for name in _NOT_OURS:
        config.pop(name, None)
    if benchmark.name == SAMPLE:
        config["task"] = SAMPLE
    if benchmark.kind == "generated":
        # An answer in chat form ends by itself; stop words would cut what is being reasoned about.
        config["generation_kwargs"] = {"until": []}
    if benchmark.prompt is not None:
        config["doc_to_text"] = benchmark.prompt
    if benchmark.scored_by is not None:
        other = load_yaml(_TASKS / benchmark.scored_by, resolve_func=False)
        config["process_results"] = other["process_results"]
    if benchmark.runs_code:
        config["metric_list"] = [
            {"metric": benchmark.metric, "aggregation": "mean", "higher_is_better": True}
        ]
        reader = {"function": "custom", "filter_fn": code.programs}
        config["filter_list"] = [{"name": benchmark.filter, "filter": [reader]}]
        config["process_results"] = code.judge
    resolved: dict[str, Any] = _resolved(config)
    return resolved


def _resolved(value: Any) -> Any:
    """`value` with functions in place of their names, which are paths below the tasks."""
    if isinstance(value, dict):
        return {name: _resolved(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_resolved(one) for one in value]
    if isinstance(value, str) and value.startswith(f"{_TASKS}/"):
        return _import_fun_from_str(value)
    return value


def _dataset(config: dict[str, Any], rows: Rows) -> Any:
    """A function that gives the rows by split, prepared once.

    The harness prepares them at every look, and GPQA's task draws the order of the choices anew
    each time.
    """
    prepare = config.pop("process_docs", None)
    random.seed(SHUFFLE_SEED)
    splits = {}
    for split in {config[name] for name in _SPLITS if config.get(name)}:
        found = rows.of(split)
        if found is None:
            raise UsageError(f"the data set lacks its split {split}.", hint="give --data FILE")
        made = datasets.Dataset.from_list(list(found))
        splits[split] = made if prepare is None else prepare(made)
    prepared = datasets.DatasetDict(splits)
    return lambda **_: prepared


@contextmanager
def _quiet() -> Iterator[None]:
    """No bars and no remarks of the harness; the state of `random` is as before afterwards."""
    logger, state = logging.getLogger("lm_eval"), random.getstate()
    level, bar = logger.level, lm_eval.api.task.tqdm
    logger.setLevel(logging.ERROR)
    datasets.disable_progress_bars()
    lm_eval.api.task.tqdm = lambda items, **_: items
    try:
        yield
    finally:
        lm_eval.api.task.tqdm = bar
        logger.setLevel(level)
        random.setstate(state)
