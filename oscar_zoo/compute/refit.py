"""The use case: a moments file becomes a verified artifact, without a new capture.

The model is needed only where bits are chosen per layer and side, which is measured with it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from oscar_zoo.artifact.files import read_file, sha256_hex
from oscar_zoo.artifact.manifest import FILE_NAME, Manifest, MomentsFile
from oscar_zoo.artifact.names import ArtifactId
from oscar_zoo.artifact.outcome import Verified, why
from oscar_zoo.artifact.specs import ServingRecipe
from oscar_zoo.artifact.verify import verify_files
from oscar_zoo.compute import moments_file
from oscar_zoo.compute.assemble import Facts, assemble
from oscar_zoo.compute.capture.running import RunningModel
from oscar_zoo.compute.data import HeldOut
from oscar_zoo.compute.fit import FitResult, fit, needs_model, possible_methods
from oscar_zoo.compute.fitting import choose_bits
from oscar_zoo.compute.folder import MOMENTS_NAME, check_target, default_target, write_folder
from oscar_zoo.compute.methods.table import TABLE, find_method
from oscar_zoo.compute.moments_file import MomentsInfo
from oscar_zoo.compute.options import ComputeOptions, check_options
from oscar_zoo.compute.phases import FIT, LOAD, WRITE
from oscar_zoo.compute.select.width_choice import WidthChoice
from oscar_zoo.compute.subject import load_subject, read_data
from oscar_zoo.compute.tags import calibration_tag
from oscar_zoo.errors import ComputeFailed, GeometryMismatch
from oscar_zoo.evaluate.shared import Progress
from oscar_zoo.models.memory import memory_errors


def refit(
    moments: Path,
    method: str,
    recipe: ServingRecipe,
    *,
    model_name: str,
    target: Path | None,
    force: bool = False,
    options: ComputeOptions | None = None,
    progress: Progress = lambda done, total, phase: None,
    tell: Callable[[str], None] = lambda text: None,
) -> tuple[Path, Manifest]:
    """Fit `method` to a moments file and write the artifact.

    Args:
        recipe: serving settings; `requires` is completed from the fit.
        model_name: first part of the artifact id.
        target: the artifact's folder; `None` for `folder.default_target`.
        options: of `compute`, with `widths`, where bits are to be chosen: the model, and the text
            whose held-out part they are chosen with.
    """
    chosen = find_method(method)
    if chosen.tune is not None:
        raise needs_model(chosen)
    sums, info = moments_file.load_moments(moments)
    if method not in possible_methods(sums):
        allowed = ", ".join(name for name in possible_methods(sums) if TABLE[name].publishable)
        raise ComputeFailed(
            f"{moments} lacks sums that {method} reads.", hint=f"it allows {allowed}"
        )
    if target is not None:
        check_target(target, force=force)
    progress(0, 0, FIT)
    result = fit(sums, chosen)
    found = None if options is None else _bits(options, info, result, progress, tell)
    recipe = recipe if found is None else found[0].recipe
    used = info.calibration
    tokens = (used.tokens_used if used else None) or sums.tokens
    tag = calibration_tag(tokens, len(info.sequences), recipe, info.model, chosen)
    artifact = ArtifactId(model_name, str(tag))
    target = target or default_target(artifact)
    check_target(target, force=force)
    facts = Facts(
        artifact_id=artifact,
        model=info.model,
        recipe=recipe,
        calibration=used if chosen.needs else None,
        numerics=info.numerics if chosen.needs else None,
        created=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        coverage=info.coverage if chosen.needs else None,
    )
    if found is not None:
        widths, heldout = found
        selection = widths.selection_of(method, heldout)
        facts = replace(facts, selection=selection, quality=widths.quality)
    outcome = verify_files(assemble(result, facts), strict=True)
    if not isinstance(outcome, Verified):
        raise ComputeFailed(
            f"the result failed its own verification: {why(outcome)}.", hint="nothing was written"
        )
    progress(0, 0, WRITE)
    data = read_file(moments, max_bytes=moments_file.MAX_BYTES)
    source = MomentsFile(sha256=sha256_hex(data), size=len(data), location=MOMENTS_NAME)
    files = assemble(result, replace(facts, moments=source))
    write_folder(target, files, force=force)
    return target, Manifest.from_bytes(files[FILE_NAME])


def _bits(
    options: ComputeOptions,
    info: MomentsInfo,
    result: FitResult,
    progress: Progress,
    tell: Callable[[str], None],
) -> tuple[WidthChoice, HeldOut]:
    """The bits of every layer and side, and the text that they were chosen with."""
    methods = check_options(options)
    progress(0, 0, LOAD)
    subject = load_subject(options)
    difference = info.model.geometry.difference(subject.block.geometry)
    if difference is not None:
        raise GeometryMismatch(
            f"the moments are of {info.model.id}, and {options.model} is another model:"
            f" {difference}.",
            hint="give the model that they were captured from",
        )
    assert subject.loaded is not None  # options of this use case have transformers run the model
    data = read_data(options, subject, methods)
    if info.calibration is None or data.prompts_sha256 != info.calibration.prompts_sha256:
        tell(
            f"the moments were not captured from {data.source} with this budget, so text that they"
            " were captured from may be among the text that bits are chosen with."
        )
    with memory_errors(subject.block.id, subject.loaded.device):
        widths = choose_bits(options, RunningModel(subject.loaded), data, result, progress)
    assert widths is not None and data.heldout is not None  # `options` has a wish
    return widths, data.heldout
