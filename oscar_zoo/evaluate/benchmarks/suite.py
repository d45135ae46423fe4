"""Ask benchmarks of an INT2 server and of a BF16 server, and compare them question by question.

Answers are kept as they come. The same parameters go on where an earlier run stopped, and ask
nothing when all answers are there.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oscar_zoo import paths
from oscar_zoo.artifact import strict_json
from oscar_zoo.artifact.durable import check_file, write_file
from oscar_zoo.artifact.files import sha256_hex
from oscar_zoo.artifact.names import ArtifactId
from oscar_zoo.artifact.specs import Harness
from oscar_zoo.engines.requirements import require_eval, require_serve
from oscar_zoo.engines.server_client import ServerClient
from oscar_zoo.engines.sglang.compat.releases import sglang_version
from oscar_zoo.engines.sglang.launch.starting import (
    StartObserver,
    StockServer,
    own_server,
    stock_server,
)
from oscar_zoo.errors import ServerFailed, UsageError
from oscar_zoo.evaluate.benchmarks.tasks import SAMPLE, Benchmark, benchmark
from oscar_zoo.evaluate.in_process import made_for, place_of
from oscar_zoo.evaluate.outcome import BenchmarkReport, TaskResult
from oscar_zoo.evaluate.params import EvalParams, from_python
from oscar_zoo.evaluate.servers import Served, check_recipe, counter, running_of
from oscar_zoo.evaluate.shared import Phase
from oscar_zoo.models.hardware import device_name
from oscar_zoo.observer import SILENT, Note, Observer
from oscar_zoo.registry import score_file
from oscar_zoo.registry.score_file import ScoreFile
from oscar_zoo.verb import shows

if TYPE_CHECKING:
    from oscar_zoo.evaluate.benchmarks.answers import Answers, Generation
    from oscar_zoo.evaluate.benchmarks.harness import ArmResult, LoadedTask, Settings

LABELS = {"int2": "INT2", "bf16": "BF16", "fp8": "FP8"}
REPEATS = 3
"""Seeds of answers that are drawn at random, unless the user says otherwise."""
CONTEXT_SHARE = 0.8
"""Of the model's context that an answer may fill by default; the rest is for the prompt."""
MANY_CUT = 0.05
"""A larger share of answers that the cap has cut is told."""
_KEPT = "answers until now are kept; the same command goes on from there"


@shows(EvalParams)
def benchmark_artifact(
    artifact: str | Path, tasks: str | Sequence[str], *, observer: Observer = SILENT, **options: Any
) -> BenchmarkReport:
    """Ask benchmarks of an INT2 server and of a BF16 server, and compare them.

    Args:
        tasks: benchmarks by name, such as `gpqa_diamond`.
        artifact, observer, options: as of `evaluate_artifact`; also `clip` for one pair of ratios
            and `extra` for flags of the engine.

    Returns:
        The scores of every task; `file` is the score file.
    """
    return run_benchmarks(from_python(EvalParams, artifact, options | {"tasks": tasks}), observer)


def run_benchmarks(params: EvalParams, observer: Observer = SILENT) -> BenchmarkReport:
    """Ask every task of every cache, judge the answers, and write the score file."""
    wanted = benchmarks_of(params)
    check_file(params.output)
    require_eval()
    if running_of(params.url, params) is None:
        require_serve()
    served = Served.of(params, observer)
    servers = _Servers(served)
    if params.output is not None and served.artifact.id is None:
        raise UsageError(
            f"{served.artifact.label} has no oscar.json, so a score file cannot name it.",
            hint="leave out --output, or give an artifact with a manifest",
        )
    with ExitStack() as stack:
        asked = [_prepare(one, servers, stack, observer) for one in wanted]
        _ask_all(asked, servers, observer)
        results = [_result(one, servers) for one in asked]
    for one, result in zip(asked, results, strict=True):
        _remark(result, one.arms["int2"], served, observer)
    file = _keep(results, served, observer)
    return BenchmarkReport(served.choice.name, served.told, file, tuple(results))


