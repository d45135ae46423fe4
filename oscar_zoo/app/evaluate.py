"""Measure the INT2 cache of an artifact with the model in this process: against BF16 and data-free
INT2, or beside caches of other methods. Artifact, model and text are found first; the model is
loaded when nothing else can go wrong."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from oscar_zoo.artifact.names import ArtifactId, path_text
from oscar_zoo.artifact.specs import read_clip
from oscar_zoo.compute.compute import check_device, check_model
from oscar_zoo.engines.requirements import require_compute
from oscar_zoo.errors import OscarZooError, UsageError
from oscar_zoo.evaluate.ablation import TimeLeft, Values
from oscar_zoo.evaluate.against_table import ALL, choices
from oscar_zoo.evaluate.params import EvalParams, RulerParams, again, numbers
from oscar_zoo.evaluate.shared import NAMES, Phase, duration, read_text
from oscar_zoo.observer import SILENT, Note, Observer
from oscar_zoo.registry import targets
from oscar_zoo.registry.arguments import model_text
from oscar_zoo.registry.artifacts import Artifact, open_artifact
from oscar_zoo.registry.hubs.address import Sources
from oscar_zoo.serving.prepared import both_sides, check_used, model_for

if TYPE_CHECKING:
    from oscar_zoo.artifact.manifest import ModelBlock
    from oscar_zoo.artifact.specs import Clip, Geometry, ServingRecipe
    from oscar_zoo.evaluate.ablation import Setting
    from oscar_zoo.evaluate.against_table import AgainstReport
    from oscar_zoo.evaluate.run import EvalReport
    from oscar_zoo.models.loading import Dtype, LoadedModel
    from oscar_zoo.registry.arguments import Clips, Numbers
    from oscar_zoo.registry.targets import ModelChoice

Task = Literal["perplexity", "recall"]
TASKS: tuple[Task, ...] = ("perplexity", "recall")
DATA, WINDOWS, LENGTH, ANSWERS = "manuals", 6, 2048, 64
"""The defaults of the text, its windows, their tokens, and recall questions."""
PHASES = (Phase("load", "", 1), Phase("measure", "sequences", 9))
"""The seconds are shares."""
_LONG = 600.0
"""Seconds from which on it is worth saying how long the other combinations will take."""


def evaluate_artifact(
    artifact: str | Path,
    *,
    model: str | Path | None = None,
    tasks: Sequence[Task] = TASKS,
    data: str = DATA,
    windows: int = WINDOWS,
    length: int = LENGTH,
    answers: int = ANSWERS,
    clip: Clips = None,
    sink: Numbers = (),
    recent: Numbers = (),
    group_size: Numbers = (),
    device: str | None = None,
    dtype: Dtype = "auto",
    stream_weights: bool | None = None,
    revision: str | None = None,
    hubs: str | Sequence[str] | None = None,
    observer: Observer = SILENT,
) -> EvalReport:
    """Measure the INT2 cache of an artifact against BF16 and data-free INT2, in this process.

    Args:
        artifact: name of an artifact, or its folder.
        model: folder, name of the zoo or hub id; `None` for the artifact's base model.
        tasks: what to measure with.
        data: a text file, or a text known by name.
        windows: windows of the text for perplexity.
        length: tokens of a window at most.
        answers: recall questions.
        clip: clip ratios of keys and values in place of the recipe's, or a list of them.
        sink, recent: first and last tokens that stay in BF16, in place of the recipe's.
        group_size: channels that share a scale, in place of the recipe's. Where any of these four
            is a list of several, BF16 and the artifact under every combination are measured.
        device: `cpu`, `cuda[:N]`, or `auto` for all GPUs; `None` for the first GPU, else the CPU.
        dtype: type of the weights in memory; `auto` keeps the stored one.
        stream_weights: read weights layer by layer; `None` does so when the model does not fit.
        revision: commit, branch or tag of a model on a hub.
        hubs: where to look for the artifact, in order; without any, the configured hubs.
        observer: hears of progress and remarks.

    Returns:
        A report with one row per cache; `to_json()` gives plain values. `record` is the score
        file in which perplexity and recall were kept, for `add_scores` and `publish`; `None` for
        several combinations.

    Raises:
        MissingDependency: torch or transformers is not installed.
        UsageError: the artifact has only one side, or the text is too short.
        NotFoundError: there is no such artifact, model or text.
        GeometryMismatch: the artifact was made for another shape of model.
        NotEnoughMemory: the model does not fit.
    """
    asked = _params(**locals())
    return evaluate(asked, observer)


def evaluate_against(
    artifact: str | Path,
    against: str | Sequence[str] = ALL,
    *,
    model: str | Path | None = None,
    data: str = DATA,
    windows: int = WINDOWS,
    length: int = LENGTH,
    answers: int = ANSWERS,
    clip: tuple[float, float] | Clip | None = None,
    sink: int | None = None,
    recent: int | None = None,
    group_size: int | None = None,
    device: str | None = None,
    dtype: Dtype = "auto",
    stream_weights: bool | None = None,
    revision: str | None = None,
    hubs: str | Sequence[str] | None = None,
    observer: Observer = SILENT,
) -> AgainstReport:
    """Measure the cache of an artifact beside BF16 and caches of other methods, in this process.

    Args:
        artifact: name of an artifact, or its folder.
        against: alternatives as `--against` of `oscar-zoo eval` takes them, such as
            `["fp8", "kivi:2"]`; `all` for every one that fits the model.
        model, data, windows, length, answers: as of `evaluate_artifact`.
        clip, sink, recent, group_size: in place of the recipe's, for all caches that have them.
        device, dtype, stream_weights, revision, hubs, observer: as of `evaluate_artifact`.

    Returns:
        A report with one row per cache, by bits; `to_json()` gives plain values.

    Raises:
        UsageError: an unknown alternative, one that does not fit the model, or too little text.
        OscarZooError: as `evaluate_artifact`.
    """
    asked = _params(**locals())
    return compare(asked, observer)


def _params(
    artifact: str | Path,
    model: str | Path | None,
    sink: Numbers | None,
    recent: Numbers | None,
    clip: Clips,
    group_size: Numbers | None,
    hubs: str | Sequence[str] | None,
    tasks: Sequence[str] = (),
    against: str | Sequence[str] | None = None,
    observer: object = None,
    **others: Any,
) -> EvalParams:
    """The arguments of a Python call as the command line has them; `observer` is none of them."""

    def text(values: Numbers | None) -> str | None:
        every = (values,) if isinstance(values, int) else values or ()
        return ",".join(map(str, every)) or None

    one = clip is None or hasattr(clip, "k") or isinstance(clip[0], int | float)
    clips: Any = () if clip is None else (clip,) if one else clip
    pairs = [(pair.k, pair.v) if hasattr(pair, "k") else pair for pair in clips]
    return EvalParams(
        artifact,
        model=None if model is None else model_text(model),
        tasks=() if tuple(tasks) == TASKS else tuple(tasks),
        sink=text(sink),
        recent=text(recent),
        clips=tuple(f"{k},{v}" for k, v in pairs),
        group_size=text(group_size),
        against=against if isinstance(against, str) or against is None else ",".join(against),
        hubs=(hubs,) if isinstance(hubs, str) else tuple(hubs or ()),
        **others,
    )


def values_of(params: EvalParams) -> Values:
    """The values of the recipe to measure with; one of each replaces the recipe's for all caches,
    and of several every combination is measured with the artifact."""
    return Values(
        sink=numbers("--sink", params.sink, least=0),
        recent=numbers("--recent", params.recent),
        clip=tuple(filter(None, map(read_clip, params.clips))),
        group_size=numbers("--group-size", params.group_size),
    )


def evaluate(params: EvalParams, observer: Observer = SILENT) -> EvalReport:
    """Measure BF16, the data-free INT2 caches and the artifact's, on the same text; for several
    values of the recipe, BF16 and the artifact under every combination.
    """
    values = values_of(params)
    require_compute()
    subject = find_subject("eval", params, observer)
    # What follows imports torch and transformers, which takes seconds.
    from oscar_zoo.evaluate import run
    from oscar_zoo.models.memory import memory_errors

    length = params.length or LENGTH
    own, settings = _settings(params, values, subject)
    several = settings if len(settings) > 1 else ()
    observer.begin(PHASES, timed=False)
    loaded = load_subject(params, subject, observer, longest=length)
    _tell_of_limit(length, loaded.block, observer)
    with memory_errors(loaded.block.id, loaded.device):
        report = run.evaluate(
            loaded,
            subject.text,
            tasks=params.tasks or TASKS,
            artifact=both_sides(subject.artifact),
            recipe=own if several else settings[0].recipe,
            windows=params.windows or WINDOWS,
            length=length,
            answers=params.answers or ANSWERS,
            settings=several,
            progress=_progress(observer, several),
        )
    observer.begin((), timed=False)
    if several:
        return report
    changes = settings[0].differences(own)
    return replace(
        report, record=_keep(params, subject.artifact, loaded, report, changes, observer)
    )


def compare(params: EvalParams, observer: Observer = SILENT) -> AgainstReport:
    """Measure BF16, the artifact and the alternatives of `against` on the same text and
    questions."""
    names, values = str(params.against).split(","), values_of(params)
    chosen = choices(names)
    require_compute()
    subject = find_subject("eval", params, observer)
    from oscar_zoo.evaluate.against import compare
    from oscar_zoo.models.memory import memory_errors

    _, settings = _settings(params, values, subject)
    if len(settings) > 1:
        raise UsageError(
            "--against compares methods under one recipe, and several values are given.",
            hint="give one of each --sink, --recent, --clip and --group-size",
        )
    observer.begin(PHASES, timed=False)
    loaded = load_subject(params, subject, observer, longest=params.length or LENGTH)
    with memory_errors(loaded.block.id, loaded.device):
        report = compare(
            loaded,
            subject.text,
            chosen,
            artifact=both_sides(subject.artifact),
            recipe=settings[0].recipe,
            windows=params.windows or WINDOWS,
            length=params.length or LENGTH,
            answers=params.answers or ANSWERS,
            strict=ALL not in names,
            progress=lambda done, total, unit: observer.advance("measure", done, total, unit),
        )
    observer.begin((), timed=False)
    for name, reason in report.left_out.items():
        observer.note(Note("eval.left_out", f"{name} is left out: {reason}", {"cache": name}))
    return report


@dataclass(frozen=True)
class Subject:
    """An artifact with its rotations, the model that it is used with, and a text to measure on."""

    artifact: Artifact
    choice: ModelChoice
    text: str


def find_subject(verb: str, params: EvalParams | RulerParams, observer: Observer) -> Subject:
    """Artifact, model and text, before any library that takes long is imported."""
    check_device(params.device)
    text = read_text(params.data or DATA, "validation")
    line = again(verb, params)
    named = targets.parse_given_model(params.model, observer, again=line)
    target = targets.parse(params.artifact)
    check_used(named or target.choice, params.revision)
    artifact = open_artifact(target, Sources(params.hubs), observer)
    choice = model_for(artifact, named, observer, again=line)
    check_model(choice.source, params.revision)
    return Subject(artifact, choice, text)


def recipe_of(subject: Subject, geometry: Geometry) -> ServingRecipe:
    """The serving recipe of the artifact, else the zoo's or the default for a model of this
    shape."""
    from oscar_zoo.registry.recipe import serving_recipe

    return subject.artifact.recipe or serving_recipe(subject.choice.recipe, geometry)


def load_subject(
    params: EvalParams | RulerParams, subject: Subject, observer: Observer, *, longest: int
) -> LoadedModel:
    """The model in memory, for sequences of `longest` tokens at most."""
    from oscar_zoo.models.loading import load_model
    from oscar_zoo.models.memory import Workload, pick_device

    observer.advance("load", 0, 0)
    loaded = load_model(
        subject.choice.source,
        revision=params.revision,
        dtype=params.dtype,
        device=pick_device(params.device, several=True),
        model_id=subject.choice.model_id,
        stream=params.stream_weights,
        workload=Workload(longest),
    )
    for note in loaded.notes:
        observer.note(Note("model.loaded", note))
    return loaded


def _settings(
    params: EvalParams, values: Values, subject: Subject
) -> tuple[ServingRecipe, tuple[Setting, ...]]:
    """The recipe of the artifact, and those to measure with; no weights are read."""
    from oscar_zoo.evaluate.ablation import check_settings
    from oscar_zoo.models.model_source import inspect_model

    choice, length = subject.choice, params.length or LENGTH
    block = inspect_model(choice.source, revision=params.revision, model_id=choice.model_id)
    own = recipe_of(subject, block.geometry)
    settings = values.settings(own)
    check_settings(settings, block, min(length, (block.rope and block.rope.max_position) or length))
    return own, settings


def _tell_of_limit(length: int, model: ModelBlock, observer: Observer) -> None:
    """Say that windows are shorter than asked for, where the model takes no longer ones."""
    limit = model.rope.max_position if model.rope else None
    if limit is not None and length > LENGTH and limit < length:
        text = f"{model.id} takes {limit:,} tokens, so windows have no more than that."
        observer.note(Note("eval.limit", text, {"limit": limit}))


def _progress(observer: Observer, several: Sequence[Setting]) -> Callable[[int, int, str], None]:
    """Tells `observer` how far the measurement is, and once how long the combinations take, if that
    is long."""
    left = TimeLeft(caches=1 + len(several))

    def tell(done: int, total: int, unit: str) -> None:
        observer.advance("measure", done, total, unit)
        seconds = left.after(done, total)
        if seconds >= _LONG:
            rest = f"the rest of the combinations will take about {duration(seconds)}."
            observer.note(Note("eval.long", rest, {"seconds": seconds}))

    return tell


def _keep(
    params: EvalParams,
    artifact: Artifact,
    model: LoadedModel,
    report: EvalReport,
    changes: Mapping[str, str],
    observer: Observer,
) -> Path | None:
    """Keep the scores in a file, and say where; a record that cannot be kept costs no result."""
    from oscar_zoo.evaluate.records import scores
    from oscar_zoo.registry import score_file
    from oscar_zoo.registry.score_file import ScoreFile

    if artifact.id is None or not report.compared:
        return None
    if not made_for(artifact, model.block):
        text = f"no scores are recorded: {artifact.label} was not made for {model.block.id}."
        observer.note(Note("eval.no_record", text))
        return None
    shared = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "source": _command(params, artifact, changes),
        "dataset_revision": f"sha256:{report.facts['text_sha256']}",
    }
    int2 = {"artifact_digest": artifact.digest, "recipe_changes": dict(changes)}
    found = scores(report.compared, model, shared, int2)
    if not found:
        return None
    identity = ArtifactId.parse(artifact.id)
    path = place_of(artifact, identity)
    try:
        score_file.keep(path, ScoreFile.of(identity, artifact.digest, found))
    except OscarZooError as error:
        text = f"the scores are not kept in {path_text(path)}: {error.message}"
        observer.note(Note("eval.no_record", text, {"path": str(path)}))
        return None
    return path


def place_of(artifact: Artifact, identity: ArtifactId) -> Path:
    """The score file of an artifact: in its folder where that is the user's own, else in the state
    folder."""
    from oscar_zoo.registry import score_file
    from oscar_zoo.registry.store import Store

    stored = artifact.path.resolve().is_relative_to(Store().root.resolve())
    if artifact.installed or stored:
        return score_file.in_state(identity)
    return score_file.in_folder(artifact.path)


def made_for(artifact: Artifact, model: ModelBlock) -> bool:
    """Whether the model is the one that the artifact was made for, by its name or its
    `config.json`."""
    made = artifact.manifest.model if artifact.manifest else None
    if made and made.config_sha256 and made.config_sha256 == model.config_sha256:
        return True
    base = made.id if made else artifact.base_model
    return base is not None and base.casefold() == model.id.casefold()


def _command(params: EvalParams, artifact: Artifact, changes: Mapping[str, str]) -> str:
    """The command that measures the same again; a file of the user is not named."""
    data = params.data or DATA
    rest: dict[str, object] = {
        "data": data if data in NAMES else "FILE",
        "windows": params.windows or WINDOWS,
        "length": params.length or LENGTH,
        "answers": params.answers or ANSWERS,
    }
    words = (
        f"--{name.replace('_', '-')} {value}" for name, value in (rest | dict(changes)).items()
    )
    return " ".join(("oscar-zoo eval", artifact.label, *words))
