"""The `bench serve` use case on a terminal: check, prepare, run both sides, show, write."""

from __future__ import annotations

import importlib.util
import os
import signal
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from oscar_zoo import paths
from oscar_zoo.app import targets
from oscar_zoo.app.artifacts import Artifact, open_artifact
from oscar_zoo.app.devices import pick_serving_device, require_serve
from oscar_zoo.app.sources import Sources
from oscar_zoo.app.targets import parse_model
from oscar_zoo.artifact import durable
from oscar_zoo.artifact.specs import Geometry, ServingRecipe
from oscar_zoo.bench import dummy, run, sides
from oscar_zoo.bench.report import LABELS, Report
from oscar_zoo.cli import machine
from oscar_zoo.cli.choosing import model_for, model_geometry, recipe_for_model
from oscar_zoo.cli.render import terminal
from oscar_zoo.cli.render.bench import print_report
from oscar_zoo.cli.render.progress import TerminalObserver, current
from oscar_zoo.engines.sglang import concurrency, flags
from oscar_zoo.engines.sglang.launch import preflight, server, staging
from oscar_zoo.engines.sglang.offline_job import Bulk, Case, OfflineJob
from oscar_zoo.errors import MissingDependency, PathNotFound, UsageError
from oscar_zoo.models import config_file
from oscar_zoo.models.folder_geometry import geometry_of_folder
from oscar_zoo.registry.model_names import ModelChoice

MOST_CASES = 64
STOPPED = {"SIGINT": "Ctrl-C", "SIGTERM": "SIGTERM"}
"""Signals that end a comparison, as people call them."""
HELP = "oscar-zoo bench serve --help"


@dataclass(frozen=True)
class BenchRequest:
    """The command line of `bench serve`, parsed; see its help for the meaning of each."""

    artifact: str | None
    extra: tuple[str, ...]
    batch: str
    context: str
    new_tokens: int
    job: str | None
    turns: int
    dummy_weights: str | None
    model: str | None
    revision: str | None
    baseline: str | None
    csv: Path | None
    plot: Path | None
    timeout: float
    hubs: tuple[str, ...]
    device: str | None
    quiet: bool
    as_json: bool

    @property
    def silent(self) -> bool:
        """Whether to show neither progress nor notes."""
        return self.quiet or self.as_json

    @property
    def cases(self) -> tuple[Case, ...]:
        """Every batch with every context; raises `UsageError`."""
        batches, contexts = numbers("--batch", self.batch), numbers("--context", self.context)
        if len(batches) * len(contexts) > MOST_CASES:
            raise UsageError(
                f"{len(batches) * len(contexts)} cases are more than {MOST_CASES}.", hint=HELP
            )
        return tuple(Case(batch=b, context=c) for b in batches for c in contexts)

    @property
    def longest(self) -> int:
        """Tokens of the longest request, prompt and answer."""
        cases = max(case.context for case in self.cases) + self.new_tokens
        return max(cases, self.bulk.longest) if self.bulk else cases

    @property
    def bulk(self) -> Bulk | None:
        """What `--job` and `--turns` say; raises `UsageError`."""
        if self.job is None and self.turns > 1:
            raise UsageError(
                "--turns needs a job.", hint="for example --job 64x16000x256 --turns 2"
            )
        if self.job is None:
            return None
        bulk = bulk_of(self.job).model_copy(update={"turns": self.turns})
        if self.turns > 1 and bulk.requests > sides.ORDERED:
            raise UsageError(
                f"{bulk.requests:,} conversations are more than {sides.ORDERED}, which SGLang"
                " orders by prefix.",
                hint="lower the requests of --job",
            )
        return bulk


class SubjectRequest(Protocol):
    """What a command line has to say for `find_subject`."""

    @property
    def artifact(self) -> str | None: ...
    @property
    def dummy_weights(self) -> str | None: ...
    @property
    def model(self) -> str | None: ...
    @property
    def hubs(self) -> tuple[str, ...]: ...
    @property
    def silent(self) -> bool: ...
    @property
    def longest(self) -> int: ...


@dataclass(frozen=True)
class Subject:
    """What is measured: the model, and the artifact of the INT2 side."""

    choice: ModelChoice
    source: str
    geometry: Geometry | None
    artifact: Artifact


