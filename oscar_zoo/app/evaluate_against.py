"""Measure the cache of an artifact beside caches of other methods, with the model in this
process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from oscar_zoo.app.arguments import model_text, values_of
from oscar_zoo.app.evaluate import PHASES, EvaluateRequest, settings_of
from oscar_zoo.engines.requirements import require_compute
from oscar_zoo.errors import UsageError
from oscar_zoo.evaluate.alternatives.table import ALL, choices
from oscar_zoo.observer import SILENT, Note, Observer

if TYPE_CHECKING:
    from oscar_zoo.app.evaluated_model import Subject
    from oscar_zoo.artifact.specs import Clip, ServingRecipe
    from oscar_zoo.evaluate.alternatives.report import AgainstReport
    from oscar_zoo.models.loading import Dtype


@dataclass(frozen=True)
class AgainstRequest:
    """What to measure.

    Attributes:
        asked: artifact, model, text and sizes; it has at most one value of each of the recipe's,
            and its tasks do not count.
        against: alternatives as `NAME` or `NAME:BITS` of `evaluate.alternatives.table`, or `all`.
    """

    asked: EvaluateRequest
    against: tuple[str, ...] = (ALL,)


def evaluate_against(
    artifact: str | Path,
    against: str | Sequence[str] = ALL,
    *,
    model: str | Path | None = None,
    data: str = EvaluateRequest.data,
    windows: int = EvaluateRequest.windows,
    length: int = EvaluateRequest.length,
    answers: int = EvaluateRequest.answers,
    clip: tuple[float, float] | Clip | None = None,
    sink: int | None = None,
    recent: int | None = None,
    group_size: int | None = None,
    device: str | None = None,
    dtype: Dtype = EvaluateRequest.dtype,
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
        MissingDependency: torch or transformers is not installed.
        UsageError: an unknown alternative, one that does not fit the model, or too little text.
        NotFoundError: there is no such artifact, model or text.
        GeometryMismatch: the artifact was made for another shape of model.
        NotEnoughMemory: the model does not fit.
    """
    first, last, group = (() if one is None else one for one in (sink, recent, group_size))
    asked = EvaluateRequest(
        artifact=artifact,
        model=None if model is None else model_text(model),
        data=data,
        windows=windows,
        length=length,
        answers=answers,
        values=values_of(first, last, clip, group),
        device=device,
        dtype=dtype,
        stream_weights=stream_weights,
        revision=revision,
        hubs=(hubs,) if isinstance(hubs, str) else tuple(hubs or ()),
    )
    names = against.split(",") if isinstance(against, str) else against
    return evaluate(AgainstRequest(asked, tuple(names)), observer)


def evaluate(request: AgainstRequest, observer: Observer = SILENT) -> AgainstReport:
    """Measure BF16, the artifact and the alternatives on the same text and questions."""
    asked, chosen = request.asked, choices(request.against)
    require_compute()
    from oscar_zoo.app.evaluated_model import find_subject, load_subject
    from oscar_zoo.serving.prepared import both_sides

    subject = find_subject(asked, observer, options=f"--against {','.join(request.against)}")
    from oscar_zoo.evaluate.alternatives.comparison import compare
    from oscar_zoo.models.memory import memory_errors

    recipe = _recipe(asked, subject)
    observer.begin(PHASES, timed=False)
    loaded = load_subject(asked, subject, observer, longest=asked.length)
    with memory_errors(loaded.block.id, loaded.device):
        report = compare(
            loaded,
            subject.text,
            chosen,
            artifact=both_sides(subject.artifact),
            recipe=recipe,
            windows=asked.windows,
            length=asked.length,
            answers=asked.answers,
            strict=ALL not in request.against,
            progress=lambda done, total, unit: observer.advance("measure", done, total, unit),
        )
    observer.begin((), timed=False)
    for name, reason in report.left_out.items():
        observer.note(Note("eval.left_out", f"{name} is left out: {reason}", {"cache": name}))
    return report


def _recipe(asked: EvaluateRequest, subject: Subject) -> ServingRecipe:
    """The recipe to measure with; no weights are read."""
    _, settings = settings_of(asked, subject)
    if len(settings) > 1:
        raise UsageError(
            "--against compares methods under one recipe, and several values are given.",
            hint="give one of each --sink, --recent, --clip and --group-size",
        )
    return settings[0].recipe
