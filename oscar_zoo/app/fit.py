"""Fit another rotation from the moments of an earlier capture, and add captures up.

Neither needs the model or its text; both need torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from oscar_zoo.app.arguments import clip_of
from oscar_zoo.app.files import check_file
from oscar_zoo.app.progress import SILENT, Observer, phase_progress
from oscar_zoo.app.requirements import require_compute
from oscar_zoo.errors import UsageError

if TYPE_CHECKING:
    from oscar_zoo.artifact.manifest import Manifest
    from oscar_zoo.artifact.specs import Clip


@dataclass(frozen=True)
class FitRequest:
    """What to fit.

    Attributes:
        moments: the file that `compute` writes beside an artifact, or a merged one.
        method: any method but `auto`, and none that is tuned: those need the model.
        clip: clip ratios to record for serving; `None` for the recipe's.
        group_size: channels that share a scale; `None` for the recipe's.
        bits: 4 for codes of 4 bits everywhere, `None` for codes of 2; other bits need the model.
        output: the artifact's folder; `None` for `./<Model>/<tag>`.
        force: replace an artifact that is already in the folder.
    """

    moments: Path
    method: str
    clip: Clip | None = None
    group_size: int | None = None
    bits: float | Literal["auto"] | None = None
    output: Path | None = None
    force: bool = False


@dataclass(frozen=True)
class FitResult:
    """An artifact that was written.

    Attributes:
        path: its folder.
        manifest: the content of its `oscar.json`.
    """

    path: Path
    manifest: Manifest


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
    output: str | Path | None = None,
    force: bool = False,
    observer: Observer = SILENT,
) -> FitResult:
    """Fit another method from the moments of an earlier capture, without the model.

    Args:
        moments: the file that `compute_artifact` writes beside an artifact, or a merged one.
        method: any method but `auto` and `wush-tuned`, which need the model.
        clip: clip ratios of keys and values to record for serving; `None` for the recipe's.
        group_size: channels that share a scale; `None` for the recipe's.
        bits: 4 for codes of 4 bits everywhere; other bits need the model, which `compute_artifact`
            has. `None` for codes of 2 bits.
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
    request = FitRequest(
        moments=Path(moments),
        method=method,
        clip=clip_of(clip),
        group_size=group_size,
        bits=bits,
        output=None if output is None else Path(output),
        force=force,
    )
    return run(request, observer)


def run(request: FitRequest, observer: Observer = SILENT) -> FitResult:
    """Fit a method to a moments file and write the artifact.

    Raises:
        MissingDependency: torch is not installed.
        UsageError: there is no such method, or it needs the model, or the bits need it.
        MalformedFile, PathNotFound: `moments` is not a moments file.
        ComputeFailed: the file lacks what the method reads, or the result failed verification.
        OutputExists, StorageError: the folder cannot be written.
    """
    if request.bits not in (None, 4):
        raise UsageError(
            "which layers get more bits is measured with the model, and a moments file has none.",
            hint="oscar-zoo compute MODEL --bits BITS, or --bits 4 for all of them",
        )
    require_compute()
    from oscar_zoo.artifact.specs import Widths
    from oscar_zoo.compute.moments_file import load_moments
    from oscar_zoo.compute.refit import PHASES, refit
    from oscar_zoo.registry.model_names import recorded_model
    from oscar_zoo.registry.recipe import serving_recipe

    observer.begin(PHASES, timed=False)
    block = load_moments(request.moments)[1].model
    choice = recorded_model(block.id)
    recipe = serving_recipe(choice.recipe, block.geometry)
    recipe = recipe.override(clip=request.clip, group_size=request.group_size)
    if request.bits is not None:
        layers = len(block.attention_layers)
        recipe = recipe.with_widths(Widths.uniform(layers, k=4, v=4, clip=recipe.clip))
    path, manifest = refit(
        request.moments,
        request.method,
        recipe,
        model_name=choice.name,
        target=request.output,
        force=request.force,
        progress=phase_progress(observer),
    )
    observer.begin((), timed=False)
    return FitResult(path, manifest)


def merge_moments(paths: Sequence[str | Path], output: str | Path) -> MergeResult:
    """Add captures of other text up, or join the ranks of one capture; the files say which.

    Args:
        paths: moments files of one model. A sequence that is in two files would count twice and is
            refused.
        output: file to write.

    Raises:
        MissingDependency: torch is not installed.
        UsageError: the files do not go together.
        MalformedFile, PathNotFound: one of them is not a moments file.
        StorageError: `output` cannot be written.
    """
    require_compute()
    from oscar_zoo.compute.merging import merge_files

    check_file(Path(output))
    merged = merge_files([Path(path) for path in paths], Path(output))
    tokens = sum(sequence.tokens for sequence in merged.info.sequences)
    return MergeResult(
        Path(output), merged.file.size, merged.file.sha256, tokens, tuple(merged.notes)
    )
