"""The use case: a moments file becomes a verified artifact, without the model or the text."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from oscar_zoo.artifact.digest import sha256_hex
from oscar_zoo.artifact.files import read_file
from oscar_zoo.artifact.fit_block import MomentsFile
from oscar_zoo.artifact.manifest import FILE_NAME, Manifest
from oscar_zoo.artifact.names import ArtifactId
from oscar_zoo.artifact.outcome import Verified, why
from oscar_zoo.artifact.specs import ServingRecipe
from oscar_zoo.artifact.verify import verify_files
from oscar_zoo.compute import moments_file
from oscar_zoo.compute.assemble import Facts, assemble
from oscar_zoo.compute.fit import fit, needs_model, possible_methods
from oscar_zoo.compute.folder import check_target, write_folder
from oscar_zoo.compute.methods.table import TABLE, find_method
from oscar_zoo.compute.tags import calibration_tag
from oscar_zoo.errors import ComputeFailed
from oscar_zoo.evaluate.phases import Phase, Progress

PHASES = (Phase("fit", "", 6), Phase("write", "", 2))
"""Phases of `refit`; their seconds are only shares."""


def refit(
    moments: Path,
    method: str,
    recipe: ServingRecipe,
    *,
    model_name: str,
    target: Path | None,
    force: bool = False,
    progress: Progress = lambda done, total, phase: None,
) -> tuple[Path, Manifest]:
    """Fit `method` to a moments file and write the artifact.

    Args:
        moments: as `compute` wrote it.
        method: a key of `table.METHODS`.
        recipe: serving settings; `requires` is completed from the fit.
        model_name: first part of the artifact id.
        target: the artifact's folder; `None` for `./<Model>/<tag>`.
        force: replace an artifact that stands there.
        progress: called when each of `PHASES` begins.

    Raises:
        UsageError: no such method, or one that needs the model.
        MalformedFile, PathNotFound: the file is none of ours.
        ComputeFailed: it lacks what the method reads, or the result failed verification.
        OutputExists, StorageError: see `folder.check_target`.
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
    progress(0, 0, "fit")
    result = fit(sums, chosen)
    used = info.calibration
    tokens = (used.tokens_used if used else None) or sums.tokens
    tag = calibration_tag(tokens, len(info.sequences), recipe, info.model, chosen)
    artifact = ArtifactId(model_name, str(tag))
    target = target or Path(artifact.model) / artifact.tag
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
    outcome = verify_files(assemble(result, facts), strict=True)
    if not isinstance(outcome, Verified):
        raise ComputeFailed(
            f"the result failed its own verification: {why(outcome)}.", hint="nothing was written"
        )
    progress(0, 0, "write")
    data = read_file(moments, max_bytes=moments_file.MAX_BYTES)
    source = MomentsFile(sha256=sha256_hex(data), size=len(data), location=moments_file.FILE_NAME)
    files = assemble(result, replace(facts, moments=source))
    write_folder(target, files, force=force)
    return target, Manifest.from_bytes(files[FILE_NAME])