def benchmarks_of(params: EvalParams) -> tuple[Benchmark, ...]:
    found = tuple(benchmark(name) for name in dict.fromkeys(params.tasks))
    if params.data is not None and len(found) != 1:
        raise UsageError("--data is the data of one task.", hint="give one --task")
    if params.base_url is not None and params.url is None:
        raise UsageError(
            "--base-url is the BF16 server beside an INT2 server.", hint="give --url as well"
        )
    if params.url is not None and (params.engine_flags or params.fp8):
        raise UsageError(
            "--url measures servers as they are.", hint="leave out what is for new ones"
        )
    for one in found:
        if one.runs_code and not params.run_code:
            raise UsageError(
                f"{one.name} runs programs that the model writes, as this user.",
                hint="on a machine where that may happen, add --run-model-code",
            )
    return found


class _Servers:
    """The servers of a benchmark, one after the other: of our own, or such as run already. Nothing
    is started before `serving`."""

    def __init__(self, served: Served) -> None:
        self.served, params = served, served.params
        # Seconds that one answer may take.
        self._patience = max(params.timeout, float(params.max_new_tokens or 32768))
        given = {"int2": params.url, "bf16": params.base_url}
        self.urls = {cache: url for cache, url in given.items() if url is not None}
        self.caches = list(self.urls) or ["int2", "bf16"]
        if params.fp8:
            self.caches.append("fp8")
        self.hardware: str | None = None
        if not self.urls:
            gpus = served.flags().sizes().tensor_parallel or 1
            name = device_name(served.device, served.gpu)
            self.hardware = f"{gpus} x {name}" if gpus > 1 else name
            self.engine = Harness(name="sglang", version=sglang_version())
            return
        found = [self._running(cache).facts() for cache in self.urls]
        versions = {f"{one.engine} {one.version}" for one in found}
        if len(versions) > 1:
            raise UsageError(
                f"the servers run {' and '.join(sorted(versions))}.",
                hint="compare servers of one release",
            )
        self.engine = Harness(name=found[0].engine.lower(), version=found[0].version)

    def _running(self, cache: str) -> ServerClient:
        client = running_of(self.urls[cache], self.served.params, self._patience)
        assert client is not None
        return client

    @contextmanager
    def serving(self, cache: str, observer: Observer) -> Iterator[ServerClient]:
        """A client of the server with this cache; a server of our own ends with the block."""
        served = self.served
        if cache in self.urls:
            client = self._running(cache)
            if cache == "int2":
                check_recipe(client, served.recipe)
            told = client.facts().cache_dtype
            if (told == "int2") != (cache == "int2"):
                raise UsageError(
                    f"{client.url} has a cache of {told}, not of {LABELS[cache]}.",
                    hint="--url is the INT2 server, --base-url the BF16 server",
                )
            yield client
            return
        news = StartObserver(f"{served.choice.name} with a cache of {LABELS[cache]}", observer)
        log = f"eval-{cache}"
        started = (
            own_server(served.wanted(log), news)
            if cache == "int2"
            else stock_server(StockServer(cache, **served.started_as(log)), news)  # type: ignore[arg-type]
        )
        with started as server:
            observer.begin((), timed=False)
            key = server.administration_key
            yield ServerClient(server.url, timeout=self._patience, key=key)


@dataclass(frozen=True)
class Asked:
    """A benchmark with the file of kept answers, what decides the answers beside what each question
    says itself, and what every cache answered."""

    task: LoadedTask
    settings: Settings
    place: Path
    identity: dict[str, Any]
    answers: Answers
    arms: dict[str, ArmResult] = field(default_factory=dict)

    @property
    def requests(self) -> int:
        return self.task.requests * len(self.settings.seeds)


