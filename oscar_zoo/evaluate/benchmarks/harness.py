"""The door to lm-evaluation-harness: its tasks with rows of ours, and its judgement of answers.

Tasks are read from their own files, one at a time. The harness's own manager reads all of its
thousands of files first, and its task for HumanEval fetches a program from the hub when it is read.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import random
import re
import signal
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import datasets
import lm_eval
import lm_eval.api.task
import numpy as np
from lm_eval.api.model import LM
from lm_eval.evaluator import evaluate
from lm_eval.tasks._yaml_loader import load_yaml

from oscar_zoo import children
from oscar_zoo.errors import OscarZooError, UsageError
from oscar_zoo.evaluate.benchmarks.answers import (
    Answer,
    Answers,
    Generation,
    Key,
    chat_request,
    request_key,
)
from oscar_zoo.evaluate.benchmarks.tasks import MMLU, SAMPLE, Benchmark, Rows, hub_rows, sample_rows
from oscar_zoo.evaluate.statistics import Values

CHOICES = 4
"""Of a question whose choices are compared."""
SHUFFLE_SEED = 0
"""Of the order of choices, which GPQA's task draws at random."""
SECONDS = 10.0
"""A program may take this long."""
MEMORY = 4 << 30
"""Bytes of address space."""
_MMLU_DESCRIPTION = "The following are multiple choice questions (with answers).\n\n"
_TASKS = Path(lm_eval.__file__).resolve().parent / "tasks"  # as the harness writes paths
_SPLITS = ("training_split", "validation_split", "test_split", "fewshot_split")
_NOT_OURS = ("tag", "task_alias", "group", "include", "dataset_kwargs")
Ask = Callable[[Mapping[str, Any]], Answer]


@dataclass(frozen=True)
class Settings:
    """What a run does, beside which cache answers: one seed per repeat, at most `limit` questions
    of every part of the task, and whether programs of the model may run."""

    generation: Generation
    seeds: tuple[int, ...]
    limit: int | None = None
    concurrency: int = 16
    run_code: bool = False


@dataclass(frozen=True)
class ArmResult:
    """What one cache, `int2`, `bf16` or `fp8`, answered: what each answer was worth, `[questions,
    repeats]`, and the answers in the order of repeats and questions."""

    arm: str
    values: Values
    used: tuple[tuple[Key, Answer], ...]

    @property
    def exhausted_rate(self) -> float:
        """The share of answers that the generation cap cut."""
        return sum(answer.finish == "length" for _, answer in self.used) / len(self.used)


@dataclass(frozen=True)
class LoadedTask:
    """A benchmark with its questions: the harness's tasks by name (more than one for MMLU), the
    revision of the data, and what one repeat asks; a choice is asked for each of four answers."""

    benchmark: Benchmark
    parts: Mapping[str, Any]
    revision: str | None
    requests: int


def run_arm(
    arm: str,
    task: LoadedTask,
    settings: Settings,
    answers: Answers,
    *,
    ask: Ask | None,
    tick: Callable[[], None] = lambda: None,
) -> ArmResult:
    """Every repeat of `task`, asked of the cache `arm`; without `ask`, which asks the server,
    raises `AnswersMissing` where not all answers are kept."""
    columns, used = list[dict[tuple[str, int], float]](), list[tuple[Key, Answer]]()
    for seed in settings.seeds:
        model = KeptModel(arm, seed, settings, answers, ask, tick)
        columns.append(_judge(task, model, settings))
        used += model.used
    # Every repeat has the same questions in the same order.
    assert all(list(one) == list(columns[0]) for one in columns)
    values = np.array([list(one.values()) for one in columns], dtype=np.float64).T
    return ArmResult(arm, values, tuple(used))


