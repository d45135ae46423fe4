"""`eval --engine sglang`: ask servers, then the model in this process, and show both side by side.

Servers run first and one after the other, so that each has the whole GPU; the reference is loaded
when they are gone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oscar_zoo.app import targets
from oscar_zoo.app.artifact_model import geometry_for, model_for, recipe_for
from oscar_zoo.app.artifacts import Artifact, open_artifact
from oscar_zoo.app.devices import pick_device, pick_serving_device, require_serve
from oscar_zoo.app.files import check_file, write_file
from oscar_zoo.app.serve_artifact import with_folder
from oscar_zoo.app.server_start import StartObserver
from oscar_zoo.app.sources import Sources
from oscar_zoo.artifact.specs import ServingRecipe
from oscar_zoo.cli.loading import with_overrides
from oscar_zoo.cli.options import numbers
from oscar_zoo.cli.render import server_evaluation, terminal
from oscar_zoo.cli.render.progress import TerminalObserver, current
from oscar_zoo.engines.sglang.launch import plan
from oscar_zoo.engines.sglang.launch.own_server import WantedServer, log_file, own_server
from oscar_zoo.engines.sglang.launch.variants import ServerVariant, check_flags, variants
from oscar_zoo.errors import OscarZooError, ServerFailed, UsageError
from oscar_zoo.evaluate.server_client import ServerClient
from oscar_zoo.registry.model_names import ModelChoice

if TYPE_CHECKING:
    from oscar_zoo.evaluate.server_comparison import ComparisonRow
    from oscar_zoo.evaluate.server_tasks import ServerQuestions, ServerRun
    from oscar_zoo.models.loading import LoadedModel

SCHEMA = "oscar-zoo.eval-server/1"
LENGTH, WINDOWS, ANSWERS = 2000, 6, 60
"""Tokens of a text and of a conversation, texts, and recall questions."""
ROOM = 16
"""Positions of a model that a server keeps to itself."""
POOL_TOKENS = 1 << 18
"""Held by the cache of a server on a GPU, or twice the longest request: it starts quickly and
leaves room to others."""


@dataclass(frozen=True)
class ServerEvalRequest:
    """The command line of `eval --engine sglang`, parsed; see its help for the meaning of each."""

    artifact: str
    model: str | None
    tasks: tuple[str, ...]
    data: str
    windows: int | None
    length: int | None
    answers: int | None
    clip: str | None
    dtype: str
    revision: str | None
    url: str | None
    chunk: str
    page_size: str
    radix: str
    tp: str
    sweep: bool
    full: bool
    csv: Path | None
    timeout: float
    extra: tuple[str, ...]
    hubs: tuple[str, ...]
    device: str | None
    stream_weights: bool | None
    quiet: bool
    as_json: bool

    @property
    def silent(self) -> bool:
        """Whether to show neither progress nor notes."""
        return self.quiet or self.as_json


@dataclass(frozen=True)
class _Subject:
    """What is served, and what it is asked."""

    artifact: Artifact
    choice: ModelChoice
    recipe: ServingRecipe
    device: str
    gpu: int
    dtype: str
    questions: ServerQuestions


@dataclass(frozen=True)
class Failure:
    """A server that gave no answers: which, and why in one line."""

    variant: str
    error: str


def server_eval(request: ServerEvalRequest) -> int:
    """Run `eval --engine sglang`; 1 when a server failed or is not what it should be."""
    wanted = _wanted(request)
    check_file(request.csv)
    if request.url is None:
        require_serve()
    subject = _subject(request)
    runs, failures = _ask(request, subject, wanted)
    rows = _compare(request, subject, runs)
    facts = _facts(subject, rows, failures)
    if request.csv is not None:
        write_file(request.csv, server_evaluation.to_csv(rows).encode())
    if request.as_json:
        terminal.emit_json(facts)
    else:
        server_evaluation.print_rows(subject.choice.name, rows)
        terminal.note(f"Saved {request.csv}", quiet=request.quiet or request.csv is None)
    return 1 if failures or any(row.violations for row in rows) else 0


def _wanted(request: ServerEvalRequest) -> tuple[ServerVariant, ...]:
    """The servers to start; none with `--url`."""
    from oscar_zoo.cli.options import SERVER_EVAL

    given = {name: getattr(request, name) for name in ("chunk", "page_size", "radix", "tp")}
    changed = [name for name, value in given.items() if value != SERVER_EVAL[name]]
    if request.url is not None and (changed or request.sweep or request.full or request.extra):
        raise UsageError(
            "--url measures a server as it is.", hint="leave out what is for a new one"
        )
    if request.sweep and changed:
        raise UsageError(
            f"--sweep and --{changed[0].replace('_', '-')} exclude each other.",
            hint="give one of them",
        )
    plan.check_extra_flags(request.extra)
    check_flags(request.extra)
    if request.url is not None:
        ServerClient(request.url)
        return ()
    if request.sweep:
        return variants(
            (512, 8192), (1, 16), (True, False), _tps(request.device), full=request.full
        )
    chunks, pages, tps = (
        numbers(f"--{n}", given[n.replace("-", "_")]) for n in ("chunk", "page-size", "tp")
    )
    return variants(chunks, pages, _switches(request.radix), tps, full=request.full)


def _tps(device: str | None) -> tuple[int, ...]:
    """1, and 2 where two GPUs are."""
    from oscar_zoo.cli import machine

    on_gpu = pick_device(device) != "cpu"
    return (1, 2) if on_gpu and len(machine.gpu().facts["gpus"]) > 1 else (1,)


def _switches(text: str) -> tuple[bool, ...]:
    parts = [part.strip() for part in text.split(",")]
    if not set(parts) <= {"on", "off"}:
        raise UsageError(
            f"--radix {text!r} is not on, off, or both.", hint="for example --radix on,off"
        )
    return tuple(part == "on" for part in dict.fromkeys(parts))


def _subject(request: ServerEvalRequest) -> _Subject:
    from oscar_zoo.evaluate.texts import read_text

    text = read_text(request.data, "validation")
    with TerminalObserver(quiet=request.silent) as observer:
        artifact = open_artifact(targets.parse(request.artifact), Sources(request.hubs), observer)
    choice = model_for(
        artifact, request.model, current(), again=with_folder("eval", request.artifact)
    )
    recipe = with_overrides(recipe_for(artifact, choice, geometry_for(choice)), clip=request.clip)
    if artifact.verified.k is None or artifact.verified.v is None:
        raise UsageError(
            f"{request.artifact} has only one side; a cache needs K and V.",
            hint="give the whole folder",
        )
    device, gpu = pick_serving_device(request.device)
    dtype = (
        request.dtype if request.dtype != "auto" else "float32" if device == "cpu" else "bfloat16"
    )
    return _Subject(
        artifact, choice, recipe, device, gpu, dtype, _questions(request, choice, recipe, text)
    )


def _questions(
    request: ServerEvalRequest, choice: ModelChoice, recipe: ServingRecipe, text: str
) -> ServerQuestions:
    from oscar_zoo.evaluate.server_tasks import make_questions
    from oscar_zoo.models.inspect import inspect_model
    from oscar_zoo.models.loading import load_tokenizer

    block = inspect_model(choice.source, revision=request.revision, model_id=choice.model_id)
    tokenizer = load_tokenizer(choice.source, revision=request.revision)

    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return ids

    positions = (block.rope and block.rope.max_position) or LENGTH + ROOM
    return make_questions(
        encode(text),
        encode,
        tasks=request.tasks,
        exact=recipe.windows,
        length=min(request.length or LENGTH, positions - ROOM),
        windows=request.windows or WINDOWS,
        answers=request.answers or ANSWERS,
    )


def _ask(
    request: ServerEvalRequest, subject: _Subject, wanted: Sequence[ServerVariant]
) -> tuple[list[ServerRun], list[Failure]]:
    if request.url is not None:
        client = ServerClient(request.url, timeout=request.timeout)
        _check_recipe(client, subject.recipe)
        return [_answers(request, subject, client, radix=True)], []
    runs, failures = [], []
    for variant in wanted:
        try:
            wanted_server = _wanted_server(request, subject, variant)
            with current() as observer:
                news = StartObserver(str(variant), observer)
                with own_server(wanted_server, news) as started:
                    observer.begin((), timed=False)
                    runs.append(_answers(request, subject, started.client, radix=variant.radix))
        except OscarZooError as error:
            if len(wanted) == 1 or not isinstance(error, ServerFailed):
                raise
            failures.append(Failure(str(variant), error.message))
            terminal.print_error(
                error.code, f"{variant}: {error.message}", error.hint, as_json=False
            )
    return runs, failures


def _check_recipe(client: ServerClient, recipe: ServingRecipe) -> None:
    """Refuse a running server that says it has other settings than the reference would have; raises
    `UsageError`."""
    windows, clip = recipe.windows, recipe.clip
    ours = {"sink": windows.sink, "recent": windows.recent, "k_clip": clip.k, "v_clip": clip.v}
    told = client.facts().recipe
    for name, value in ours.items():
        if told.get(name, value) != value:
            raise UsageError(
                f"the server has {name} {told[name]}, the artifact's recipe says {value}.",
                hint="give the artifact that it serves, or its clip ratios with --clip",
            )


def _answers(
    request: ServerEvalRequest, subject: _Subject, client: ServerClient, *, radix: bool
) -> ServerRun:
    from oscar_zoo.evaluate.server_tasks import ask, requests_of

    total = requests_of(subject.questions, radix=radix)
    with _counting(total, "requests", silent=request.silent) as tick:
        return ask(client, subject.questions, tick)


def _wanted_server(
    request: ServerEvalRequest, subject: _Subject, variant: ServerVariant
) -> WantedServer:
    tokens = max(POOL_TOKENS, 2 * subject.questions.longest)
    pool = () if subject.device == "cpu" else (f"--max-total-tokens={tokens}",)
    return WantedServer(
        log=log_file("eval-server"),
        model=subject.choice.source,
        revision=request.revision,
        verified=subject.artifact.verified,
        recipe=subject.recipe,
        device=subject.device,
        flags=(*variant.flags, f"--dtype={subject.dtype}", *pool, *request.extra),
        timeout=request.timeout,
        gpu=subject.gpu,
        environment=variant.environment(subject.device),
    )


def _compare(
    request: ServerEvalRequest, subject: _Subject, runs: Sequence[ServerRun]
) -> list[ComparisonRow]:
    if not runs:
        return []
    from oscar_zoo.evaluate.server_comparison import ReferenceRun, compare
    from oscar_zoo.evaluate.simulated_cache import CacheSpec
    from oscar_zoo.models.memory import memory_errors

    with terminal.waiting("loading the model", enabled=not request.silent):
        model = _load(request, subject, runs[0])
    cache = CacheSpec(subject.artifact.verified.k, subject.artifact.verified.v, subject.recipe)
    with (
        memory_errors(model.block.id, model.device),
        _counting(0, "reference", silent=request.silent) as tick,
    ):
        reference = ReferenceRun(model, cache, subject.questions, tick)
        return [compare(run, reference, recent=subject.recipe.windows.recent) for run in runs]


def _load(request: ServerEvalRequest, subject: _Subject, run: ServerRun) -> LoadedModel:
    from oscar_zoo.models.loading import load_model
    from oscar_zoo.models.memory import Workload

    told = run.facts.dtype
    return load_model(
        subject.choice.source,
        revision=request.revision,
        dtype=told if told in ("float32", "bfloat16") else subject.dtype,  # type: ignore[arg-type]
        device=pick_device(request.device),
        model_id=subject.choice.model_id,
        stream=request.stream_weights,
        workload=Workload(subject.questions.longest),
    )


@contextmanager
def _counting(total: int, what: str, *, silent: bool) -> Iterator[Callable[[], None]]:
    done = 0
    with terminal.progress("", enabled=not silent) as advance:

        def tick() -> None:
            nonlocal done
            done += 1
            advance(done, total, what)

        advance(0, total, what)
        yield tick


def _facts(
    subject: _Subject, rows: Sequence[ComparisonRow], failures: Sequence[Failure]
) -> dict[str, Any]:
    recipe, questions = subject.recipe, subject.questions
    return {
        "schema": SCHEMA,
        "model": subject.choice.name,
        "artifact": {"name": subject.artifact.label, "digest": subject.artifact.verified.digest},
        "device": subject.device,
        "recipe": recipe.model_dump(mode="json"),
        "texts": len(questions.texts),
        "length": questions.longest,
        "shared_tokens": questions.shared,
        "answers": sum(len(talk.answers) for talk in questions.conversations),
        "servers": [row.to_json() for row in rows],
        "failures": [{"server": one.variant, "error": one.error} for one in failures],
    }