def _prepare(one: Benchmark, servers: _Servers, stack: ExitStack, observer: Observer) -> Asked:
    """Read the questions, and open the file of answers until `stack` ends."""
    from oscar_zoo.evaluate.benchmarks.answers import open_answers
    from oscar_zoo.evaluate.benchmarks.harness import Settings, load_task
    from oscar_zoo.evaluate.benchmarks.tasks import read_rows
    from oscar_zoo.evaluate.records import harness_version
    from oscar_zoo.models.config_file import read_generation_config

    served, params, model = servers.served, servers.served.params, servers.served.block
    observer.advance(f"reading {one.name}", 0, 0)
    rows = None if params.data is None else read_rows(Path(params.data).expanduser())
    task = load_task(one, rows, limit=params.limit)
    authors = read_generation_config(served.choice.source, params.revision)
    context = model.rope.max_position if model.rope else None
    generation = generation_of(params, one, authors, context)
    seeds, limits = seeds_of(params, one, generation), (params.limit, params.concurrency)
    settings = Settings(generation, seeds, *limits, params.run_code)
    identity = {
        "task": one.name,
        "data": task.revision,
        "model": served.choice.model_id,
        "model_config": model.config_sha256,
        "model_revision": model.revision,
        "artifact": served.artifact.digest,
        "recipe": served.recipe.model_dump(mode="json"),
        "harness": harness_version().version,
        "engine": servers.engine.version,
        "hardware": servers.hardware,
        "flags": [] if servers.urls else list(served.flags().words),
        "urls": servers.urls,
    }
    name = f"{one.name}-{sha256_hex(strict_json.canonical_bytes(identity))[:12]}"
    place = _folder_of(served) / f"{name}.answers.jsonl.gz"
    answers = stack.enter_context(open_answers(place, identity, fresh=params.fresh))
    return Asked(task, settings, place, identity, answers)


def _folder_of(served: Served) -> Path:
    name = re.sub(r"[^A-Za-z0-9._-]+", "_", served.artifact.id or served.choice.name)
    return paths.state_dir() / "benchmarks" / f"{name}-{served.artifact.digest[7:19]}"


def generation_of(
    params: EvalParams, one: Benchmark, authors: dict[str, Any], context: int | None
) -> Generation:
    """How answers to a benchmark are generated, by what the user says, else by the authors'
    `generation_config.json`; `context` is in tokens, where it is known."""
    from oscar_zoo.evaluate.benchmarks.answers import Generation

    temperature = params.temperature
    if temperature is None:
        temperature = float(authors.get("temperature") or 1.0) if authors.get("do_sample") else 0.0
    top_p = params.top_p if params.top_p is not None else authors.get("top_p")
    cap = one.cap if context is None else min(one.cap, int(CONTEXT_SHARE * context))
    return Generation(
        max_new_tokens=params.max_new_tokens or cap,
        temperature=temperature,
        top_p=float(1.0 if top_p is None else top_p),
        top_k=int(authors.get("top_k") or -1),
        min_p=float(authors.get("min_p") or 0.0),
        repetition_penalty=float(authors.get("repetition_penalty") or 1.0),
        thinking=params.thinking,
    )


def seeds_of(params: EvalParams, one: Benchmark, generation: Generation) -> tuple[int, ...]:
    """The seed of every repeat; raises `UsageError` for repeats that would all be the same."""
    drawn = one.kind == "generated" and generation.temperature > 0
    if not drawn and (params.seeds or 1) > 1:
        raise UsageError(
            f"every repeat of {one.name} would be the same: nothing is drawn at random.",
            hint="give --temperature, or leave --seeds out",
        )
    return tuple(range(params.seeds or REPEATS)) if drawn else (0,)


def _ask_all(asked: Sequence[Asked], servers: _Servers, observer: Observer) -> None:
    """One server after the other, each for all tasks that lack answers of it."""
    from oscar_zoo.evaluate.benchmarks.harness import AnswersMissing, run_arm

    for cache in servers.caches:
        open_: dict[str, Asked] = {}
        for one in asked:
            try:
                one.arms[cache] = run_arm(cache, one.task, one.settings, one.answers, ask=None)
            except AnswersMissing:
                open_[f"{LABELS[cache]}, {one.task.benchmark.name}"] = one
        if not open_:
            continue
        with servers.serving(cache, observer) as client:
            phases = [Phase(label, "answers", one.requests) for label, one in open_.items()]
            observer.begin(phases, timed=False)
            for label, one in open_.items():
                one.arms[cache] = ask_one(cache, one, client, label, observer)
            observer.begin((), timed=False)