def load_task(benchmark: Benchmark, rows: Rows | None, *, limit: int | None = None) -> LoadedTask:
    """Read a task of the harness, and give it its questions: `rows`, else the data of the hub or of
    this package, of which every part has at most `limit`."""
    if benchmark.name == SAMPLE and rows is None:
        rows = sample_rows()
    parts, revisions = dict[str, Any](), dict[str, None]()
    files = [_TASKS / benchmark.file]
    if benchmark.name == MMLU:
        files = sorted(files[0].parent.glob("mmlu_*.yaml"))
        files = files if rows is None else files[:1]  # all subjects only for the hub's data
    elif not files[0].is_file():
        raise UsageError(
            f"the harness has no task {benchmark.name}.", hint="its subjects are those of MMLU"
        )
    for file in files:
        part, revision = _part(benchmark, file, rows)
        parts[part.config.task] = part
        revisions[revision or ""] = None
    counts = [len(part.eval_docs) for part in parts.values()]
    questions = sum(count if limit is None else min(count, limit) for count in counts)
    requests = questions * (CHOICES if benchmark.kind == "choice" else 1)
    return LoadedTask(benchmark, parts, " ".join(revisions) or None, requests)


def _judge(loaded: LoadedTask, model: LM, settings: Settings) -> dict[tuple[str, int], float]:
    """Have the harness ask `model` every question once, and judge the answers: their worth, by the
    harness's task and the number of the question."""
    benchmark = loaded.benchmark
    with _quiet():
        found = evaluate(
            lm=model,
            task_dict={"tasks": dict(loaded.parts), "groups": {}},
            limit=settings.limit,
            bootstrap_iters=0,
            apply_chat_template=benchmark.kind == "generated",
            fewshot_as_multiturn=benchmark.kind == "generated",
            confirm_run_unsafe_code=settings.run_code,
        )
    return {
        (part, int(sample["doc_id"])): float(sample[benchmark.metric])
        for part, samples in found["samples"].items()
        for sample in samples
        if sample["filter"] == benchmark.filter
    }


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
    config: dict[str, Any] = load_yaml(file, resolve_func=not benchmark.runs_code)
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
        config["process_results"] = load_yaml(_TASKS / benchmark.scored_by)["process_results"]
    if benchmark.runs_code:  # in place of the harness's functions
        config["metric_list"] = [
            {"metric": benchmark.metric, "aggregation": "mean", "higher_is_better": True}
        ]
        reader = {"function": "custom", "filter_fn": programs}
        config["filter_list"] = [{"name": benchmark.filter, "filter": [reader]}]
        config["process_results"] = judge_code
    return config


def _dataset(config: dict[str, Any], rows: Rows) -> Any:
    """A function that gives the rows by split, prepared once: the harness prepares them at every
    look, and GPQA's task draws the order of the choices anew each time."""
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


class AnswersMissing(Exception):
    """Questions are open, and there is no server to ask; `args` is their number."""


