"""Measure the INT2 cache of an artifact with the model in this process: against BF16 and data-free
INT2, or beside caches of other methods. Artifact, model and text are found first; the model is
loaded when nothing else can go wrong. Importing this needs no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oscar_zoo.artifact.names import ArtifactId, path_text
from oscar_zoo.artifact.specs import ServingRecipe, check_groups, read_clip
from oscar_zoo.engines.requirements import require_compute
from oscar_zoo.errors import OscarZooError, UsageError
from oscar_zoo.evaluate.against_table import ALL, choices
from oscar_zoo.evaluate.outcome import AgainstReport, EvalReport, ServerReport, SessionsReport
from oscar_zoo.evaluate.params import EvalParams, RulerParams, again, from_python, numbers
from oscar_zoo.evaluate.shared import TEXTS, Phase, fitting, read_text
from oscar_zoo.models import hardware
from oscar_zoo.observer import SILENT, Note, Observer
from oscar_zoo.registry import score_file, targets
from oscar_zoo.registry.artifacts import Artifact, open_artifact
from oscar_zoo.registry.hubs.address import Sources
from oscar_zoo.registry.score_file import ScoreFile
from oscar_zoo.registry.store import Store
from oscar_zoo.registry.targets import ModelChoice
from oscar_zoo.serving.artifact_model import both_sides, check_used, model_for
from oscar_zoo.verb import shows

if TYPE_CHECKING:
    from oscar_zoo.artifact.manifest import ModelBlock
    from oscar_zoo.evaluate.caches import Setting
    from oscar_zoo.models.loading import LoadedModel

TASKS = ("perplexity", "recall")
DATA, WINDOWS, LENGTH, ANSWERS = "manuals", 6, 2048, 64
"""The defaults of the text, its windows, their tokens, and recall questions."""
SESSIONS = "sessions"
_NUMBER, _LENGTH = 2, 8192
"""The defaults of this task, which is measured alone: sessions, and their tokens at most."""
Report = EvalReport | AgainstReport | SessionsReport | ServerReport
PHASES = (Phase("load", "", 1), Phase("measure", "sequences", 9))
"""The seconds are shares."""


@shows(EvalParams)
def evaluate_artifact(
    artifact: str | Path, *, observer: Observer = SILENT, **options: Any
) -> EvalReport:
    """Measure the INT2 cache of an artifact against BF16 and data-free INT2, in this process.

    Args:
        artifact: name of an artifact, or its folder.
        observer: hears of progress and remarks.
        options: those of `oscar-zoo eval`, by the names of their fields in `EvalParams`, such as
            `model`, `tasks`, `windows` and `device`. `sink`, `recent` and `group_size` may be
            numbers or lists of them, `clip` a pair of ratios or a list of pairs.

    Returns:
        A report with one row per cache. `record` is the score file in which perplexity and recall
        were kept, for `add_scores` and `publish`; `None` for several combinations.
    """
    found = evaluate(from_python(EvalParams, artifact, options), observer)
    assert isinstance(found, EvalReport)
    return found


@shows(EvalParams)
def evaluate_against(
    artifact: str | Path,
    against: str | Sequence[str] = ALL,
    *,
    observer: Observer = SILENT,
    **options: Any,
) -> AgainstReport:
    """Measure the cache of an artifact beside BF16 and caches of other methods, in this process.

    Args:
        against: alternatives as `--against` of `oscar-zoo eval` takes them, such as
            `["fp8", "kivi:2"]`; `all` for every one that fits the model.
        artifact, observer, options: as of `evaluate_artifact`.

    Returns:
        A report with one row per cache, by bits.
    """
    found = evaluate(from_python(EvalParams, artifact, options | {"against": against}), observer)
    assert isinstance(found, AgainstReport)
    return found


@shows(EvalParams)
def evaluate_sessions(
    artifact: str | Path, *, observer: Observer = SILENT, **options: Any
) -> SessionsReport:
    """Measure BF16, data-free INT2 and the INT2 cache of an artifact over long sessions of an
    agent, in this process. The arguments are those of `evaluate_artifact`; `windows` are sessions.
    The report has one row per cache."""
    found = evaluate(from_python(EvalParams, artifact, options | {"tasks": [SESSIONS]}), observer)
    assert isinstance(found, SessionsReport)
    return found


def evaluate(params: EvalParams, observer: Observer = SILENT) -> Report:
    """Measure BF16, the data-free INT2 caches and the artifact's, on the same text or sessions; for
    several values of the recipe, BF16 and the artifact under every combination; with `against`,
    BF16, the artifact and these alternatives; with `engine`, an `OscarCache`."""
    values = values_of(params)
    names = [] if params.against is None else params.against.split(",")
    chosen = choices(names) if names else ()
    require_compute()
    subject = find_subject("eval", params, observer)
    # What follows imports torch and transformers, which takes seconds.
    from oscar_zoo.evaluate import caches
    from oscar_zoo.models.memory import memory_errors

    sessions = SESSIONS in params.tasks
    if sessions and {*params.tasks} != {SESSIONS}:
        raise UsageError("sessions are measured alone.", hint="measure the other tasks apart")
    length = params.length or (_LENGTH if sessions else LENGTH)
    settings = settings_of(values, subject.recipe)
    alone = "--against" if names else SESSIONS if sessions else params.engine
    if alone and len(settings) > 1:
        said = f"{alone} compares caches under one recipe, and several values are given."
        raise UsageError(said, hint="give one of each --sink, --recent, --clip and --group-size")
    check_settings(settings, subject.block, length, always=bool(alone))
    if names and subject.block.rotary_key:
        message = "--against compares caches of heads, and this model caches latents (MLA)."
        raise UsageError(message, hint="leave it out: BF16 and data-free codes are measured anyway")
    observer.begin(PHASES, timed=False)
    model = load_subject(params, subject.choice, observer, longest=length)
    limit = fitting(length, model.block)
    if limit < length and length > LENGTH and (params.length or not sessions):
        text = f"{model.block.id} takes {limit:,} tokens, so windows have no more than that."
        observer.note(Note("eval.limit", text, {"limit": limit}))
    (recipe, changes), several = settings[0], settings if len(settings) > 1 else []
    artifact, windows = both_sides(subject.artifact), params.windows or WINDOWS
    what: dict[str, Any] = {
        "artifact": artifact,
        "recipe": subject.recipe if several else recipe,
        "length": limit,
        "progress": lambda done, total, unit: observer.advance("measure", done, total, unit),
    }
    size = {"windows": windows, "answers": params.answers or ANSWERS}
    report: Report
    with memory_errors(model.block.id, model.device):
        if sessions:
            from oscar_zoo.evaluate.sessions import measure_sessions

            report = measure_sessions(model, number=params.windows or _NUMBER, **what)
        elif params.engine == "transformers":
            from oscar_zoo.evaluate.server_comparison import measure_cache

            report = measure_cache(model, subject, windows=windows, **what)
        elif names:
            made = subject.artifact.manifest
            what["method"] = made.fit.method if made else artifact[0].objective
            what |= {"strict": ALL not in names, **size}
            report = caches.compare(model, subject.text, chosen, **what)
        else:
            what |= {"tasks": params.tasks or TASKS, "settings": several, **size}
            report = caches.evaluate(model, subject.text, **what)
    observer.begin((), timed=False)
    if subject.block.rotary_key:
        observer.note(Note("eval.bits", "bits count the 16 bits of rotary keys beside latents."))
    if isinstance(report, AgainstReport):
        for name, reason in report.left_out.items():
            observer.note(Note("eval.left_out", f"{name} is left out: {reason}", {"cache": name}))
    if not isinstance(report, EvalReport):
        return report
    own = _values_in(subject.recipe)
    different = {name: str(value) for name, value in changes.items() if value != own[name]}
    record = _keep(params, subject.artifact, model, report, different, observer)
    return replace(report, record=record)


def values_of(params: EvalParams) -> dict[str, tuple[Any, ...]]:
    """One value of each replaces the recipe's for all caches, and of several every combination is
    measured with the artifact."""
    found = {
        "sink": numbers("--sink", params.sink, least=0),
        "recent": numbers("--recent", params.recent),
        "clip": tuple(dict.fromkeys(map(read_clip, params.clips))),
        "group_size": numbers("--group-size", params.group_size),
    }
    return {name: values for name, values in found.items() if values}


def settings_of(values: Mapping[str, Sequence[Any]], recipe: ServingRecipe) -> list[Setting]:
    settings: list[Setting] = []
    for combination in product(*values.values()):
        given = dict(zip(values, combination, strict=True))
        try:
            changed = recipe.override(**given)
        except UsageError:
            raise
        except ValueError:
            said = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in given.items())
            hint = "windows have at most 1,048,576 tokens"
            raise UsageError(f"no recipe has {said}.", hint=hint) from None
        settings.append((changed, {name: _values_in(changed)[name] for name in given}))
    return settings


def _values_in(recipe: ServingRecipe) -> dict[str, Any]:
    return {
        "sink": recipe.windows.sink,
        "recent": recipe.windows.recent,
        "clip": f"{recipe.clip.k:g},{recipe.clip.v:g}",
        "group_size": recipe.group_size,
    }


def check_settings(
    settings: Sequence[Setting], model: ModelBlock, length: int, *, always: bool = False
) -> None:
    """Refuse what cannot be measured on sequences of `length` tokens, before a model is loaded;
    `always` also where the windows are the recipe's own."""
    length = fitting(length, model)
    for recipe, changes in settings:
        windows = recipe.windows
        if "group_size" in changes:
            check_groups(model.head_dims, recipe.group_size, model.id, option="--group-size {}")
        wide = windows.sink + windows.recent >= length - 1
        if wide and (always or not {"sink", "recent"}.isdisjoint(changes)):
            raise UsageError(
                f"with {windows.sink:,} first and {windows.recent:,} last tokens in BF16, nothing"
                f" of a sequence of {length:,} tokens is quantized.",
                hint="give smaller --sink and --recent, or a larger --length",
            )