def ask_one(
    cache: str, one: Asked, client: ServerClient, label: str, observer: Observer
) -> ArmResult:
    """All answers to one benchmark; whatever ends it early says that answers are kept."""
    from oscar_zoo.evaluate.benchmarks.answers import ask
    from oscar_zoo.evaluate.benchmarks.harness import run_arm

    tick, questions = counter(observer, label, one.requests), (one.task, one.settings)
    try:
        return run_arm(cache, *questions, one.answers, ask=partial(ask, client), tick=tick)
    except ServerFailed:
        observer.note(Note("benchmark.kept", f"{_KEPT}.", {"answers": str(one.place)}))
        raise
    except (KeyboardInterrupt, SystemExit) as error:
        error.add_note(_KEPT)
        raise


def _result(one: Asked, servers: _Servers) -> TaskResult:
    from oscar_zoo.evaluate.records import benchmark_score

    artifact, recipe = servers.served.artifact, servers.served.recipe
    changed = artifact.recipe is not None and recipe != artifact.recipe
    shared = {
        "date": one.answers.day,
        "engine": servers.engine,
        "hardware": servers.hardware,
        "model_revision": one.identity["model_revision"],
    }
    int2 = {
        "artifact_digest": artifact.digest,
        "recipe_changes": {"clip": f"{recipe.clip.k:g},{recipe.clip.v:g}"} if changed else {},
        "calibrated_on": _calibrated_on(servers.served, one.task.benchmark),
    }
    base = one.arms.get("bf16")
    scores = tuple(
        benchmark_score(arm, base, one.task, one.settings, shared, int2)
        for arm in one.arms.values()
        if arm is not base
    )
    return TaskResult(one.task.benchmark.name, one.place, scores)


def _calibrated_on(served: Served, one: Benchmark) -> bool | None:
    """Whether calibration saw questions of a benchmark, as far as the manifest tells."""
    manifest, name = served.artifact.manifest, one.calibration_name
    calibration = manifest and manifest.fit.calibration
    if not calibration or name is None:
        return None
    family = "gpqa" if name.startswith("gpqa") else name  # its subsets hold each other's questions
    if any(known.startswith(family) for known in calibration.overlaps_with):
        return True
    return False if any(name == one.dataset for one in calibration.disjoint_from or ()) else None


def _remark(one: TaskResult, arm: ArmResult, served: Served, observer: Observer) -> None:
    """Tell what makes the figures of a task say less than they seem to."""
    exact = served.recipe.windows.sink + served.recipe.windows.recent
    tokens = [answer.prompt_tokens + answer.completion_tokens for _, answer in arm.used]
    longer = sum(size > exact for size in tokens) / len(tokens)
    if longer < 0.5:
        text = (
            f"{one.task}: only {100 * longer:.0f} % of the requests are longer than the {exact:,}"
            " tokens that stay in BF16, so most answers hardly read the INT2 cache."
        )
        observer.note(Note("benchmark.short", text, {"task": one.task, "share": longer}))
    if one.scores[0].calibrated_on:
        text = f"{one.task}: calibration saw questions of this set, so its score says less."
        observer.note(Note("benchmark.calibrated_on", text, {"task": one.task}))
    if arm.exhausted_rate > MANY_CUT:
        text = (
            f"{one.task}: the generation cap cut {100 * arm.exhausted_rate:.0f} % of the answers;"
            " a larger --max-new-tokens lets them end."
        )
        observer.note(Note("benchmark.cut", text, {"task": one.task}))


def _keep(results: Sequence[TaskResult], served: Served, observer: Observer) -> Path | None:
    """Write the scores of an artifact that has an id and was made for this model. Those of all
    questions of a public set get to the others of the artifact, which `publish` takes along. A part
    of a set, the sample and rows of the user get a file of their own."""
    artifact, params = served.artifact, served.params
    if artifact.id is None or not made_for(artifact, served.block):
        text = f"no scores are recorded: {artifact.label} has no manifest that names this model."
        observer.note(Note("benchmark.no_record", text))
        return None
    identity = ArtifactId.parse(artifact.id)
    scores = tuple(score for one in results for score in one.scores)
    record = ScoreFile.of(identity, artifact.digest, scores)
    trial = params.limit is not None or params.data is not None or SAMPLE in params.tasks
    if params.output is None and not trial:
        path = place_of(artifact, identity)
        score_file.keep(path, record)
        return path
    name = f"{'-'.join(one.task for one in results)[:80]}.scores.json"
    path = params.output or _folder_of(served) / name
    write_file(path, record.to_bytes())
    return path
