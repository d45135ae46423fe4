"""The verbs that need torch as Python calls; everything here is importable from `oscar_zoo` itself.

    import oscar_zoo

    made = oscar_zoo.compute_artifact("Qwen/Qwen3-8B", calib_data="prompts.jsonl")
    report = oscar_zoo.evaluate_artifact(made.path, model="Qwen/Qwen3-8B")

Nothing is printed. Every call that takes long takes an `observer` (`oscar_zoo.app.progress`), which
hears of progress and remarks. Two calls carry a noun because `oscar_zoo.compute` and
`oscar_zoo.evaluate` are packages.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from oscar_zoo.app import compute, evaluate, report
from oscar_zoo.app import fit as fitting
from oscar_zoo.app.compute import ComputeRequest
from oscar_zoo.app.evaluate import EvaluateRequest, Task
from oscar_zoo.app.fit import FitResult, MergeResult
from oscar_zoo.app.progress import SILENT, Observer
from oscar_zoo.app.report import Drawn

if TYPE_CHECKING:
    from oscar_zoo.artifact.specs import Clip
    from oscar_zoo.compute.job import ComputeResult
    from oscar_zoo.evaluate.run import EvalReport
    from oscar_zoo.models.loading import Dtype

_Place = str | Path


def compute_artifact(
    model: _Place,
    *,
    calib_data: _Place = ComputeRequest.calib_data,
    calib_tokens: int | None = None,
    seq_len: int | None = None,
    method: str = ComputeRequest.method,
    clip: tuple[float, float] | None = None,
    group_size: int | None = None,
    device: str | None = None,
    dtype: Dtype = ComputeRequest.dtype,
    engine: Literal["transformers", "sglang"] = ComputeRequest.engine,
    tensor_parallel: int = ComputeRequest.tensor_parallel,
    stream_weights: bool | None = None,
    output: _Place | None = None,
    force: bool = False,
    resume: bool = False,
    seed: int | None = None,
    chat_template: bool | None = None,
    allow_overlap: bool = False,
    allow_poor: bool = False,
    fast: bool = False,
    tune: bool = True,
    revision: str | None = None,
    model_id: str | None = None,
    observer: Observer = SILENT,
) -> ComputeResult | None:
    """Calibrate a model, fit a rotation, and write it as a verified artifact.

    Args:
        model: a local folder, a name of the zoo, or a hub id such as `Qwen/Qwen3-8B`. A `Path` is
            always a folder.
        calib_data: text to calibrate on: a text or JSONL file, a folder of such files, a text known
            by name, or a Hugging Face dataset `ORG/NAME[@REV][:CONFIG][:SPLIT][#FIELD]`.
        calib_tokens: tokens to read; `None` for the number in the model's recipe, else 16,384.
        seq_len: tokens of a sequence; `None` for the recipe's, else up to 4,096.
        method: how to fit; `auto` measures all methods on held-out text and keeps the best.
        clip: clip ratios of keys and values to record for serving; `None` fits them with `auto`,
            and otherwise takes the recipe's.
        group_size: channels that share a scale; `None` for the recipe's.
        device: `cpu`, `cuda[:N]`, or `auto` for all GPUs; `None` for the first GPU, else the CPU.
        dtype: type of the weights in memory; `auto` keeps the stored one.
        engine: what runs the model.
        tensor_parallel: ranks of the sglang engine.
        stream_weights: read weights layer by layer; `None` does so when the model does not fit.
        output: the artifact's folder; `None` for `./<Model>/<tag>`. Moments and report are written
            beside it.
        force: replace an artifact that is already in the folder.
        resume: continue from what an interrupted call with the same arguments left.
        seed: shuffles the documents; `None` keeps their order.
        chat_template: render text as chat, or chats as text; `None` decides by the data.
        allow_overlap: calibrate although the text holds questions of an evaluation set.
        allow_poor: write a result that fails its quality gates.
        fast: with `auto`, choose by errors of attention alone, without perplexity and recall.
        tune: with `auto`, also try `wush-tuned`, which reads the text once more.
        revision: commit, branch or tag of a model on a hub.
        model_id: identity to record for a local folder, `ORG/NAME`.
        observer: hears of progress and remarks.

    Returns:
        The artifact: `path`, `manifest`, `moments`, `report`, `notes` and more. In processes of
        `torchrun` other than the first, `None`.

    Raises:
        MissingDependency: torch or transformers is not installed.
        UsageError: arguments that make no sense together, or data that is no text.
        NotFoundError: there is no such model or data.
        UnsupportedModel: the model has attention that this version cannot handle.
        OutputExists: the folder holds an artifact already.
        NotEnoughMemory: the model is larger than the device.
        ComputeFailed: the result failed its verification or its gates.
    """
    request = ComputeRequest(
        model=_model(model),
        calib_data=str(calib_data),
        calib_tokens=calib_tokens,
        seq_len=seq_len,
        method=method,
        clip=_clip(clip),
        group_size=group_size,
        device=device,
        dtype=dtype,
        engine=engine,
        tensor_parallel=tensor_parallel,
        stream_weights=stream_weights,
        output=None if output is None else Path(output),
        force=force,
        resume=resume,
        seed=seed,
        chat_template=chat_template,
        allow_overlap=allow_overlap,
        allow_poor=allow_poor,
        fast=fast,
        tune=tune,
        revision=revision,
        model_id=model_id,
    )
    return compute.compute(request, observer)


def fit(
    moments: _Place,
    method: str,
    *,
    clip: tuple[float, float] | None = None,
    group_size: int | None = None,
    output: _Place | None = None,
    force: bool = False,
    observer: Observer = SILENT,
) -> FitResult:
    """Fit another method from the moments of an earlier capture, without the model.

    Args:
        moments: the file that `compute_artifact` writes beside an artifact, or a merged one.
        method: any method but `auto` and `wush-tuned`, which need the model.
        clip: clip ratios of keys and values to record for serving; `None` for the recipe's.
        group_size: channels that share a scale; `None` for the recipe's.
        output: the artifact's folder; `None` for `./<Model>/<tag>`.
        force: replace an artifact that is already in the folder.
        observer: hears of progress.

    Returns:
        `path` and `manifest` of the artifact.

    Raises:
        MissingDependency: torch is not installed.
        UsageError: there is no such method, or it needs the model.
        MalformedFile, PathNotFound: `moments` is not a moments file.
        ComputeFailed: the file lacks what the method reads, or the result failed verification.
        OutputExists: the folder holds an artifact already.
    """
    request = fitting.FitRequest(
        moments=Path(moments),
        method=method,
        clip=_clip(clip),
        group_size=group_size,
        output=None if output is None else Path(output),
        force=force,
    )
    return fitting.fit(request, observer)


def merge_moments(paths: Sequence[_Place], output: _Place) -> MergeResult:
    """Add captures of other text up, or join the ranks of one capture; the files say which.

    Args:
        paths: two or more moments files of one model.
        output: file to write.

    Returns:
        `path`, `size`, `sha256`, `tokens` and `notes` of the merged file.

    Raises:
        UsageError: the files do not go together, or hold the same sequences.
        MalformedFile, PathNotFound: one of them is not a moments file.
    """
    return fitting.merge_moments([Path(path) for path in paths], Path(output))


def evaluate_artifact(
    artifact: _Place,
    *,
    model: _Place | None = None,
    tasks: Sequence[Task] = EvaluateRequest.tasks,
    data: str = EvaluateRequest.data,
    windows: int = EvaluateRequest.windows,
    length: int = EvaluateRequest.length,
    answers: int = EvaluateRequest.answers,
    clip: tuple[float, float] | None = None,
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
        clip: clip ratios of keys and values in place of the recipe's.
        device: `cpu`, `cuda[:N]`, or `auto` for all GPUs; `None` for the first GPU, else the CPU.
        dtype: type of the weights in memory; `auto` keeps the stored one.
        stream_weights: read weights layer by layer; `None` does so when the model does not fit.
        revision: commit, branch or tag of a model on a hub.
        hubs: where to look for the artifact, in order; without any, the configured hubs.
        observer: hears of progress and remarks.

    Returns:
        A report with one row per cache; `to_json()` gives plain values.

    Raises:
        MissingDependency: torch or transformers is not installed.
        UsageError: the artifact has only one side, or the text is too short.
        NotFoundError: there is no such artifact, model or text.
        GeometryMismatch: the artifact was made for another shape of model.
        NotEnoughMemory: the model does not fit.
    """
    request = EvaluateRequest(
        artifact=artifact,
        model=None if model is None else _model(model),
        tasks=tuple(tasks),
        data=data,
        windows=windows,
        length=length,
        answers=answers,
        clip=_clip(clip),
        device=device,
        dtype=dtype,
        stream_weights=stream_weights,
        revision=revision,
        hubs=(hubs,) if isinstance(hubs, str) else tuple(hubs or ()),
    )
    return evaluate.evaluate(request, observer)


def draw_report(source: _Place, output: _Place | None = None) -> Drawn:
    """Draw the report of a fit again from its numbers, or the spectra of a moments file.

    Args:
        source: `NAME.report.json`, a moments file, or the folder of an artifact with one of them
            beside it.
        output: an .html or .png file; `None` for a page beside the source.

    Returns:
        `source`, `path` of what was drawn, and `data`, the numbers in it.

    Raises:
        PathNotFound: the source, or the folder of the output, does not exist.
        UsageError: the source is of another kind, or the output names neither format.
        MalformedFile: the source breaks the rules of its format.
    """
    request = report.ReportRequest(str(source), None if output is None else Path(output))
    return report.draw(request)


def _model(model: _Place) -> str:
    """A model as text; a `Path` is written so that it can only mean a folder."""
    from oscar_zoo.artifact.names import path_text

    return path_text(model) if isinstance(model, Path) else model


def _clip(ratios: tuple[float, float] | None) -> Clip | None:
    from oscar_zoo.artifact.specs import Clip

    return None if ratios is None else Clip(k=ratios[0], v=ratios[1])
