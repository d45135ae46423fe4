"""Verify files, folders, trees of artifacts, and artifacts of the local store."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypedDict

from oscar_zoo.app.namesakes import looking_up
from oscar_zoo.app.progress import SILENT, Observer
from oscar_zoo.app.targets import NameTarget, PathTarget, Target, parse
from oscar_zoo.artifact.names import parse_digest
from oscar_zoo.artifact.outcome import Outcome
from oscar_zoo.artifact.specs import Geometry
from oscar_zoo.errors import UsageError
from oscar_zoo.registry.signatures import SignatureWish
from oscar_zoo.registry.verification import (
    Checked,
    check_installed,
    check_path,
    model_geometry,
    one_artifact,
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
        signing: whether a signature is required, and keys that are known.
    """

    targets: tuple[Target, ...]
    model: str | Path | None = None
    digest: str | None = None
    strict: bool = False
    signing: SignatureWish = field(default_factory=SignatureWish)


class _Options(TypedDict):
    geometry: Geometry | None
    digest: str | None
    strict: bool
    signing: SignatureWish


def verify_all(request: VerifyRequest, observer: Observer = SILENT) -> tuple[Checked, ...]:
    """Verify every target; a tree gives one result for each artifact in it.

    Raises:
        PathNotFound, ArtifactNotFound: there is no such thing.
        UsageError: `digest` with several artifacts, an unknown `model`, a `digest` or key that is
            none, or a required signature of a single file.
    """
    if request.digest is not None and len(request.targets) > 1:
        raise UsageError("--digest goes with exactly one target.")
    digest = parse_digest(request.digest) if request.digest is not None else None
    geometry = _geometry(request.model) if request.model is not None else None
    results: list[Checked] = []
    options = _Options(
        geometry=geometry, digest=digest, strict=request.strict, signing=request.signing
    )
    for target in request.targets:
        if isinstance(target, NameTarget):
            with looking_up(target, observer):
                results.append(check_installed(target.reference, **options))
        else:
            results += check_path(target.path, **options)
    return tuple(results)


def verify(
    target: str | Path,
    *,
    model: str | Path | None = None,
    digest: str | None = None,
    strict: bool = False,
    require_signature: bool = False,
    keys: Sequence[str | Path] = (),
) -> Outcome:
    """Check a rotation file, a folder with a K/V pair, or an installed artifact by name.

    Args:
        target: a `Path`, or a text as on the command line: the name of something pulled before,
            unless it begins with `.`, `/` or `~`, ends in `/`, or names a file.
        model: name of the zoo, or folder of the model, whose geometry must fit; default what the
            folder names say.
        digest: what the artifact must have, `sha256:<64 hex>`.
        strict: apply the rules of publishing.
        require_signature: reject it without a valid signature of a known key.
        keys: PEM files of public keys that are known besides the hub's and those of the package.

    Returns:
        `Verified`, `Rejected`, `DigestMismatch`, `Unsupported` or `Unreadable`: a value, not an
            exception.

    Raises:
        PathNotFound, ArtifactNotFound: there is no such thing.
        UsageError: a tree with several artifacts, an unknown `model`, or a `digest` that is none.
    """
    parsed = parse(target)
    if not isinstance(parsed, NameTarget):
        parsed = PathTarget(parsed.text, one_artifact(parsed.path))
    signing = SignatureWish(require_signature, tuple(map(Path, keys)))
    return verify_all(VerifyRequest((parsed,), model, digest, strict, signing))[0].outcome


def _geometry(model: str | Path) -> Geometry:
    from oscar_zoo.models.folder_geometry import geometry_of_folder

    return model_geometry(model, geometry_of_folder)
