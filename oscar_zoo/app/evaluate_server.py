"""Measure servers with an INT2 cache, and compare them with the model in this process.

Servers run first and one after the other, so that each has the whole GPU. The reference is loaded
when they are gone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from oscar_zoo.app.artifacts import Artifact, open_artifact
from oscar_zoo.app.server_answers import (
    ServerFailure,
    ServerSubject,
    ask_own_servers,
    ask_running,
    counter,
    serving_dtype,
)
from oscar_zoo.artifact.specs import Clip, ServingRecipe, Windows
from oscar_zoo.engines.requirements import require_serve
from oscar_zoo.engines.sglang.launch.user_flags import UserFlags
from oscar_zoo.engines.sglang.launch.variants import ServerVariant, check_flags, variants
from oscar_zoo.models import hardware
from oscar_zoo.observer import SILENT, Observer
from oscar_zoo.registry import targets
from oscar_zoo.registry.hubs.address import Sources
from oscar_zoo.registry.targets import ModelChoice
from oscar_zoo.serving.prepared import ArtifactModel, both_sides, model_for
from oscar_zoo.serving.records import client_of

if TYPE_CHECKING:
    from oscar_zoo.app.evaluate import Task
    from oscar_zoo.evaluate.server_comparison import ComparisonRow
    from oscar_zoo.evaluate.server_tasks import ServerQuestions, ServerRun
    from oscar_zoo.models.loading import Dtype, LoadedModel

RESERVED_POSITIONS = 16
"""Positions of a model that a server keeps for itself."""


@dataclass(frozen=True)
class ServerEvaluateRequest:
    """What to measure; what is not listed here is as in `EvaluateRequest`.

    Attributes:
        windows: texts for perplexity.
        length: tokens of a text and of a conversation, at most.
        answers: recall questions.
        dtype: of the server's weights; `auto` is bfloat16, or float32 on a CPU.
        url: a running server to measure instead of starting one.
        variants: the servers to start, one after the other.
        extra: engine flags for every server that is started.
        timeout: seconds that the start of a server may take, and that one answer may take.
        again: the command line that takes the FOLDER of a model, for errors.
    """

    artifact: str | Path
    model: str | None = None
    tasks: tuple[Task, ...] = ("perplexity", "recall")
    data: str = "manuals"
    windows: int = 6
    length: int = 2000
    answers: int = 60
    clip: Clip | None = None
    device: str | None = None
    dtype: Dtype = "auto"
    stream_weights: bool | None = None
    revision: str | None = None
    hubs: tuple[str, ...] = ()
    url: str | None = None
    variants: tuple[ServerVariant, ...] = (ServerVariant(),)
    extra: tuple[str, ...] = ()
    timeout: float = 1800.0
    again: str = field(default="--model FOLDER", compare=False)


@dataclass(frozen=True)
class ServerEvaluation:
    """What servers answered, beside the reference.

    Attributes:
        model: its name.
        artifact: what was served.
        device: `cpu` or `cuda`.
        recipe: serving recipe in force.
        questions: what was asked.
        rows: one for every server that answered.
        failures: the other servers.
    """

    model: str
    artifact: Artifact
    device: str
    recipe: ServingRecipe
    questions: ServerQuestions
    rows: tuple[ComparisonRow, ...]
    failures: tuple[ServerFailure, ...]

    @property
    def passed(self) -> bool:
        """Whether every server answered and agrees with the reference."""
        return not self.failures and not any(row.violations for row in self.rows)


def evaluate(request: ServerEvaluateRequest, observer: Observer = SILENT) -> ServerEvaluation:
    """Ask the servers, then the model in this process, and compare their answers."""
    from oscar_zoo.evaluate.texts import read_text
    from oscar_zoo.models.model_hub import check_fetchable

    flags = UserFlags(request.extra)
    check_flags(flags)
    running = None if request.url is None else client_of(request.url, timeout=request.timeout)
    if running is None:
        require_serve()
    text = read_text(request.data, "validation")
    named = targets.parse_given_model(request.model, observer, again=request.again)
    artifact = open_artifact(targets.parse(request.artifact), Sources(request.hubs), observer)
    choice = model_for(artifact, named, observer, again=request.again)
    recipe = ArtifactModel.of(artifact, choice).recipe.override(clip=request.clip)
    both_sides(artifact)
    device, gpu = hardware.pick_serving_device(request.device)
    check_fetchable(choice.source, request.revision)
    questions = _questions(
        text,
        choice,
        request.revision,
        recipe.windows,
        tasks=request.tasks,
        length=request.length,
        texts=request.windows,
        answers=request.answers,
    )
    dtype = serving_dtype(request.dtype, device)
    subject = ServerSubject(
        artifact, choice, request.revision, recipe, device, gpu, dtype, questions
    )
    runs: list[ServerRun]
    failures: list[ServerFailure] = []
    if running is not None:
        runs = [ask_running(running, subject, observer)]
    else:
        runs, failures = ask_own_servers(
            request.variants, subject, flags, request.timeout, observer
        )
    rows: list[ComparisonRow] = []
    if runs:
        observer.advance("loading the model", 0, 0)
        model = _load(subject, runs[0], request.device, stream=request.stream_weights)
        rows = _compare(runs, model, subject, observer)
    return ServerEvaluation(
        choice.name, artifact, device, recipe, questions, tuple(rows), tuple(failures)
    )


def sweep(device: str | None, *, full: bool = False) -> tuple[ServerVariant, ...]:
    """The servers of a sweep: two chunk and page sizes, with and without a prefix cache, and on two
    ranks where there are two GPUs.

    Args:
        device: as the user wrote it.
    """
    on_gpu = hardware.pick_serving_device(device, check=False)[0] != "cpu"
    two = on_gpu and len(hardware.visible(hardware.gpus())) > 1
    return variants((512, 8192), (1, 16), (True, False), (1, 2) if two else (1,), full=full)


def _questions(
    text: str,
    choice: ModelChoice,
    revision: str | None,
    windows: Windows,
    *,
    tasks: tuple[Task, ...],
    length: int,
    texts: int,
    answers: int,
) -> ServerQuestions:
    """What to ask, in tokens of the model; `windows` are those of the recipe."""
    from oscar_zoo.evaluate.server_tasks import make_questions
    from oscar_zoo.models.loading import load_tokenizer
    from oscar_zoo.models.model_source import inspect_model

    block = inspect_model(choice.source, revision=revision, model_id=choice.model_id)
    tokenizer = load_tokenizer(choice.source, revision=revision)

    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return ids

    positions = (block.rope and block.rope.max_position) or length + RESERVED_POSITIONS
    return make_questions(
        encode(text),
        encode,
        tasks=tasks,
        exact=windows,
        length=min(length, positions - RESERVED_POSITIONS),
        windows=texts,
        answers=answers,
    )


def _load(
    subject: ServerSubject, run: ServerRun, device: str | None, *, stream: bool | None
) -> LoadedModel:
    """The reference, in the type that the server computed in."""
    from oscar_zoo.models.loading import load_model
    from oscar_zoo.models.memory import Workload, pick_device

    told = run.facts.dtype
    return load_model(
        subject.choice.source,
        revision=subject.revision,
        dtype=told if told in ("float32", "bfloat16") else subject.dtype,  # type: ignore[arg-type]
        device=pick_device(device),
        model_id=subject.choice.model_id,
        stream=stream,
        workload=Workload(subject.questions.longest),
    )


def _compare(
    runs: Sequence[ServerRun], model: LoadedModel, subject: ServerSubject, observer: Observer
) -> list[ComparisonRow]:
    from oscar_zoo.evaluate.server_comparison import ReferenceRun, compare
    from oscar_zoo.evaluate.simulated_cache import CacheSpec
    from oscar_zoo.models.memory import memory_errors

    cache = CacheSpec(*both_sides(subject.artifact), subject.recipe)
    with memory_errors(model.block.id, model.device):
        reference = ReferenceRun(model, cache, subject.questions, counter(observer, "reference", 0))
        rows = [compare(run, reference, recent=subject.recipe.windows.recent) for run in runs]
    observer.begin((), timed=False)
    return rows
