"""Fit another rotation from the moments of an earlier capture, and add captures up.

Both need torch. Neither needs the model or its text, except where bits are chosen per layer and
side.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from oscar_zoo.app.compute_request import ComputeRequest
from oscar_zoo.artifact.names import path_text
from oscar_zoo.artifact.output_files import check_file
from oscar_zoo.engines.requirements import require_compute
from oscar_zoo.errors import PathNotFound, UsageError
from oscar_zoo.observer import SILENT, Note, Observer, phase_progress
from oscar_zoo.registry.arguments import clip_of, model_text

if TYPE_CHECKING:
    from oscar_zoo.artifact.manifest import Manifest
    from oscar_zoo.artifact.specs import Clip, ServingRecipe
    from oscar_zoo.compute.moments_file import MomentsInfo
    from oscar_zoo.compute.options import ComputeOptions
    from oscar_zoo.models.loading import Dtype
    from oscar_zoo.registry.targets import ModelChoice


@dataclass(frozen=True)
class FitRequest:
    """What to fit.

    Attributes:
        moments: the file that `compute` writes beside an artifact, or a merged one.
        method: any method but `auto`, and none that is tuned: those need the model.
        clip: clip ratios to record for serving; `None` for the recipe's.
        group_size: channels that share a scale; `None` for the recipe's.
        bits, max_loss: as in `ComputeRequest`; all but 2 and 4 bits need the model. `None` for
            codes of 2 bits everywhere.
        model: of the moments: a folder, a name of the zoo, or a hub id.
        calib_data: text whose held-out part bits are chosen with; `None` for that of `compute`.
        device, dtype, stream_weights, revision, allow_poor: as in `ComputeRequest`, for the model.
        output: the artifact's folder; `None` for `./<Model>/<tag>`.
        force: replace an artifact that is already in the folder.
    """

    moments: Path
    method: str
    clip: Clip | None = None
    group_size: int | None = None
    bits: float | Literal["auto"] | None = None
    max_loss: float | None = None
    model: str | None = None
    calib_data: str | None = None
    device: str | None = None
    dtype: Dtype = ComputeRequest.dtype
    stream_weights: bool | None = None
    revision: str | None = None
    allow_poor: bool = False
    output: Path | None = None
    force: bool = False


@dataclass(frozen=True)
class FitResult:
    """An artifact that was written.

    Attributes:
        path: its folder.
        manifest: the content of its `oscar.json`.
        notes: what the user should know, in sentences.
    """

    path: Path
    manifest: Manifest
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class MergeResult:
    """A moments file that was written.

    Attributes:
        path: the file.
        size: its bytes.
        sha256: its hash, 64 hexadecimal digits.
        tokens: tokens of all sequences in it.
        notes: what the user should know, in sentences.
    """

    path: Path
    size: int
    sha256: str
    tokens: int
    notes: tuple[str, ...]


def fit(
    moments: str | Path,
    method: str,
    *,
    clip: tuple[float, float] | Clip | None = None,
    group_size: int | None = None,
    bits: float | Literal["auto"] | None = None,
    max_loss: float | None = None,
    model: str | Path | None = None,
    calib_data: str | Path | None = None,
    device: str | None = None,
    dtype: Dtype = ComputeRequest.dtype,
    stream_weights: bool | None = None,
    revision: str | None = None,
    allow_poor: bool = False,
    output: str | Path | None = None,
    force: bool = False,
    observer: Observer = SILENT,
) -> FitResult:
    """Fit another method from the moments of an earlier capture, without a run over its text.

    Args:
        moments: the file that `compute_artifact` writes beside an artifact, or a merged one; a
            folder stands for the one file beside it or in it.
        method: any method but `auto` and `wush-tuned`, which need the model.
        clip: clip ratios of keys and values to record for serving; `None` for the recipe's.
        group_size: channels that share a scale; `None` for the recipe's.
        bits, max_loss: as for `compute_artifact`. All but `bits=4` and codes of 2 bits everywhere
            are chosen with the model.
        model: of the moments: a folder, a name of the zoo, or a hub id. It is read only to choose
            bits.
        calib_data: text whose held-out part bits are chosen with, as for `compute_artifact`.
        device, dtype, stream_weights, revision: for the model, as for `compute_artifact`.
        allow_poor: write a result that fails its quality gates.
        output: the artifact's folder; `None` for `./<Model>/<tag>`.
        force: replace an artifact that is already in the folder.
        observer: hears of progress.

    Returns:
        `path` and `manifest` of the artifact, and `notes`.

    Raises:
        MissingDependency: torch is not installed.
        UsageError: there is no such method, or it or the bits need the model.
        GeometryMismatch: the moments are of another model.
        MalformedFile, PathNotFound: `moments` is not a moments file.
        ComputeFailed: the file lacks what the method reads, or the result failed verification.
        OutputExists: the folder holds an artifact already.
    """
    request = FitRequest(
        moments=Path(moments),
        method=method,
        clip=clip_of(clip),
        group_size=group_size,
        bits=bits,
        max_loss=max_loss,
        model=None if model is None else model_text(model),
        calib_data=None if calib_data is None else str(calib_data),
        device=device,
        dtype=dtype,
        stream_weights=stream_weights,
        revision=revision,
        allow_poor=allow_poor,
        output=None if output is None else Path(output),
        force=force,
    )
    return run(request, observer)


def run(request: FitRequest, observer: Observer = SILENT) -> FitResult:
    """Fit a method to a moments file and write the artifact."""
    measured = request.max_loss is not None or request.bits not in (None, 2, 4)
    if measured and request.model is None:
        raise UsageError(
            "which layers get more bits is measured with the model, and a moments file has none.",
            hint="add --model MODEL, or --bits 4 for all of them",
        )
    if request.model is not None and request.bits in (None, 2) and not measured:
        raise UsageError(
            "--model is only read to choose bits.", hint="add --bits or --max-loss, or leave it out"
        )
    if request.calib_data is not None and request.model is None:
        raise UsageError("--calib-data goes with --model.", hint="add --model, or leave it out")
    require_compute()
    request = replace(request, moments=_moments_file(request.moments))
    _check_paths(request)
    choice = _model_of(request, observer)
    # What follows imports torch and transformers, which takes seconds.
    from oscar_zoo.artifact.specs import check_groups
    from oscar_zoo.compute.moments_file import load_moments
    from oscar_zoo.compute.phases import refit_phases
    from oscar_zoo.compute.refit import refit
    from oscar_zoo.registry.recipe import serving_recipe
    from oscar_zoo.registry.targets import recorded_model

    info = load_moments(request.moments)[1]
    recorded = recorded_model(info.model.id)
    recipe = serving_recipe(recorded.recipe, info.model.geometry)
    recipe = recipe.override(clip=request.clip, group_size=request.group_size)
    check_groups(info.model.head_dims, recipe.group_size, info.model.id)
    options = None if choice is None else _options(request, choice, info, recipe)
    if options is None and request.bits == 4:
        recipe = _four_bits(recipe, len(info.model.attention_layers))
    observer.begin(refit_phases(options), timed=False)
    told: list[str] = []
    path, manifest = refit(
        request.moments,
        request.method,
        recipe,
        model_name=recorded.name,
        target=request.output,
        force=request.force,
        options=options,
        progress=phase_progress(observer),
        tell=told.append,
    )
    observer.begin((), timed=False)
    for text in told:
        observer.note(Note("fit.remark", text))
    return FitResult(path, manifest, tuple(told))


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


def _check_paths(request: FitRequest) -> None:
    """Refuse what is no file of moments, and a folder that cannot be written."""
    from oscar_zoo.artifact.tensor_file import check_start
    from oscar_zoo.compute.folder import check_place

    check_place(request.output, force=request.force)
    check_start(request.moments)


def _model_of(request: FitRequest, observer: Observer) -> ModelChoice | None:
    """The model of the request, which can be had; `None` without one."""
    from oscar_zoo.app.early_checks import check_device, check_model
    from oscar_zoo.registry.targets import parse_model

    if request.model is None:
        return None
    check_device(request.device)
    choice = parse_model(request.model, observer)
    choice.check_can_be_had("oscar-zoo fit MOMENTS --model FOLDER")
    check_model(choice.source, request.revision)
    return choice


def _options(
    request: FitRequest, choice: ModelChoice, info: MomentsInfo, recipe: ServingRecipe
) -> ComputeOptions:
    """What `compute` would do with the model, its text cut as for the moments."""
    from oscar_zoo.app.compute import options_of

    cut = info.calibration
    asked = ComputeRequest(
        choice.source,
        calib_data=request.calib_data or ComputeRequest.calib_data,
        calib_tokens=cut.tokens_requested if cut else None,
        seq_len=cut.length.max if cut and cut.length else None,
        seed=cut.seed if cut else None,
        method=request.method,
        clip=request.clip,
        group_size=request.group_size,
        device=request.device,
        dtype=request.dtype,
        stream_weights=request.stream_weights,
        revision=request.revision,
        bits=request.bits,
        max_loss=request.max_loss,
        allow_overlap=True,
        allow_poor=request.allow_poor,
    )
    return replace(options_of(asked, choice)[0], recipe=recipe)


def _four_bits(recipe: ServingRecipe, layers: int) -> ServingRecipe:
    from oscar_zoo.artifact.specs import Widths

    return recipe.with_widths(Widths.uniform(layers, k=4, v=4, clip=recipe.clip))


def merge_moments(paths: Sequence[str | Path], output: str | Path) -> MergeResult:
    """Add up captures of different texts.

    Args:
        paths: moments files of one model, or folders, as for `fit`. A sequence that is in two files
            would count twice and is refused.
        output: file to write.

    Raises:
        MissingDependency: torch is not installed.
        UsageError: the files do not go together.
        MalformedFile, PathNotFound: one of them is not a moments file.
        StorageError: `output` cannot be written.
    """
    require_compute()
    from oscar_zoo.artifact.tensor_file import check_start

    check_file(Path(output))
    files = [_moments_file(Path(path)) for path in paths]
    for path in files:
        check_start(path)
    from oscar_zoo.compute.merging import merge_files

    merged = merge_files(files, Path(output))
    tokens = sum(sequence.tokens for sequence in merged.info.sequences)
    return MergeResult(
        Path(output), merged.file.size, merged.file.sha256, tokens, tuple(merged.notes)
    )