@dataclass(eq=False)
class KeptModel(LM):  # type: ignore[misc]
    """A model for the harness, one repeat of one cache. Answers of an earlier run are read, others
    asked for. `used` are the answers in the order of the questions."""

    arm: str
    seed: int
    settings: Settings
    answers: Answers
    ask: Ask | None
    tick: Callable[[], None]
    used: list[tuple[Key, Answer]] = field(default_factory=list)
    asked: Counter[str] = field(default_factory=Counter)
    tokenizer_name = "server"

    def __post_init__(self) -> None:
        super().__init__()

    def chat_template(self, *_: Any) -> str:
        return "server"

    def apply_chat_template(self, messages: list[dict[str, str]], **_: Any) -> str:
        """Messages as text, for the way through the harness; the server applies its template."""
        return json.dumps([{"role": one["role"], "content": one["content"]} for one in messages])

    def generate_until(self, requests: Sequence[Any], **_: Any) -> list[str]:
        generation = self.settings.generation
        asked = [chat_request(json.loads(one.args[0]), generation, self.seed) for one in requests]
        return [answer.text for answer in self._all(asked)]

    def loglikelihood(self, requests: Sequence[Any], **_: Any) -> list[tuple[float, bool]]:
        """Whether a continuation is the most likely one is read by no benchmark here."""
        asked = [{"context": one.args[0], "continuation": one.args[1]} for one in requests]
        return [(answer.log_probability or 0.0, False) for answer in self._all(asked)]

    def loglikelihood_rolling(self, requests: Sequence[Any], **_: Any) -> list[float]:
        raise NotImplementedError

    def _all(self, asked: Sequence[Mapping[str, Any]]) -> list[Answer]:
        keys = []
        for request in asked:
            hashed = request_key(request)
            keys.append(Key(self.arm, self.seed, hashed, self.asked[hashed]))
            self.asked[hashed] += 1
        pairs = zip(keys, asked, strict=True)
        open_ = [(key, request) for key, request in pairs if self.answers.get(key) is None]
        for _ in range(len(asked) - len(open_)):
            self.tick()
        if open_:
            if self.ask is None:
                raise AnswersMissing(len(open_))
            self._fill(open_, self.ask)
        found: list[Any] = [self.answers.get(key) for key in keys]
        self.used += zip(keys, found, strict=True)
        return found

    def _fill(self, questions: Sequence[tuple[Key, Mapping[str, Any]]], ask: Ask) -> None:
        """Ask; the first failure ends it, and answers that were on their way are kept. Ctrl-C does
        not wait for them, because the end of the server ends them."""

        def one(question: tuple[Key, Mapping[str, Any]]) -> None:
            key, request = question
            self.answers.keep(key, ask(request))
            self.tick()

        pool, waits = ThreadPoolExecutor(self.settings.concurrency), True
        try:
            list(pool.map(one, questions))
        except (KeyboardInterrupt, SystemExit):
            waits = False
            raise
        finally:
            pool.shutdown(wait=waits, cancel_futures=True)


_PASSED = 86
"""Exit code behind the tests: a program that ends Python itself has not passed."""
_BLOCK = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)
_RUNNER = f"""
import resource, sys
resource.setrlimit(resource.RLIMIT_AS, ({MEMORY}, {MEMORY}))
resource.setrlimit(resource.RLIMIT_CPU, ({int(SECONDS)}, {int(SECONDS)}))
resource.setrlimit(resource.RLIMIT_FSIZE, ({1 << 20}, {1 << 20}))
with open(sys.argv[1], encoding="utf-8") as stream:
    exec(compile(stream.read(), "answer", "exec"), {{"__name__": "__main__"}})
sys.exit({_PASSED})
"""


def programs(answers: list[list[str]], docs: list[dict[str, Any]]) -> list[list[str]]:
    """A filter of the harness: the solutions in `answers`, each ready for the tests of its `doc`.
    A solution is the last code block of an answer that defines the wanted function, with the lines
    before the function in the prompt; else the text of the answer continues the prompt."""

    def program(prompt: str, function: str, answer: str) -> str:
        head, blocks = f"def {function}(", _BLOCK.findall(answer)
        whole = [block for block in blocks if head in block]
        if whole:
            return f"{prompt.partition(head)[0]}\n{whole[-1]}"
        return prompt + (blocks[-1] if blocks else answer)

    return [
        [program(doc["prompt"], doc["entry_point"], answer) for answer in many]
        for many, doc in zip(answers, docs, strict=True)
    ]


def judge_code(doc: dict[str, Any], results: list[list[str]]) -> dict[str, float]:
    """The harness's `process_results`: 1 where the first program passes the tests of `doc`."""
    tests = f"{doc['test']}\ncheck({doc['entry_point']})\n"
    return {"pass@1": float(passes(f"{results[0][0]}\n{tests}"))}


def passes(program: str) -> bool:
    with tempfile.TemporaryDirectory(prefix="oscar-zoo-code-") as folder:
        path = Path(folder) / "answer.py"
        path.write_text(program, encoding="utf-8", errors="replace")
        child = children.start(
            children.python("-c", _RUNNER, str(path), isolated=True),
            cwd=folder,
            env={"PATH": os.environ.get("PATH", ""), "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            return bool(child.wait(SECONDS) == _PASSED)
        except subprocess.TimeoutExpired:
            return False
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)  # also what it has started
            child.wait()
