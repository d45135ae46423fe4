"""Ask benchmarks of an INT2 server and of a BF16 server, and compare them question by question."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oscar_zoo.app.artifacts import Artifact
from oscar_zoo.app.benchmark_plan import PreparedTask, Subject, find_subject, prepare
from oscar_zoo.app.benchmark_record import TaskResult, keep, remark, scores_of
from oscar_zoo.app.benchmark_request import BenchmarkRequest
from oscar_zoo.app.benchmark_servers import LABELS
from oscar_zoo.app.server_answers import counter
from oscar_zoo.artifact.output_files import check_file
from oscar_zoo.engines.requirements import require_eval, require_serve
from oscar_zoo.engines.server_client import ServerClient
from oscar_zoo.engines.sglang.launch.user_flags import UserFlags
from oscar_zoo.errors import ServerFailed, UsageError
from oscar_zoo.evaluate.phases import Phase
from oscar_zoo.observer import SILENT, Note, Observer

if TYPE_CHECKING:
    from oscar_zoo.evaluate.benchmarks.answers import Answers
    from oscar_zoo.evaluate.benchmarks.run import ArmResult

_KEPT = "answers until now are kept; the same command goes on from there"


@dataclass(frozen=True)
class BenchmarkResult:
    """What the servers are worth.

    Attributes:
        model: its name.
        artifact: what the INT2 server had.
        tasks: one for every benchmark.
        file: the score file that was written, or `None` where no score can be recorded.
    """

    model: str
    artifact: Artifact
    tasks: tuple[TaskResult, ...]
    file: Path | None


def run_benchmarks(request: BenchmarkRequest, observer: Observer = SILENT) -> BenchmarkResult:
    """Ask every task of every cache, judge the answers, and write the score file.

    Answers are kept as they come. The same request goes on where an earlier run stopped, and asks
    nothing when all answers are there.
    """
    wanted = request.benchmarks()
    check_file(request.output)
    require_eval()
    flags = UserFlags(request.extra)
    if request.url is None:
        require_serve()
    subject = find_subject(request, flags, observer)
    if request.output is not None and subject.artifact.id is None:
        raise UsageError(
            f"{subject.artifact.label} has no oscar.json, so a score file cannot name it.",
            hint="leave out --output, or give an artifact with a manifest",
        )
    prepared = [prepare(one, request, subject, observer) for one in wanted]
    with ExitStack() as stack:
        kept = [stack.enter_context(_answers(one, fresh=request.fresh)) for one in prepared]
        tasks = _ask_all(prepared, kept, request, subject, observer)
    for one in tasks:
        remark(one, subject, observer)
    file = keep(tasks, prepared, request, subject, observer)
    return BenchmarkResult(subject.choice.name, subject.artifact, tasks, file)


@contextmanager
def _answers(one: PreparedTask, *, fresh: bool) -> Iterator[Answers]:
    from oscar_zoo.evaluate.benchmarks.answers import open_answers

    with open_answers(one.place, one.identity, fresh=fresh) as answers:
        yield answers


def _ask_all(
    prepared: Sequence[PreparedTask],
    kept: Sequence[Answers],
    request: BenchmarkRequest,
    subject: Subject,
    observer: Observer,
) -> tuple[TaskResult, ...]:
    """One server after the other, each for all tasks that lack answers of it."""
    from oscar_zoo.evaluate.benchmarks.run import kept_arm

    found: list[dict[str, ArmResult]] = [{} for _ in prepared]
    for cache in request.caches():
        open_ = []
        for at, (one, answers) in enumerate(zip(prepared, kept, strict=True)):
            arm = kept_arm(cache, one.task, one.settings, answers)
            if arm is None:
                open_.append(at)
            else:
                found[at][cache] = arm
        if not open_:
            continue
        with subject.servers.serving(cache, observer) as client:
            labels = {at: f"{LABELS[cache]}, {prepared[at].task.benchmark.name}" for at in open_}
            observer.begin(
                [Phase(labels[at], "answers", _requests(prepared[at])) for at in open_],
                timed=False,
            )
            for at in open_:
                found[at][cache] = _ask_one(
                    cache, prepared[at], kept[at], client, labels[at], observer
                )
            observer.begin((), timed=False)
    return tuple(
        TaskResult(one.task.benchmark.name, arms, scores_of(one, arms, answers, subject), one.place)
        for one, arms, answers in zip(prepared, found, kept, strict=True)
    )


def _ask_one(
    cache: str,
    one: PreparedTask,
    answers: Answers,
    client: ServerClient,
    label: str,
    observer: Observer,
) -> ArmResult:
    from oscar_zoo.evaluate.benchmarks.client import ask
    from oscar_zoo.evaluate.benchmarks.run import run_arm

    tick = counter(observer, label, _requests(one))
    try:
        return run_arm(cache, one.task, one.settings, answers, ask=partial(ask, client), tick=tick)
    except ServerFailed:
        observer.note(Note("benchmark.kept", f"{_KEPT}.", {"answers": str(one.place)}))
        raise
    except (KeyboardInterrupt, SystemExit) as error:
        error.add_note(_KEPT)
        raise


def _requests(one: PreparedTask) -> int:
    return one.task.requests * len(one.settings.seeds)


def benchmark_artifact(
    artifact: str | Path,
    tasks: str | Sequence[str],
    *,
    observer: Observer = SILENT,
    **options: Any,
) -> BenchmarkResult:
    """Ask benchmarks of an INT2 server and of a BF16 server, and compare them.

    Args:
        artifact: name of an artifact, or its folder.
        tasks: benchmarks by name, such as `gpqa_diamond`.
        observer: hears of progress and remarks.
        options: the other fields of `BenchmarkRequest`, by name.

    Returns:
        Per task what every cache answered, and its scores; `file` is the score file.

    Raises:
        OscarZooError: as `run_benchmarks`.
    """
    names = (tasks,) if isinstance(tasks, str) else tuple(tasks)
    return run_benchmarks(BenchmarkRequest(artifact, names, **options), observer)
