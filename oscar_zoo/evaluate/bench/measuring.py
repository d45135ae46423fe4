"""Compare stock SGLang or vLLM with a BF16 and an FP8 cache, and with an INT2 cache, on this
machine; or put many clients on an INT2 server of our own, and see what does not hold.

Both measure a model and an artifact that are real, or made up here. Unlike `serve`, neither takes a
large model on a CPU that nobody named: they ask for thousands of answers.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

from oscar_zoo.artifact.durable import check_file
from oscar_zoo.artifact.specs import Geometry
from oscar_zoo.engines.requirements import require_serve, require_vllm
from oscar_zoo.engines.sglang import sizing
from oscar_zoo.engines.sglang.launch import plan, preflight, starting
from oscar_zoo.engines.sglang.launch.user_flags import UserFlags
from oscar_zoo.engines.sglang.offline_process import Bulk, Case
from oscar_zoo.errors import FlagRefused, MissingDependency, UnsupportedMachine, UsageError
from oscar_zoo.evaluate.bench import sides
from oscar_zoo.evaluate.bench.load import Load, LoadReport, measure
from oscar_zoo.evaluate.bench.params import BenchLoadParams, BenchServeParams
from oscar_zoo.evaluate.bench.report import CACHES, Cache, MeasuredArtifact, Report, Side
from oscar_zoo.evaluate.params import again, is_number, listed, numbers
from oscar_zoo.models import config_file
from oscar_zoo.models.config_file import geometry_of_folder
from oscar_zoo.models.hardware import device_name, pick_serving_device
from oscar_zoo.observer import SILENT, Note, Observer
from oscar_zoo.registry import targets
from oscar_zoo.registry.artifacts import Artifact, open_artifact
from oscar_zoo.registry.hubs.address import Sources
from oscar_zoo.registry.targets import ModelChoice
from oscar_zoo.serving.artifact_model import ArtifactModel, model_for
from oscar_zoo.serving.memory import needs_of_choice

_P = TypeVar("_P", BenchServeParams, BenchLoadParams)
MOST_CASES = 64
LARGE = 2 * 10**9
"""Bytes of weights from which a CPU is measured only when it was named."""
NO_CANARY = ("--oscar-canary-minutes=0",)
RANDOM_WEIGHTS = ("--load-format=dummy", "--skip-tokenizer-init")
"""Flags of an engine that fills a model with random numbers."""


def compare(params: BenchServeParams, observer: Observer = SILENT) -> Report:
    """Run all sides, one after the other. A side that failed says so in the report, and so does a
    comparison that a signal ended after there was something to keep."""
    params = _checked(params)
    cases, bulk = cases_of(params), bulk_of(params.job, params.turns)
    caches, of_vllm = caches_of(params.caches), params.engine == "vllm"
    flags = sides.read_flags(params.engine_flags, params.engine)
    baselines = tuple(name for text in params.baselines for name in listed(text))
    sides.all_sides(caches, baselines)
    check_files(params)
    (require_vllm if of_vllm else require_serve)()
    longest = max(case.context + params.new_tokens for case in cases)
    asked: Any = {"cases": cases, "bulk": bulk}
    asked |= {"new_tokens": params.new_tokens, "repeats": params.repeats}
    with starting.private_folder() as private:
        longest = max(longest, bulk.longest if bulk else 1)
        subject = find_subject("bench serve", params, private, observer, longest=longest)
        device, gpu = pick_device(subject, params.device, flags, observer)
        artifact, staged, size = subject.artifact, private / "rotations", flags.sizes()
        requests = sizing.UNKNOWN
        if subject.model.geometry is not None:
            demand = subject.model.demand(device, gpu, size.tensor_parallel or 1, size)
            requests = demand.usual_requests
        engines = sides.Engines(
            model=subject.source,
            random_weights=subject.random_weights,
            rotations=staged,
            rotations_sha256=starting.stage_rotations(artifact.verified, staged),
            copy_of=artifact.verified.digest,
            recipe=subject.model.recipe,
            device=device,
            kernels=starting.kernels_folder(),
            requests=requests,
            port=plan.free_port(),
            revision=params.revision,
            flags=flags,
            gpu=gpu,
            engine=params.engine,
            **asked,
        )
        usual = () if of_vllm else (starting.BACKENDS[device],)
        chosen = sides.all_sides(caches, baselines or usual)
        report = Report(
            model=subject.model.choice.name,
            weights="random" if subject.random_weights else "loaded",
            artifact=MeasuredArtifact(subject.label, artifact.verified.digest),
            device=device_name(device, gpu),
            sides=[],
            **asked,
        )
        _measure_all(report, chosen, partial(_measure, engines, params.timeout, private, observer))
    return report


def load(params: BenchLoadParams, observer: Observer = SILENT) -> LoadReport:
    params = _checked(params)
    flags = UserFlags(params.engine_flags)
    require_serve()
    work = Load(params.clients, params.seconds, params.context, params.new_tokens, params.aborts)
    longest = work.longest + work.new_tokens

    def tell(done: int, total: int, label: str) -> None:
        # the label of the load itself counts requests, so it is another each time
        observer.advance("clients at work" if total else label, done, total, "s" if total else "")

    with starting.private_folder() as private:
        subject = find_subject("bench load", params, private, observer, longest=longest)
        device, gpu = pick_device(subject, params.device, flags, observer)
        name = subject.model.choice.name
        wanted = starting.WantedServer(
            model=subject.source,
            revision=params.revision,
            verified=subject.artifact.verified,
            recipe=subject.model.recipe,
            device=device,
            log=starting.log_file("bench-load"),
            timeout=params.timeout,
            gpu=gpu,
            flags=flags.after(*(RANDOM_WEIGHTS if subject.random_weights else NO_CANARY)),
        )
        gpus = 0 if device == "cpu" else flags.sizes().tensor_parallel or 1
        report = LoadReport(work, name, growth=params.growth << 20)
        with starting.own_server(wanted, starting.StartObserver(name, observer)) as started:
            gpu_range = range(gpu, gpu + gpus)
            return measure(started.child, started.client, report, tell, gpus=gpu_range)


def _checked(params: _P) -> _P:
    """`params` with the artifact and the engine flags in their places: click takes the first flag
    for the artifact if none was named."""
    if params.artifact is not None and str(params.artifact).startswith("-"):
        flags = (str(params.artifact), *params.engine_flags)
        params = replace(params, artifact=None, engine_flags=flags)
    if params.artifact is None and params.dummy_weights is None:
        raise UsageError(
            "nothing to measure was named.", hint="give an artifact, or --dummy-weights Qwen3-8B"
        )
    if params.model is not None and params.dummy_weights is not None:
        raise UsageError("--model and --dummy-weights exclude each other.", hint="give one of them")
    return params


def cases_of(params: BenchServeParams) -> tuple[Case, ...]:
    if params.cases is None:
        batches = numbers("--batch", params.batch or "1,16")
        contexts = numbers("--context", params.context or "8000,30000")
        found = tuple(Case(batch=b, context=c) for b in batches for c in contexts)
    elif params.batch is not None or params.context is not None:
        raise UsageError(
            "--cases takes the place of --batch and --context.", hint="leave one of them out"
        )
    else:
        wrong = f"--cases {params.cases!r} is not a list of batches and contexts."
        parts = listed(params.cases)
        pairs = [_sizes(part, 2, wrong, "for example --cases 1x100000,64x8000") for part in parts]
        found = tuple(dict.fromkeys(Case(batch=b, context=c) for b, c in pairs))
    if len(found) > MOST_CASES:
        hint = "try: oscar-zoo bench serve --help"
        raise UsageError(f"{len(found)} cases are more than {MOST_CASES}.", hint=hint)
    return found


def caches_of(text: str) -> tuple[Cache, ...]:
    names = dict.fromkeys(listed(text.lower()))
    if not {*names} <= {*CACHES}:
        raise UsageError(
            f"--caches {text!r} is not a list of caches.",
            hint=f"name one or more of {', '.join(CACHES)}",
        )
    return tuple(cast("Cache", name) for name in names)


def bulk_of(job: str | None, turns: int) -> Bulk | None:
    """The requests that `--job 64x30000x512` and `--turns` mean, or `None` without a job."""
    if job is None:
        if turns > 1:
            raise UsageError(
                "--turns needs a job.", hint="for example --job 64x16000x256 --turns 2"
            )
        return None
    wrong = f"--job {job!r} is not REQUESTSxPROMPTxANSWER."
    hint = "for example --job 64x30000x512, in requests and tokens"
    requests, context, new_tokens = _sizes(job, 3, wrong, hint)
    if turns > 1 and requests > sides.ORDERED:
        raise UsageError(
            f"{requests:,} conversations are more than {sides.ORDERED}, which SGLang orders by"
            " prefix.",
            hint="lower the requests of --job",
        )
    return Bulk(requests=requests, context=context, new_tokens=new_tokens, turns=turns)


def _sizes(text: str, count: int, wrong: str, hint: str) -> list[int]:
    parts = text.lower().split("x")
    if len(parts) != count or not all(map(is_number, parts)):
        raise UsageError(wrong, hint=hint)
    return list(map(int, parts))


def check_files(params: BenchServeParams) -> None:
    """Refuse files that could not be written in the end."""
    if params.plot is not None:
        if params.plot.suffix.lower() != ".png":
            raise UsageError(
                f"--plot {params.plot} is not a PNG file.", hint="end its name in .png"
            )
        if importlib.util.find_spec("matplotlib") is None:
            raise MissingDependency.for_extra("matplotlib", "compute")
    check_file(params.csv)
    check_file(params.plot)


@dataclass(frozen=True)
class Subject:
    """A model and an artifact that fit together; an engine loads `source`, a folder or a hub id,
    and a report calls the artifact `label`."""

    model: ArtifactModel
    source: str
    artifact: Artifact
    random_weights: bool
    label: str


def find_subject(
    verb: str,
    params: BenchServeParams | BenchLoadParams,
    private: Path,
    observer: Observer,
    *,
    longest: int,
) -> Subject:
    """Look up what was named; what nobody named is made in the folder `private`. `longest` is the
    tokens of the longest request, prompt and answer."""
    sources = Sources(params.hubs, offline=params.offline)
    if params.dummy_weights is not None:
        choice = targets.parse_model(params.dummy_weights, observer)
        folder = private / choice.name
        geometry = _write_model(choice, folder, longest)
        if params.artifact is None:
            sides.write_rotations(private / "hadamard", geometry)
        place = params.artifact or private / "hadamard"
        artifact = open_artifact(targets.parse(place), sources, observer)
        label = "Hadamard" if params.artifact is None else artifact.label
        fitting = ArtifactModel.with_geometry(artifact, choice, geometry)
        return Subject(fitting, str(folder), artifact, True, label)
    line = again(verb, params)
    model = targets.parse_given_model(params.model, observer, again=line)
    artifact = open_artifact(targets.parse(params.artifact or ""), sources, observer)
    choice = model_for(artifact, model, observer, again=line)
    if Path(choice.source).is_dir():
        room = config_file.longest_context(config_file.read_config(Path(choice.source)))
        if room is not None and longest > room:
            raise UsageError(
                f"{choice.name} reads up to {room:,} tokens, {longest:,} are wanted.",
                hint="prompt and answer count together; ask for shorter ones (--context,"
                " --new-tokens)",
            )
    fitting = ArtifactModel.of(artifact, choice)
    return Subject(fitting, choice.source, artifact, False, artifact.label)


def _write_model(choice: ModelChoice, folder: Path, longest: int) -> Geometry:
    source = Path(choice.source)
    if source.is_dir():
        config = config_file.read_config(source)
    elif choice.recipe is not None:
        config = sides.written_config(choice.recipe)
    else:
        raise UsageError(
            f"the shapes of {choice.source} are not known here.",
            hint="give a folder that holds its config.json",
        )
    given = source if source.is_dir() else None
    sides.write_model(folder, config, longest=longest, source=given)
    return geometry_of_folder(folder, choice.model_id)


def pick_device(
    subject: Subject, wanted: str | None, flags: UserFlags, observer: Observer
) -> tuple[str, int]:
    """Kind and number of the device that `subject` is measured on: as the user wrote it, or for
    `None` the first GPU, else the CPU. Refuses what does not fit there or takes hours."""
    device, gpu = pick_serving_device(wanted)
    if device != "cpu":
        return device, gpu
    model, name = subject.model, subject.model.choice.name
    needs = needs_of_choice(model.choice) if wanted is None else None
    weights = None if needs is None else needs.weights
    if weights is not None and weights.nbytes > LARGE:
        raise UnsupportedMachine(
            f"no GPU was found, and {name} on a CPU takes hours"
            f" ({weights.nbytes / 1e9:.1f} GB of weights).",
            hint="to do it all the same: --device cpu",
        )
    if wanted is None and subject.random_weights:
        text = (
            f"no GPU was found: {name} runs on the CPU, which takes long for long prompts; Ctrl-C"
            " stops it, and --device cpu says that it is meant."
        )
        observer.note(Note("bench.on_cpu", text, {"model": name}))
    if model.geometry is not None:
        size = replace(flags.sizes(), requests=1)
        demand = model.demand("cpu", 0, size.tensor_parallel or 1, size)
        preflight.check_memory(demand, preflight.free_memory("cpu", 0, 1))
    return device, gpu


def _measure_all(report: Report, chosen: Sequence[Side], measure: Callable[[Side], None]) -> None:
    """Measure the sides into `report`. A signal ends it early; one that comes before there is any
    figure to keep is raised, and so is the refusal of a flag."""
    try:
        for side in chosen:
            report.sides.append(side)
            try:
                measure(side)
            except FlagRefused:
                if not any(one.measured for one in report.sides):
                    raise
    except (KeyboardInterrupt, SystemExit) as error:
        if not any(one.measured for one in report.sides):
            raise
        report.stopped = "SIGINT" if isinstance(error, KeyboardInterrupt) else "SIGTERM"


def _measure(
    engines: sides.Engines, limit: float, private: Path, observer: Observer, side: Side
) -> None:
    log, job = starting.log_file(side.log), sides.job(side, engines, private)
    facts = {"cache": side.cache, "baseline": side.backend, "log": str(log)}
    name = "vLLM" if engines.engine == "vllm" else "SGLang"
    text = f"{side.label}: starting {name} (log: {log})"
    observer.note(Note("bench.starting", text, facts, kind="step"))
    place = private / f"{side.name}.json"
    place.write_text(job.model_dump_json(), encoding="utf-8")
    planned = sides.command(side, engines, place, os.environ)

    def tell(done: int, total: int, label: str) -> None:
        observer.advance(label, done, total, "tokens" if total else "")

    sides.measure(planned, job, log, side, limit=limit, progress=tell)
    observer.begin((), timed=False)
