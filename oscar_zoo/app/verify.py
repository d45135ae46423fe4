"""Verify files, folders, trees of artifacts, and artifacts of the local store."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from oscar_zoo.app.progress import SILENT, Observer
from oscar_zoo.app.targets import NameTarget, Target, looking_up
from oscar_zoo.artifact.names import parse_digest
from oscar_zoo.artifact.specs import Geometry
from oscar_zoo.errors import UsageError
from oscar_zoo.registry.verification import (
    Checked,
    check_installed,
    check_path,
    existing_path,
    model_geometry,
)


@dataclass(frozen=True)
class VerifyRequest:
    """What to verify, and against what.

    Attributes:
        targets: each a path, or the name of an artifact that was pulled before.
        model: name of the zoo, or folder of the model, whose geometry must fit; without it, the
            model that a folder name says.
        digest: what the one artifact must have, `sha256:<64 hex>`; the prefix may be left out.
        strict: apply the rules of publishing.
    """

    targets: tuple[Target, ...]
    model: str | Path | None = None
    digest: str | None = None
    strict: bool = False


def verify(request: VerifyRequest, observer: Observer = SILENT) -> tuple[Checked, ...]:
    """Verify every target; a tree gives one result for each artifact in it.

    Raises:
        PathNotFound, ArtifactNotFound: there is no such thing.
        UsageError: `digest` with several artifacts, an unknown `model`, or a `digest` that is none.
    """
    if request.digest is not None and len(request.targets) > 1:
        raise UsageError("--digest goes with exactly one target.")
    digest = parse_digest(request.digest) if request.digest is not None else None
    geometry = _geometry(request.model) if request.model is not None else None
    results: list[Checked] = []
    for target in request.targets:
        if isinstance(target, NameTarget):
            with looking_up(target, observer):
                results.append(
                    check_installed(
                        target.reference, geometry=geometry, digest=digest, strict=request.strict
                    )
                )
        else:
            results += check_path(
                existing_path(target.path), geometry=geometry, digest=digest, strict=request.strict
            )
    return tuple(results)


def _geometry(model: str | Path) -> Geometry:
    from oscar_zoo.models.folder_geometry import geometry_of_folder

    return model_geometry(model, geometry_of_folder)
