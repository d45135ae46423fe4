"""Compare stock SGLang with a BF16 and an FP8 cache, and with an INT2 cache, on this machine."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from oscar_zoo.app.bench_device import pick_device, usual_requests
from oscar_zoo.app.bench_subject import SubjectNames, find_subject
from oscar_zoo.bench import run, sides
from oscar_zoo.bench.report import Report
from oscar_zoo.engines.requirements import require_serve
from oscar_zoo.engines.sglang.launch import plan, starting
from oscar_zoo.engines.sglang.launch.starting import BACKENDS, log_file
from oscar_zoo.engines.sglang.launch.user_flags import UserFlags
from oscar_zoo.engines.sglang.offline_job import Bulk, Case
from oscar_zoo.errors import FlagRefused, UsageError
from oscar_zoo.models.hardware import device_name
from oscar_zoo.observer import SILENT, Note, Observer
from oscar_zoo.registry.hubs.address import Sources

MOST_CASES = 64
HELP = "try: oscar-zoo bench serve --help"


@dataclass(frozen=True)
class BenchRequest:
    """What to compare.

    Attributes:
        target: name or folder of the artifact; `None` makes one, which needs `dummy_weights`.
        dummy_weights: measure a model of this shape with random weights: a name of the zoo, or a
            folder with a `config.json`.
        cases: batches and contexts to measure, at most `MOST_CASES`.
        new_tokens: tokens that every request generates.
        repeats: how often each case is timed.
        caches: caches to measure, in this order.
        bulk: requests that all come at once, measured after the cases, or `None`.
        model: model to run, or `None` for the artifact's base model.
        revision: commit of a model on a hub.
        baselines: attention backends, with each of which BF16 and FP8 are measured; without any
            it is the usual one of the device.
        extra: engine flags for all sides.
        device: `cpu` or `cuda[:N]`; `None` for the first GPU, else the CPU.
        timeout: seconds for the start of an engine, for each repeat of a case and for the bulk.
        hubs: hubs to use in place of the configured ones.
        offline: ask no hub.
        again: the command line that takes the FOLDER of a model, for errors.
    """

    target: str | Path | None = None
    dummy_weights: str | Path | None = None
    cases: tuple[Case, ...] = ()
    new_tokens: int = 96
    repeats: int = 3
    caches: tuple[sides.Cache, ...] = sides.CACHES
    bulk: Bulk | None = None
    model: str | None = None
    revision: str | None = None
    baselines: tuple[str, ...] = ()
    extra: tuple[str, ...] = ()
    device: str | None = None
    timeout: float = 1800.0
    hubs: tuple[str, ...] = ()
    offline: bool = False
    again: str = field(default="--model FOLDER", compare=False)

    @property
    def longest(self) -> int:
        """Tokens of the longest request, prompt and answer."""
        contexts = [case.context + self.new_tokens for case in self.cases]
        return max([*contexts, self.bulk.longest if self.bulk else 1])


def compare(request: BenchRequest, observer: Observer = SILENT) -> Report:
    """Run all sides, one after the other.

    Returns:
        What was measured. A side that failed says so in it, and so does a comparison that a signal
        ended after there was something to keep.

    Raises:
        UsageError: the request makes no sense, or names flags that would make the sides differ.
        MissingDependency, UnsupportedMachine: no supported SGLang is installed.
        OscarZooError: as `find_subject` and `pick_device`.
        KeyboardInterrupt, SystemExit: a signal came before anything was measured.
    """
    flags = check(request)
    require_serve()
    with starting.private_folder() as private:
        names = SubjectNames(request.target, request.dummy_weights, request.model, request.again)
        sources = Sources(request.hubs, offline=request.offline)
        subject = find_subject(names, sources, private, observer, longest=request.longest)
        device, gpu = pick_device(subject, request.device, flags, observer)
        staged = private / "rotations"
        engines = sides.Engines(
            model=subject.source,
            random_weights=subject.random_weights,
            rotations=staged,
            rotations_sha256=starting.stage_rotations(subject.artifact.verified, staged),
            copy_of=subject.artifact.verified.digest,
            recipe=subject.model.recipe,
            device=device,
            kernels=starting.kernels_folder(),
            cases=request.cases,
            new_tokens=request.new_tokens,
            repeats=request.repeats,
            requests=usual_requests(subject.model, flags.sizes(), device, gpu),
            port=plan.free_port(),
            revision=request.revision,
            flags=flags,
            bulk=request.bulk,
            gpu=gpu,
        )
        chosen = sides.all_sides(request.caches, request.baselines or (BACKENDS[device],))
        measure = partial(_measure, engines, request.timeout, private, observer)
        results, stopped = _measure_all(chosen, measure)
    return Report(
        model=subject.model.choice.name,
        random_weights=subject.random_weights,
        artifact=(subject.label, subject.artifact.verified.digest),
        device=device_name(device, gpu),
        new_tokens=request.new_tokens,
        cases=request.cases,
        sides=results,
        repeats=request.repeats,
        bulk=request.bulk,
        stopped=stopped,
    )


def check(request: BenchRequest) -> UserFlags:
    """Refuse what can only fail later; nothing is looked up. Raises `UsageError`."""
    flags = sides.read_flags(request.extra)
    sides.all_sides(request.caches, request.baselines)
    if not request.caches:
        raise UsageError("no cache to measure was named.", hint=HELP)
    if len(request.cases) > MOST_CASES:
        raise UsageError(f"{len(request.cases)} cases are more than {MOST_CASES}.", hint=HELP)
    bulk = request.bulk
    if bulk is not None and bulk.turns > 1 and bulk.requests > sides.ORDERED:
        raise UsageError(
            f"{bulk.requests:,} conversations are more than {sides.ORDERED}, which SGLang"
            " orders by prefix.",
            hint="lower the requests of --job",
        )
    SubjectNames(request.target, request.dummy_weights, request.model, request.again).check()
    return flags


def side_log(side: sides.Side) -> Path:
    """The log of the engine of this side."""
    return log_file(f"bench-{side.name}")


def _measure_all(
    chosen: Sequence[sides.Side], measure: Callable[[sides.Side, run.SideResult], None]
) -> tuple[dict[sides.Side, run.SideResult], str | None]:
    """The results, and the name of the signal that ended the comparison early.

    A signal that comes before there is any figure to keep is raised, and so is the refusal of a
    flag.
    """
    results: dict[sides.Side, run.SideResult] = {}
    try:
        for side in chosen:
            results[side] = run.SideResult()
            try:
                measure(side, results[side])
            except FlagRefused:
                if not any(result.measured for result in results.values()):
                    raise
    except (KeyboardInterrupt, SystemExit) as error:
        if not any(result.measured for result in results.values()):
            raise
        return results, "SIGINT" if isinstance(error, KeyboardInterrupt) else "SIGTERM"
    return results, None


def _measure(
    engines: sides.Engines,
    limit: float,
    private: Path,
    observer: Observer,
    side: sides.Side,
    result: run.SideResult,
) -> None:
    """Measure one side into `result`."""
    log, job = side_log(side), sides.job(side, engines, private)
    observer.note(
        Note(
            "bench.starting",
            f"{side.label}: starting SGLang (log: {log})",
            {"cache": side.cache, "baseline": side.backend, "log": str(log)},
            kind="step",
        )
    )
    place = private / f"{side.name}.json"
    place.write_text(job.model_dump_json(), encoding="utf-8")
    planned = sides.command(side, engines, place, os.environ)
    run.measure(planned, job, log, limit=limit, progress=partial(_tell, observer), into=result)
    observer.begin((), timed=False)


def _tell(observer: Observer, done: int, total: int, label: str) -> None:
    observer.advance(label, done, total, "tokens" if total else "")
