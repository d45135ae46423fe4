"""Fit another rotation from the moments of an earlier capture, add captures up, and draw reports.

All of it needs torch, but for a report that is drawn again from its numbers. Nothing needs the
model or its text.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from oscar_zoo.artifact.durable import check_file, write_file
from oscar_zoo.artifact.names import path_text
from oscar_zoo.compute.outcome import Drawn, FitResult, MergeResult
from oscar_zoo.compute.params import FitParams, MergeParams, PlotParams
from oscar_zoo.compute.report.data import MAX_BYTES, SUFFIX, ReportData
from oscar_zoo.engines.requirements import require_compute
from oscar_zoo.errors import MalformedFile, PathNotFound, UsageError, malformed_hint
from oscar_zoo.observer import SILENT, Observer, phase_progress
from oscar_zoo.registry.params import clip_of
from oscar_zoo.verb import python_call


def run(params: FitParams, observer: Observer = SILENT) -> FitResult:
    """Fit another method from the moments of an earlier capture, without a run over its text.

    Returns:
        `path` and `manifest` of the artifact.
    """
    observer = params.observer or observer
    require_compute()
    from oscar_zoo.compute.folder import check_place

    moments = _moments_file(Path(params.moments))
    target = None if params.output is None else Path(params.output)
    check_place(target, force=params.force)
    # What follows imports torch and transformers, which takes seconds.
    from oscar_zoo.artifact.specs import Widths, check_groups
    from oscar_zoo.compute.estimate import REFIT_PHASES
    from oscar_zoo.compute.job import refit
    from oscar_zoo.compute.moments_file import load_moments
    from oscar_zoo.registry.recipe import serving_recipe
    from oscar_zoo.registry.targets import recorded_model

    sums, info = load_moments(moments)
    recorded = recorded_model(info.model.id)
    recipe = serving_recipe(recorded.recipe, info.model.geometry)
    recipe = recipe.override(clip=clip_of(params.clip), group_size=params.group_size)
    check_groups(info.model.head_dims, recipe.group_size, info.model.id)
    if params.bits == 4:
        layers = len(info.model.attention_layers)
        recipe = recipe.with_widths(Widths.uniform(layers, k=4, v=4, clip=recipe.clip))
    observer.begin(REFIT_PHASES, timed=False)
    path, manifest = refit(
        moments,
        sums,
        info,
        params.method,
        recipe,
        model_name=recorded.name,
        target=target,
        force=params.force,
        progress=phase_progress(observer),
    )
    observer.begin((), timed=False)
    return FitResult.of(path, manifest)


fit = python_call(FitParams, run)


def _moments_file(path: Path) -> Path:
    """The file `path`, or the one beside or in a folder, which begins as such a file."""
    from oscar_zoo.artifact.tensor_file import check_start
    from oscar_zoo.compute.folder import MOMENTS_NAME, moments_beside

    if path.is_dir():
        beside = moments_beside(path if path.name not in ("", "..") else path.resolve())
        hint = f"name the file; compute leaves it beside an artifact as {beside.name}"
        found = [f"*.{MOMENTS_NAME}"]
        path = beside if beside.is_file() else _only(path, found, "moments", hint)
    with malformed_hint(f"name a file of moments; compute leaves NAME.{MOMENTS_NAME}"):
        check_start(path)
    return path


def _only(folder: Path, patterns: Sequence[str], what: str, hint: str) -> Path:
    """The one file in a folder that goes with the first of the patterns that any goes with."""
    found = next(filter(None, (sorted(folder.glob(one)) for one in patterns)), [])
    if not found:
        raise PathNotFound(f"no {what} in or beside {path_text(folder)}.", hint=hint)
    if len(found) > 1:
        raise UsageError(
            f"{path_text(folder)} holds {len(found)} files with {what}.",
            hint=f"name one, for example {path_text(found[0])}",
        )
    return found[0]


def merge(params: MergeParams, observer: Observer = SILENT) -> MergeResult:
    """Add up captures of different texts of one model."""
    require_compute()
    output = Path(params.output)
    check_file(output)
    files = [_moments_file(Path(path)) for path in params.paths]
    from oscar_zoo.compute.moments_file import merge_files

    file, info, notes = merge_files(files, output)
    tokens = sum(sequence.tokens for sequence in info.sequences)
    return MergeResult(output, file.size, file.sha256, tokens, notes)


merge_moments = python_call(MergeParams, merge)


_MOMENTS = ".safetensors"


def draw(params: PlotParams, observer: Observer = SILENT) -> Drawn:
    """Draw the report of a fit again from its numbers, or the spectra of a moments file.

    Returns:
        `source`, `path` of what was drawn, and `data`, the numbers in it.
    """
    from oscar_zoo.artifact.files import read_file
    from oscar_zoo.compute.report.page import render_html, render_png

    source = _find_source(str(params.source))
    target = Path(params.output or source.with_suffix(".html"))
    if target.suffix.lower() not in (".html", ".png"):
        raise UsageError(
            f"--output {target} has no ending that says a format that is supported.",
            hint="end it in .html or .png",
        )
    check_file(target)
    if source.suffix == _MOMENTS:
        require_compute()
        from oscar_zoo.compute.moments_file import load_moments
        from oscar_zoo.compute.report.build import report_of_moments

        data = report_of_moments(*load_moments(source))
    else:
        content = read_file(source, max_bytes=MAX_BYTES)
        data = ReportData.from_bytes(content, what=str(source))
    html = target.suffix.lower() == ".html"
    write_file(target, render_html(data) if html else render_png(data))
    return Drawn(source, target, data)


draw_report = python_call(PlotParams, draw)


def _find_source(text: str) -> Path:
    """The file to draw: `text` itself, or the one that lies beside or in the folder `text`."""
    from oscar_zoo.registry.verify import existing_path

    hint = "give NAME.report.json or a moments file, as `oscar-zoo compute` writes them"
    path = existing_path(Path(text).expanduser())
    if path.is_file():
        if path.suffix not in (".json", _MOMENTS):
            message = f"{text} is neither a report nor a moments file."
            raise MalformedFile("report.kind", message, hint=hint)
        return path
    beside = path.resolve().parent / f"{path.resolve().name}{SUFFIX}"
    if beside.is_file():
        return beside
    return _only(path, [f"*{SUFFIX}", f"*moments{_MOMENTS}"], "report", hint)
