"""Measure the cache of an artifact beside caches of other methods, with the model in this
process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from oscar_zoo.app.arguments import model_text, values_of
from oscar_zoo.app.evaluate import EvaluateRequest
from oscar_zoo.app.progress import SILENT, Note, Observer
from oscar_zoo.app.requirements import require_compute
from oscar_zoo.errors import UsageError
from oscar_zoo.evaluate.ablation import AS_PUBLISHED, Values, check_settings
from oscar_zoo.evaluate.alternatives.table import ALL, choices
from oscar_zoo.evaluate.phases import Phase

if TYPE_CHECKING:
    from oscar_zoo.app.evaluated_model import Subject
    from oscar_zoo.artifact.specs import Clip, ServingRecipe
    from oscar_zoo.evaluate.alternatives.report import AgainstReport
    from oscar_zoo.models.loading import Dtype

_PHASES = (Phase("load", "", 1), Phase("measure", "sequences", 9))
"""The seconds are shares."""


@dataclass(frozen=True)
class AgainstRequest:
    """What to measure.

    Attributes:
        artifact: name of an artifact, or its folder.
        against: alternatives as `NAME` or `NAME:BITS` of `evaluate.alternatives.table`, or `all`.
        model, data, windows, length, answers, device, dtype, stream_weights, revision, hubs: as of
            `EvaluateRequest`.
        values: values in place of the recipe's, at most one of each.
    """

    artifact: str | Path
    against: tuple[str, ...] = (ALL,)
    model: str | None = None
    data: str = EvaluateRequest.data
    windows: int = EvaluateRequest.windows
    length: int = EvaluateRequest.length
    answers: int = EvaluateRequest.answers
    values: Values = AS_PUBLISHED
    device: str | None = None
    dtype: Dtype = EvaluateRequest.dtype
    stream_weights: bool | None = None
    revision: str | None = None
    hubs: tuple[str, ...] = ()

    def command_line(self, model: str) -> str:
        """The command line that means this request with the model `model`."""
        rest = {name: value for name, value in vars(self).items() if name != "against"}
        plain = EvaluateRequest(**rest).command_line(model)
        return f"{plain} --against {','.join(self.against)}"


def evaluate_against(
    artifact: str | Path,
    against: str | Sequence[str] = ALL,
    *,
    model: str | Path | None = None,
    data: str = AgainstRequest.data,
    windows: int = AgainstRequest.windows,
    length: int = AgainstRequest.length,
    answers: int = AgainstRequest.answers,
    clip: tuple[float, float] | Clip | None = None,
    sink: int | None = None,
    recent: int | None = None,
    group_size: int | None = None,
    device: str | None = None,
    dtype: Dtype = AgainstRequest.dtype,
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
    request = AgainstRequest(
        artifact=artifact,
        against=tuple(against.split(",") if isinstance(against, str) else against),
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
    return evaluate(request, observer)


def evaluate(request: AgainstRequest, observer: Observer = SILENT) -> AgainstReport:
    """Measure BF16, the artifact and the alternatives on the same text and questions.

    Raises:
        OscarZooError: as `evaluate_against`.
    """
    chosen = choices(request.against)
    require_compute()
    from oscar_zoo.app.artifact_model import both_sides
    from oscar_zoo.app.evaluated_model import find_subject, load_subject

    subject = find_subject(request, observer)
    from oscar_zoo.evaluate.alternatives.comparison import compare
    from oscar_zoo.models.memory import memory_errors

    recipe = _recipe(request, subject)
    observer.begin(_PHASES, timed=False)
    loaded = load_subject(request, subject, observer, longest=request.length)
    with memory_errors(loaded.block.id, loaded.device):
        report = compare(
            loaded,
            subject.text,
            chosen,
            artifact=both_sides(subject.artifact),
            recipe=recipe,
            windows=request.windows,
            length=request.length,
            answers=request.answers,
            strict=ALL not in request.against,
            progress=lambda done, total, unit: observer.advance("measure", done, total, unit),
        )
    observer.begin((), timed=False)
    for name, reason in report.left_out.items():
        observer.note(Note("eval.left_out", f"{name} is left out: {reason}", {"cache": name}))
    return report


def _recipe(request: AgainstRequest, subject: Subject) -> ServingRecipe:
    """The recipe to measure with; no weights are read.

    Raises:
        UsageError: several values, or values that cannot be measured with this model.
        OscarZooError: the model's configuration cannot be read.
    """
    from oscar_zoo.app.evaluated_model import recipe_of
    from oscar_zoo.models.inspect import inspect_model

    choice = subject.choice
    block = inspect_model(choice.source, revision=request.revision, model_id=choice.model_id)
    settings = request.values.settings(recipe_of(subject, block.geometry))
    if len(settings) > 1:
        raise UsageError(
            "--against compares methods under one recipe, and several values are given.",
            hint="give one of each --sink, --recent, --clip and --group-size",
        )
    longest = (block.rope and block.rope.max_position) or request.length
    check_settings(settings, block, min(request.length, longest))
    return settings[0].recipe
