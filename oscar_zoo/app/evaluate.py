"""Measure the INT2 cache of an artifact against BF16 and data-free INT2, with the model in this
process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from oscar_zoo.app.arguments import (
    clip_word,
    command_line,
    list_word,
    model_text,
    option_words,
    values_of,
)
from oscar_zoo.engines.requirements import require_compute
from oscar_zoo.evaluate.ablation import AS_PUBLISHED, TimeLeft, Values
from oscar_zoo.evaluate.phases import Phase, duration
from oscar_zoo.observer import SILENT, Note, Observer

if TYPE_CHECKING:
    from oscar_zoo.app.arguments import Clips, Numbers
    from oscar_zoo.app.evaluated_model import Subject
    from oscar_zoo.artifact.manifest import ModelBlock
    from oscar_zoo.artifact.specs import ServingRecipe
    from oscar_zoo.evaluate.ablation import Setting
    from oscar_zoo.evaluate.run import EvalReport
    from oscar_zoo.models.loading import Dtype

Task = Literal["perplexity", "recall"]
PHASES = (Phase("load", "", 1), Phase("measure", "sequences", 9))
"""The seconds are shares."""
_LONG = 600.0
"""Seconds from which on it is worth saying how long the other combinations will take."""


@dataclass(frozen=True)
class EvaluateRequest:
    """What to measure.

    Attributes:
        artifact: name of an artifact, or its folder.
        model: folder, name of the zoo or hub id; `None` for the artifact's base model.
        tasks: what to measure with.
        data: a text file, or a text known by name.
        windows: windows of the text for perplexity.
        length: tokens of a window at most.
        answers: recall questions.
        values: other values of the recipe to measure with. One of each replaces the recipe's for
            all caches; of several, every combination is measured with the artifact.
        device: `cpu`, `cuda[:N]`, or `auto` for all GPUs; `None` for the first GPU, else the CPU.
        dtype: type of the weights in memory; `auto` keeps the stored one.
        stream_weights: read weights layer by layer; `None` does so when the model does not fit.
        revision: commit, branch or tag of a model on a hub.
        hubs: hubs to look for the artifact in, in order; without any, the configured ones.
    """

    artifact: str | Path
    model: str | None = None
    tasks: tuple[Task, ...] = ("perplexity", "recall")
    data: str = "manuals"
    windows: int = 6
    length: int = 2048
    answers: int = 64
    values: Values = AS_PUBLISHED
    device: str | None = None
    dtype: Dtype = "auto"
    stream_weights: bool | None = None
    revision: str | None = None
    hubs: tuple[str, ...] = ()

    def command_line(self, model: str) -> str:
        """The command line that means this request with the model `model`."""
        usual = EvaluateRequest
        stream = self.stream_weights
        options: dict[str, Any] = {
            "model": model,
            "task": () if self.tasks == usual.tasks else self.tasks,
            "data": None if self.data == usual.data else self.data,
            "windows": None if self.windows == usual.windows else self.windows,
            "length": None if self.length == usual.length else self.length,
            "answers": None if self.answers == usual.answers else self.answers,
            "clip": tuple(map(clip_word, self.values.clip)),
            "sink": list_word(self.values.sink),
            "recent": list_word(self.values.recent),
            "group-size": list_word(self.values.group_size),
            "device": self.device,
            "dtype": None if self.dtype == usual.dtype else self.dtype,
            "stream-weights": stream is True,
            "no-stream-weights": stream is False,
            "revision": self.revision,
            "hub": self.hubs,
        }
        return command_line(["eval", str(self.artifact), *option_words(options)])


def evaluate_artifact(
    artifact: str | Path,
    *,
    model: str | Path | None = None,
    tasks: Sequence[Task] = EvaluateRequest.tasks,
    data: str = EvaluateRequest.data,
    windows: int = EvaluateRequest.windows,
    length: int = EvaluateRequest.length,
    answers: int = EvaluateRequest.answers,
    clip: Clips = None,
    sink: Numbers = (),
    recent: Numbers = (),
    group_size: Numbers = (),
    device: str | None = None,
    dtype: Dtype = EvaluateRequest.dtype,
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
    request = EvaluateRequest(
        artifact=artifact,
        model=None if model is None else model_text(model),
        tasks=tuple(tasks),
        data=data,
        windows=windows,
        length=length,
        answers=answers,
        values=values_of(sink, recent, clip, group_size),
        device=device,
        dtype=dtype,
        stream_weights=stream_weights,
        revision=revision,
        hubs=(hubs,) if isinstance(hubs, str) else tuple(hubs or ()),
    )
    return evaluate(request, observer)


def evaluate(request: EvaluateRequest, observer: Observer = SILENT) -> EvalReport:
    """Measure BF16, the data-free INT2 caches and the artifact's, on the same text; for several
    values of the recipe, BF16 and the artifact under every combination.
    """
    require_compute()
    from oscar_zoo.app.evaluated_model import find_subject, load_subject
    from oscar_zoo.serving.prepared import both_sides

    subject = find_subject(request, observer)
    # What follows imports torch and transformers, which takes seconds.
    from oscar_zoo.app.eval_record import keep_record
    from oscar_zoo.evaluate import run
    from oscar_zoo.models.memory import memory_errors

    own, settings = settings_of(request, subject)
    several = settings if len(settings) > 1 else ()
    observer.begin(PHASES, timed=False)
    loaded = load_subject(request, subject, observer, longest=request.length)
    _tell_of_limit(request.length, loaded.block, observer)
    with memory_errors(loaded.block.id, loaded.device):
        report = run.evaluate(
            loaded,
            subject.text,
            tasks=request.tasks,
            artifact=both_sides(subject.artifact),
            recipe=own if several else settings[0].recipe,
            windows=request.windows,
            length=request.length,
            answers=request.answers,
            settings=several,
            progress=_progress(observer, several),
        )
    observer.begin((), timed=False)
    if several:
        return report
    asked = {name: getattr(request, name) for name in ("data", "windows", "length", "answers")}
    changes = settings[0].differences(own)
    kept = keep_record(
        subject.artifact, loaded, report.compared, report.facts, asked, changes, observer
    )
    return replace(report, record=kept)


def _tell_of_limit(length: int, model: ModelBlock, observer: Observer) -> None:
    """Say that windows are shorter than asked for, where the model takes no longer ones."""
    limit = model.rope.max_position if model.rope else None
    if limit is not None and EvaluateRequest.length < length and limit < length:
        text = f"{model.id} takes {limit:,} tokens, so windows have no more than that."
        observer.note(Note("eval.limit", text, {"limit": limit}))


def settings_of(
    request: EvaluateRequest, subject: Subject
) -> tuple[ServingRecipe, tuple[Setting, ...]]:
    """The recipe of the artifact, and those to measure with; no weights are read."""
    from oscar_zoo.app.evaluated_model import recipe_of
    from oscar_zoo.evaluate.ablation import check_settings
    from oscar_zoo.models.model_source import inspect_model

    choice = subject.choice
    block = inspect_model(choice.source, revision=request.revision, model_id=choice.model_id)
    own = recipe_of(subject, block.geometry)
    settings = request.values.settings(own)
    longest = (block.rope and block.rope.max_position) or request.length
    check_settings(settings, block, min(request.length, longest))
    return own, settings


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