@dataclass(frozen=True)
class Subject:
    artifact: Artifact
    choice: ModelChoice
    revision: str | None
    text: str

    @cached_property
    def block(self) -> ModelBlock:
        from oscar_zoo.models.model_source import read_model_config

        model = self.choice
        return read_model_config(model.source, self.revision, model.model_id).readable

    @cached_property
    def recipe(self) -> ServingRecipe:
        """The artifact's, else the zoo's or the default for a model of this shape."""
        from oscar_zoo.registry.recipe import serving_recipe

        return self.artifact.recipe or serving_recipe(self.choice.recipe, self.block.geometry)


def find_subject(verb: str, params: EvalParams | RulerParams, observer: Observer) -> Subject:
    """Artifact, model and text, before any library that takes long is imported."""
    from oscar_zoo.models.config_file import read_config

    device = params.device
    if device not in (None, "auto") and hardware.parse_device(device)[0] == "cuda":
        hardware.check_build()
    text = read_text(params.data or DATA, "validation")
    artifact, choice = find_model(verb, params, observer)
    if Path(choice.source).is_dir():
        read_config(Path(choice.source))
    return Subject(artifact, choice, params.revision, text)


def find_model(
    verb: str, params: EvalParams | RulerParams, observer: Observer
) -> tuple[Artifact, ModelChoice]:
    from oscar_zoo.models.model_hub import check_fetchable

    line = again(verb, params)
    named = targets.parse_given_model(params.model, observer, again=line)
    target = targets.parse(params.artifact)
    check_used(named or target.choice, params.revision)
    artifact = open_artifact(target, Sources(params.hubs), observer)
    choice = model_for(artifact, named, observer, again=line)
    check_fetchable(choice.source, params.revision)
    return artifact, choice