def bench(request: BenchRequest) -> int:
    """Run `bench serve`; 1 when a side failed, 130 or 143 when a signal ended it halfway."""
    _check(request)
    require_serve()
    with ExitStack() as stack:
        private = stack.enter_context(staging.private_folder())
        report = _compare(request, find_subject(request, private), private)
    if request.csv is not None:
        write_file(request.csv, report.to_csv().encode())
    if request.plot is not None:
        from oscar_zoo.bench.chart import render_png

        write_file(request.plot, render_png(report))
    if request.as_json:
        terminal.emit_json(report.to_json())
    else:
        print_report(report)
        for path in (request.csv, request.plot):
            terminal.note(f"Saved {path}", quiet=request.quiet or path is None)
    if report.stopped is not None:
        cache, last = list(report.sides.items())[-1]
        where = f" ({LABELS[cache]}: {last.error})" if last.error else ""
        what = f"stopped by {STOPPED[report.stopped]}{where}; what was measured until then is kept"
        terminal.print_error("interrupted", what, None, as_json=False)
        return 128 + signal.Signals[report.stopped]
    return 1 if report.errors else 0


def numbers(option: str, text: str) -> tuple[int, ...]:
    """The whole numbers in `1,16`, each once; raises `UsageError`."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and 0 < int(part) < 1 << 24 for part in parts):
        raise UsageError(
            f"{option} {text!r} is not a list of whole numbers.", hint=f"for example {option} 1,16"
        )
    return tuple(dict.fromkeys(map(int, parts)))


def check_subject(request: SubjectRequest) -> None:
    """Refuse a command line that names nothing to measure, or too much; raises `UsageError`."""
    if request.artifact is None and request.dummy_weights is None:
        raise UsageError(
            "nothing to measure was named.", hint="give an artifact, or --dummy-weights Qwen3-8B"
        )
    if request.model is not None and request.dummy_weights is not None:
        raise UsageError("--model and --dummy-weights exclude each other.", hint="give one of them")


def check_file(path: Path | None) -> None:
    """Refuse a file that could not be written in the end; raises `UsageError` or `PathNotFound`."""
    if path is not None and path.is_dir():
        raise UsageError(f"{path} is a folder.", hint="name a file")
    if path is not None and not path.parent.is_dir():
        raise PathNotFound.for_path(path.parent, "folder")


def bulk_of(text: str) -> Bulk:
    """The job that `64x30000x512` means; raises `UsageError`."""
    parts = text.lower().split("x")
    if len(parts) != 3 or not all(
        part.isascii() and part.isdigit() and 0 < int(part) < 1 << 24 for part in parts
    ):
        raise UsageError(
            f"--job {text!r} is not REQUESTSxPROMPTxANSWER.",
            hint="for example --job 64x30000x512, in requests and tokens",
        )
    requests, context, new_tokens = map(int, parts)
    return Bulk(requests=requests, context=context, new_tokens=new_tokens)


def _check(request: BenchRequest) -> None:
    """Refuse before anything is loaded what could only fail at the end; raises `UsageError` and its
    kin."""
    sides.check_flags(request.extra)
    _ = request.cases, request.bulk
    check_subject(request)
    if request.plot is not None:
        if request.plot.suffix.lower() != ".png":
            raise UsageError(
                f"--plot {request.plot} is not a PNG file.", hint="end its name in .png"
            )
        if importlib.util.find_spec("matplotlib") is None:
            raise MissingDependency.for_extra("matplotlib", "compute")
    check_file(request.csv)
    check_file(request.plot)


def find_subject(request: SubjectRequest, private: Path) -> Subject:
    """The model and the verified artifact; with `--dummy-weights` made here as far as nobody named
    them."""
    if request.dummy_weights is None:
        artifact = _open(request, request.artifact or "")
        choice = model_for(artifact, request.model, again="--model FOLDER")
        if Path(choice.source).is_dir():
            room = dummy.longest_context(config_file.read_config(Path(choice.source)))
            if room is not None and request.longest > room:
                raise UsageError(
                    f"{choice.name} reads up to {room:,} tokens, {request.longest:,} are wanted.",
                    hint="lower --context and --new-tokens, or what --job and --turns say",
                )
        return Subject(choice, choice.source, model_geometry(choice), artifact)
    choice = parse_model(request.dummy_weights, current())
    folder = private / choice.name
    geometry = _write_dummy(choice, folder, request.longest)
    if request.artifact is not None:
        artifact = _open(request, request.artifact)
    else:
        dummy.write_rotations(private / "hadamard", geometry)
        artifact = _open(request, private / "hadamard")
    return Subject(choice, str(folder), geometry, artifact)


def _open(request: SubjectRequest, text: str | Path) -> Artifact:
    with TerminalObserver(quiet=request.silent) as observer:
        return open_artifact(targets.parse(text), Sources(request.hubs), observer)


def _write_dummy(choice: ModelChoice, folder: Path, longest: int) -> Geometry:
    """Write the configuration of a model without weights; the geometry of its cache."""
    if Path(choice.source).is_dir():
        config = config_file.read_config(Path(choice.source))
    elif choice.recipe is not None:
        config = dummy.config_of_recipe(choice.recipe)
    else:
        raise UsageError(
            f"the shapes of {choice.source} are not known here.",
            hint="give a folder that holds its config.json",
        )
    dummy.write_model(folder, config, longest=longest)
    return geometry_of_folder(folder, choice.model_id)


def _compare(request: BenchRequest, subject: Subject, private: Path) -> Report:
    device, gpu = pick_serving_device(request.device)
    staged = private / "rotations"
    digest = staging.stage_rotations(subject.artifact.verified, staged)
    recipe = recipe_for_model(subject.artifact, subject.choice, subject.geometry)
    engines = sides.Engines(
        model=subject.source,
        random_weights=request.dummy_weights is not None,
        rotations=staged,
        rotations_sha256=digest,
        recipe=recipe,
        device=device,
        baseline=request.baseline or sides.BASELINES[device],
        kernels=staging.kernels_folder(),
        cases=request.cases,
        new_tokens=request.new_tokens,
        requests=_usual_requests(subject, recipe, request.extra, device, gpu),
        port=server.free_port(),
        revision=request.revision,
        extra=request.extra,
        bulk=request.bulk,
        gpu=gpu,
    )
    made = request.dummy_weights is not None and request.artifact is None
    cards = machine.gpu().facts["gpus"] if device == "cuda" else []
    results, stopped = _sides(engines, request, private)
    return Report(
        model=subject.choice.name,
        random_weights=engines.random_weights,
        artifact=("Hadamard" if made else subject.artifact.label, subject.artifact.verified.digest),
        device=cards[gpu]["name"] if len(cards) > gpu else device.upper(),
        new_tokens=request.new_tokens,
        cases=request.cases,
        sides=results,
        bulk=request.bulk,
        stopped=stopped,
    )


def _sides(
    engines: sides.Engines, request: BenchRequest, private: Path
) -> tuple[dict[sides.Cache, run.SideResult], str | None]:
    """Measure one side after the other; the second value is the signal that ended it early.

    A signal before there is any figure to keep is raised.
    """
    results: dict[sides.Cache, run.SideResult] = {}
    try:
        for cache in sides.CACHES:
            results[cache] = run.SideResult()
            _side(cache, engines, request, private, results[cache])
    except (KeyboardInterrupt, SystemExit) as error:
        if not any(result.measured for result in results.values()):
            raise
        return results, "SIGINT" if isinstance(error, KeyboardInterrupt) else "SIGTERM"
    return results, None


def _usual_requests(
    subject: Subject, recipe: ServingRecipe, extra: tuple[str, ...], device: str, gpu: int
) -> int:
    """Requests at a time of an INT2 server with these flags on this machine."""
    if subject.geometry is None:
        return concurrency.UNKNOWN
    parallel = flags.tensor_parallel(extra) or 1
    memory = concurrency.gpu_memory(gpu, concurrency.Layout.of_flags(extra, tp=parallel).gpus)
    demand = preflight.ServerDemand(
        subject.choice.name,
        subject.geometry,
        recipe.windows,
        None,
        None,
        device,
        gpu,
        parallel,
        extra,
        memory,
    )
    return demand.usual_requests


def _side(
    cache: sides.Cache,
    engines: sides.Engines,
    request: BenchRequest,
    private: Path,
    result: run.SideResult,
) -> None:
    """Measure one side into `result`."""
    label, log = LABELS[cache], _log_file(cache)
    terminal.note(f"{label}: starting SGLang (log: {log})", quiet=request.silent)
    job = OfflineJob(
        arguments=sides.arguments(cache, engines),
        cases=engines.cases,
        new_tokens=engines.new_tokens,
        news=str(private / f"{cache}.news"),
        bulk=engines.bulk,
    )
    place = private / f"{cache}.json"
    place.write_text(job.model_dump_json(), encoding="utf-8")
    plan = sides.command(cache, engines, place, os.environ)
    with terminal.progress("tokens", enabled=not request.silent) as advance:
        run.measure(plan, job, log, limit=request.timeout, progress=advance, into=result)
    if result.error is not None:
        terminal.print_error("server", f"{label}: {result.error}.", f"log: {log}", as_json=False)


def _log_file(cache: str) -> Path:
    folder = paths.state_dir() / "logs"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return folder / f"bench-{cache}.log"


def write_file(path: Path, content: bytes) -> None:
    """Write a whole file or nothing; raises `StorageError`."""
    with durable.storage_errors(f"cannot write {path}"):
        durable.replace_file(path, content)
