"""Measure servers with an INT2 cache, and compare them with the model in this process.

Servers run first and one after the other, so that each has the whole GPU. The reference is loaded
when they are gone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING

from oscar_zoo.app import targets
from oscar_zoo.app.artifact_model import both_sides, geometry_for, model_for, recipe_for
from oscar_zoo.app.artifacts import Artifact, open_artifact
from oscar_zoo.app.devices import pick_device, pick_serving_device, require_serve, serving_dtype
from oscar_zoo.app.progress import SILENT, Note, Observer
from oscar_zoo.app.server_start import StartObserver
from oscar_zoo.app.sources import Sources
from oscar_zoo.artifact.specs import Clip, ServingRecipe
from oscar_zoo.engines.sglang.launch.denied_flags import check_extra_flags
from oscar_zoo.engines.sglang.launch.own_server import WantedServer, log_file, own_server
from oscar_zoo.engines.sglang.launch.variants import ServerVariant, check_flags, variants
from oscar_zoo.errors import OscarZooError, ServerFailed, UsageError
from oscar_zoo.evaluate.server_client import ServerClient
from oscar_zoo.models import nvidia_smi
from oscar_zoo.registry.model_names import ModelChoice

if TYPE_CHECKING:
    from oscar_zoo.app.evaluate import Task
    from oscar_zoo.evaluate.server_comparison import ComparisonRow
    from oscar_zoo.evaluate.server_tasks import ServerQuestions, ServerRun
    from oscar_zoo.models.loading import Dtype, LoadedModel

RESERVED_POSITIONS = 16
"""Positions of a model that a server keeps for itself."""
POOL_TOKENS = 1 << 18
"""Least size of the cache of a server on a GPU. A small cache starts quickly and leaves memory to
other processes."""


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


@dataclass(frozen=True)
class ServerFailure:
    """A server that gave no answers.

    Attributes:
        variant: which one.
        error: why.
    """

    variant: ServerVariant
    error: OscarZooError


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


@dataclass(frozen=True)
class _Subject:
    """What is served, with what, and what it is asked."""

    artifact: Artifact
    choice: ModelChoice
    revision: str | None
    recipe: ServingRecipe
    device: str
    gpu: int
    dtype: Dtype
    questions: ServerQuestions


def evaluate(request: ServerEvaluateRequest, observer: Observer = SILENT) -> ServerEvaluation:
    """Ask the servers, then the model in this process, and compare their answers.

    Raises:
        MissingDependency: torch or sglang is not installed.
        ServerFailed: the only server did not start, or does not answer.
        UsageError: flags that do not go together, an artifact with only one side, a text that is
            too short, or a running server with other settings than the artifact's recipe.
        OscarZooError: artifact, model or text cannot be found or read.
    """
    check_extra_flags(request.extra)
    check_flags(request.extra)
    running = None if request.url is None else ServerClient(request.url, timeout=request.timeout)
    if running is None:
        require_serve()
    subject = _subject(request, observer)
    runs: list[ServerRun]
    failures: list[ServerFailure] = []
    if running is not None:
        _check_recipe(running, subject.recipe)
        runs = [_ask(running, subject.questions, observer, radix=True)]
    else:
        runs, failures = _ask_own_servers(
            request.variants, subject, request.extra, request.timeout, observer
        )
    rows: list[ComparisonRow] = []
    if runs:
        observer.advance("loading the model", 0, 0)
        model = _load(subject, runs[0], request.device, stream=request.stream_weights)
        rows = _compare(runs, model, subject, observer)
    return ServerEvaluation(
        subject.choice.name,
        subject.artifact,
        subject.device,
        subject.recipe,
        subject.questions,
        tuple(rows),
        tuple(failures),
    )


def sweep(device: str | None, *, full: bool = False) -> tuple[ServerVariant, ...]:
    """The servers of a sweep: two chunk and page sizes, with and without a prefix cache, and on two
    ranks where there are two GPUs.

    Args:
        device: as the user wrote it.
        full: every combination instead of every pair of values.
    """
    on_gpu = pick_serving_device(device, check=False)[0] != "cpu"
    two = on_gpu and len(nvidia_smi.visible(nvidia_smi.gpus())) > 1
    return variants((512, 8192), (1, 16), (True, False), (1, 2) if two else (1,), full=full)


def _subject(request: ServerEvaluateRequest, observer: Observer) -> _Subject:
    from oscar_zoo.evaluate.texts import read_text
    from oscar_zoo.models.model_hub import check_fetchable

    text = read_text(request.data, "validation")
    artifact = open_artifact(targets.parse(request.artifact), Sources(request.hubs), observer)
    again = f"oscar-zoo eval {quote(str(request.artifact))} --model FOLDER"
    choice = model_for(artifact, request.model, observer, again=again)
    recipe = recipe_for(artifact, choice, geometry_for(choice)).override(clip=request.clip)
    both_sides(artifact)
    device, gpu = pick_serving_device(request.device)
    check_fetchable(choice.source, request.revision)
    from oscar_zoo.evaluate.server_tasks import make_questions
    from oscar_zoo.models.inspect import inspect_model
    from oscar_zoo.models.loading import load_tokenizer

    block = inspect_model(choice.source, revision=request.revision, model_id=choice.model_id)
    tokenizer = load_tokenizer(choice.source, revision=request.revision)

    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return ids

    positions = (block.rope and block.rope.max_position) or request.length + RESERVED_POSITIONS
    questions = make_questions(
        encode(text),
        encode,
        tasks=request.tasks,
        exact=recipe.windows,
        length=min(request.length, positions - RESERVED_POSITIONS),
        windows=request.windows,
        answers=request.answers,
    )
    dtype = serving_dtype(request.dtype, device)
    return _Subject(artifact, choice, request.revision, recipe, device, gpu, dtype, questions)


def _ask_own_servers(
    wanted: Sequence[ServerVariant],
    subject: _Subject,
    extra: tuple[str, ...],
    timeout: float,
    observer: Observer,
) -> tuple[list[ServerRun], list[ServerFailure]]:
    """Start one server after the other and ask each; the failure of one of several is a result."""
    runs: list[ServerRun] = []
    failures: list[ServerFailure] = []
    for variant in wanted:
        server = _wanted_server(variant, subject, extra, timeout)
        try:
            with own_server(server, StartObserver(str(variant), observer)) as started:
                observer.begin((), timed=False)
                runs.append(_ask(started.client, subject.questions, observer, radix=variant.radix))
        except ServerFailed as error:
            if len(wanted) == 1:
                raise
            failures.append(ServerFailure(variant, error))
            text = f"{variant}: {error.message}"
            observer.note(Note("server.failed", text, {"code": error.code, "hint": error.hint}))
    return runs, failures


def _wanted_server(
    variant: ServerVariant, subject: _Subject, extra: tuple[str, ...], timeout: float
) -> WantedServer:
    tokens = max(POOL_TOKENS, 2 * subject.questions.longest)
    pool = () if subject.device == "cpu" else (f"--max-total-tokens={tokens}",)
    return WantedServer(
        log=log_file("eval-server"),
        environment=variant.environment(subject.device),
        model=subject.choice.source,
        revision=subject.revision,
        verified=subject.artifact.verified,
        recipe=subject.recipe,
        device=subject.device,
        flags=(*variant.flags, f"--dtype={subject.dtype}", *pool, *extra),
        timeout=timeout,
        gpu=subject.gpu,
    )


def _check_recipe(client: ServerClient, recipe: ServingRecipe) -> None:
    """Refuse a running server whose settings differ from those of the reference."""
    windows, clip = recipe.windows, recipe.clip
    ours = {"sink": windows.sink, "recent": windows.recent, "k_clip": clip.k, "v_clip": clip.v}
    told = client.facts().recipe
    for name, value in ours.items():
        if told.get(name, value) != value:
            raise UsageError(
                f"the server has {name} {told[name]}, the artifact's recipe says {value}.",
                hint="give the artifact that it serves, or its clip ratios with --clip",
            )


def _ask(
    client: ServerClient, questions: ServerQuestions, observer: Observer, *, radix: bool
) -> ServerRun:
    from oscar_zoo.evaluate.server_tasks import ask, requests_of

    run = ask(
        client, questions, _counter(observer, "requests", requests_of(questions, radix=radix))
    )
    observer.begin((), timed=False)
    return run


def _load(
    subject: _Subject, run: ServerRun, device: str | None, *, stream: bool | None
) -> LoadedModel:
    """The reference, in the type that the server computed in."""
    from oscar_zoo.models.loading import load_model
    from oscar_zoo.models.memory import Workload

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
    runs: Sequence[ServerRun], model: LoadedModel, subject: _Subject, observer: Observer
) -> list[ComparisonRow]:
    from oscar_zoo.evaluate.server_comparison import ReferenceRun, compare
    from oscar_zoo.evaluate.simulated_cache import CacheSpec
    from oscar_zoo.models.memory import memory_errors

    cache = CacheSpec(*both_sides(subject.artifact), subject.recipe)
    with memory_errors(model.block.id, model.device):
        reference = ReferenceRun(
            model, cache, subject.questions, _counter(observer, "reference", 0)
        )
        rows = [compare(run, reference, recent=subject.recipe.windows.recent) for run in runs]
    observer.begin((), timed=False)
    return rows


def _counter(observer: Observer, label: str, total: int) -> Callable[[], None]:
    """A callback that counts one more of `total`."""
    done = 0
    observer.advance(label, done, total)

    def tick() -> None:
        nonlocal done
        done += 1
        observer.advance(label, done, total)

    return tick