def load_subject(
    params: EvalParams | RulerParams, choice: ModelChoice, observer: Observer, *, longest: int
) -> LoadedModel:
    from oscar_zoo.models.loading import load_model
    from oscar_zoo.models.memory import Workload, pick_device

    observer.advance("load", 0, 0)
    loaded = load_model(
        choice.source,
        revision=params.revision,
        dtype=params.dtype,
        device=pick_device(params.device, several=True),
        model_id=choice.model_id,
        stream=params.stream_weights,
        workload=Workload(longest),
    )
    for note in loaded.notes:
        observer.note(Note("model.loaded", note))
    return loaded


def _keep(
    params: EvalParams,
    artifact: Artifact,
    model: LoadedModel,
    report: EvalReport,
    changes: Mapping[str, str],
    observer: Observer,
) -> Path | None:
    """Keep the scores in a file; a record that cannot be kept costs no result."""
    from oscar_zoo.evaluate.records import scores

    if artifact.id is None or not report.compared:
        return None
    if not made_for(artifact, model.block):
        text = f"no scores are recorded: {artifact.label} was not made for {model.block.id}."
        observer.note(Note("eval.no_record", text))
        return None
    data = data if (data := params.data or DATA) in TEXTS else "FILE"  # never its name
    sizes = {"windows": params.windows or WINDOWS, "length": params.length or LENGTH}
    options = {"data": data, **sizes, "answers": params.answers or ANSWERS, **changes}
    words = [f"--task {name}" for name in params.tasks]
    words += [f"--{name.replace('_', '-')} {value}" for name, value in options.items()]
    shared = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "source": " ".join(("oscar-zoo eval", artifact.label, *words)),
        "dataset_revision": f"sha256:{report.text_sha256}",
    }
    int2 = {"artifact_digest": artifact.digest, "recipe_changes": dict(changes)}
    found = scores(report.compared, model, shared, int2)
    if not found:
        return None
    identity = ArtifactId.parse(artifact.id)
    path = place_of(artifact, identity)
    try:
        kept = score_file.keep(path, ScoreFile.of(identity, artifact.digest, found))
    except OscarZooError as error:
        text = f"the scores are not kept in {path_text(path)}: {error.message}"
        observer.note(Note("eval.no_record", text, {"path": str(path)}))
        return None
    standing = {score_file.key(one): one.value for one in kept.scores}
    if any(standing[score_file.key(one)] != one.value for one in found):
        text = "an earlier measurement of more stands in the scores, and this one in its history."
        observer.note(Note("eval.earlier_stands", text))
    return path


def place_of(artifact: Artifact, identity: ArtifactId) -> Path:
    """The score file: in the artifact's folder where that is the user's own, else in the state
    folder."""
    stored = artifact.path.resolve().is_relative_to(Store().root.resolve())
    if artifact.installed or stored:
        return score_file.in_state(identity)
    return score_file.in_folder(artifact.path)


def made_for(artifact: Artifact, model: ModelBlock) -> bool:
    """By the model's name, or its `config.json`."""
    made = artifact.manifest.model if artifact.manifest else None
    if made and made.config_sha256 and made.config_sha256 == model.config_sha256:
        return True
    base = made.id if made else artifact.base_model
    return base is not None and base.casefold() == model.id.casefold()
