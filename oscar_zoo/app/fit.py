"""Fit another rotation from the moments of an earlier capture, add captures up, and draw reports.

All of it needs torch, but for a report that is drawn again from its numbers. Nothing needs the
model or its text, except where bits are chosen per layer and side.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from oscar_zoo.artifact.durable import check_file, write_file
from oscar_zoo.artifact.names import path_text
from oscar_zoo.compute.outcome import Drawn, FitResult, MergeResult
from oscar_zoo.compute.params import DEFAULT_TEXT, ComputeParams, FitParams, MergeParams, PlotParams
from oscar_zoo.compute.report.data import MAX_BYTES, SUFFIX, ReportData
from oscar_zoo.engines.requirements import require_compute
from oscar_zoo.errors import MalformedFile, PathNotFound, UsageError
from oscar_zoo.observer import SILENT, Note, Observer, phase_progress
from oscar_zoo.registry.arguments import clip_of, model_text
from oscar_zoo.verb import python_call

if TYPE_CHECKING:
    from oscar_zoo.artifact.specs import ServingRecipe
    from oscar_zoo.compute.moments_file import MomentsInfo
    from oscar_zoo.compute.options import Job
    from oscar_zoo.registry.targets import ModelChoice


def run(params: FitParams, observer: Observer = SILENT) -> FitResult:
    """Fit another method from the moments of an earlier capture, without a run over its text.

    Returns:
        `path` and `manifest` of the artifact, and `notes`.
    """
    observer = params.observer or observer
    measured = params.max_loss is not None or params.bits not in (None, 2, 4)
    if measured and params.model is None:
        raise UsageError(
            "which layers get more bits is measured with the model, and a moments file has none.",
            hint="add --model MODEL, or --bits 4 for all of them",
        )
    if params.model is not None and params.bits in (None, 2) and not measured:
        raise UsageError(
            "--model is only read to choose bits.", hint="add --bits or --max-loss, or leave it out"
        )
    if params.calib_data is not None and params.model is None:
        raise UsageError("--calib-data goes with --model.", hint="add --model, or leave it out")
    require_compute()
    from oscar_zoo.artifact.tensor_file import check_start
    from oscar_zoo.compute.folder import check_place

    moments = _moments_file(Path(params.moments))
    target = None if params.output is None else Path(params.output)
    check_place(target, force=params.force)
    check_start(moments)
    choice = _model_of(params, observer)
    # What follows imports torch and transformers, which takes seconds.
    from oscar_zoo.artifact.specs import check_groups
    from oscar_zoo.compute.estimate import refit_phases
    from oscar_zoo.compute.job import refit
    from oscar_zoo.compute.moments_file import load_moments
    from oscar_zoo.registry.recipe import serving_recipe
    from oscar_zoo.registry.targets import recorded_model

    info = load_moments(moments)[1]
    recorded = recorded_model(info.model.id)
    recipe = serving_recipe(recorded.recipe, info.model.geometry)
    recipe = recipe.override(clip=clip_of(params.clip), group_size=params.group_size)
    check_groups(info.model.head_dims, recipe.group_size, info.model.id)
    job = None if choice is None else _job(params, choice, info, recipe)
    if job is None and params.bits == 4:
        recipe = _four_bits(recipe, len(info.model.attention_layers))
    observer.begin(refit_phases(job), timed=False)
    told: list[str] = []
    path, manifest = refit(
        moments,
        params.method,
        recipe,
        model_name=recorded.name,
        target=target,
        force=params.force,
        job=job,
        progress=phase_progress(observer),
        tell=told.append,
    )
    observer.begin((), timed=False)
    for text in told:
        observer.note(Note("fit.remark", text))
    return FitResult.of(path, manifest, notes=tuple(told))


fit = python_call(FitParams, run)


def _moments_file(path: Path) -> Path:
    """The file `path`, or the one beside or in a folder."""
    from oscar_zoo.compute.folder import MOMENTS_NAME, moments_beside

    if not path.is_dir():
        return path
    beside = moments_beside(path if path.name not in ("", "..") else path.resolve())
    found = [beside] if beside.is_file() else sorted(path.glob(f"*.{MOMENTS_NAME}"))
    if not found:
        raise PathNotFound(
            f"{path_text(path)} is a folder with no moments file beside it or in it.",
            hint=f"name the file; compute leaves it beside an artifact as {beside.name}",
        )
    if len(found) > 1:
        raise UsageError(
            f"{path_text(path)} holds {len(found)} moments files.",
            hint=f"name one, for example {path_text(found[0])}",
        )
    return found[0]


def _model_of(params: FitParams, observer: Observer) -> ModelChoice | None:
    """The model that bits are chosen with, which can be had; `None` without one."""
    from oscar_zoo.app.compute import check_device, check_model
    from oscar_zoo.registry.targets import parse_model

    if params.model is None:
        return None
    check_device(params.device)
    choice = parse_model(model_text(params.model), observer)
    choice.check_can_be_had("oscar-zoo fit MOMENTS --model FOLDER")
    check_model(choice.source, params.revision)
    return choice


def _job(params: FitParams, choice: ModelChoice, info: MomentsInfo, recipe: ServingRecipe) -> Job:
    """What `compute` would do with the model, its text cut as for the moments."""
    from oscar_zoo.app.compute import plan_job

    cut = info.calibration
    asked = ComputeParams(
        choice.source,
        calib_data=params.calib_data or DEFAULT_TEXT,
        calib_tokens=cut.tokens_requested if cut else None,
        seq_len=cut.length.max if cut and cut.length else None,
        seed=cut.seed if cut else None,
        method=params.method,
        clip=params.clip,
        group_size=params.group_size,
        device=params.device,
        dtype=params.dtype,
        stream_weights=params.stream_weights,
        revision=params.revision,
        bits=params.bits,
        max_loss=params.max_loss,
        allow_overlap=True,
        allow_poor=params.allow_poor,
    )
    return replace(plan_job(asked, choice)[0], recipe=recipe)


def _four_bits(recipe: ServingRecipe, layers: int) -> ServingRecipe:
    from oscar_zoo.artifact.specs import Widths

    return recipe.with_widths(Widths.uniform(layers, k=4, v=4, clip=recipe.clip))


def merge(params: MergeParams, observer: Observer = SILENT) -> MergeResult:
    """Add up captures of different texts of one model."""
    require_compute()
    from oscar_zoo.artifact.tensor_file import check_start

    output = Path(params.output)
    check_file(output)
    files = [_moments_file(Path(path)) for path in params.paths]
    for path in files:
        check_start(path)
    from oscar_zoo.compute.moments_file import merge_files

    file, info, notes = merge_files(files, output)
    tokens = sum(sequence.tokens for sequence in info.sequences)
    return MergeResult(output, file.size, file.sha256, tokens, notes)


merge_moments = python_call(MergeParams, merge)


_MOMENTS = ".safetensors"
_FORMATS = (".html", ".png")
_SOURCES = "give NAME.report.json or a moments file, as `oscar-zoo compute` writes them"


def draw(params: PlotParams, observer: Observer = SILENT) -> Drawn:
    """Draw the report of a fit again from its numbers, or the spectra of a moments file.

    Returns:
        `source`, `path` of what was drawn, and `data`, the numbers in it.
    """
    from oscar_zoo.compute.report.page import render_html, render_png

    source = _find_source(str(params.source))
    target = _check_output(Path(params.output or source.with_suffix(".html")))
    data = _read(source)
    content = render_html(data) if target.suffix.lower() == ".html" else render_png(data)
    write_file(target, content)
    return Drawn(source, target, data)


draw_report = python_call(PlotParams, draw)


def _find_source(text: str) -> Path:
    """The file to draw: `text` itself, or the one that lies beside or in the folder `text`."""
    from oscar_zoo.registry.verify import existing_path

    path = existing_path(Path(text).expanduser())
    if path.is_file():
        if path.suffix not in (".json", _MOMENTS):
            message = f"{text} is neither a report nor a moments file."
            raise MalformedFile("report.kind", message, hint=_SOURCES)
        return path
    beside = path.resolve().parent / f"{path.resolve().name}{SUFFIX}"
    if beside.is_file():
        return beside
    found = sorted(path.glob(f"*{SUFFIX}")) or sorted(path.glob(f"*moments{_MOMENTS}"))
    if not found:
        raise PathNotFound(f"no report in or beside {text}.", hint=_SOURCES)
    if len(found) > 1:
        raise UsageError(
            f"{text} holds {len(found)} reports.", hint=f"name one, for example {found[0]}"
        )
    return found[0]


def _check_output(path: Path) -> Path:
    """`path`, if it names a format and can be written."""
    if path.suffix.lower() not in _FORMATS:
        wrong = f"has the ending {path.suffix}, a format that is not supported"
        raise UsageError(
            f"--output {path} {wrong if path.suffix else 'has no ending that says its format'}.",
            hint=f"end it in {' or '.join(_FORMATS)}",
        )
    check_file(path)
    return path


def _read(path: Path) -> ReportData:
    """The report in a JSON file, or that of a moments file."""
    from oscar_zoo.artifact.files import read_file
    from oscar_zoo.engines.requirements import require_compute

    if path.suffix != _MOMENTS:
        return ReportData.from_bytes(read_file(path, max_bytes=MAX_BYTES), what=str(path))
    require_compute()
    from oscar_zoo.compute.moments_file import load_moments
    from oscar_zoo.compute.report.build import report_of_moments

    return report_of_moments(*load_moments(path))
