"""Verify files, folders, trees of artifacts, and artifacts of the local store. Needs no torch."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from oscar_zoo import errors
from oscar_zoo.artifact.manifest import FILE_NAME
from oscar_zoo.artifact.names import Reference, is_path, parse_digest, path_text
from oscar_zoo.artifact.outcome import (
    Check,
    DigestMismatch,
    Outcome,
    SignatureReport,
    Unreadable,
    VerifyReport,
)
from oscar_zoo.artifact.specs import Geometry
from oscar_zoo.next_step import Pull
from oscar_zoo.observer import SILENT, Observer
from oscar_zoo.registry.catalog import Catalog, recipe_for
from oscar_zoo.registry.known_names import close_names, find_stored, status_warnings
from oscar_zoo.registry.params import Signed, VerifyParams
from oscar_zoo.registry.signatures import signature_in, signature_of, with_signature
from oscar_zoo.registry.store import Store, StoredArtifact
from oscar_zoo.registry.targets import NameTarget, looking_up, parse, refusal
from oscar_zoo.verb import python_call

WANTED = "give a rotation file, or a folder that holds a K/V pair"


@dataclass(frozen=True)
class Expected:
    """What an artifact is held against; without `geometry`, that of the model which it names."""

    geometry: Geometry | None = None
    digest: str | None = None
    strict: bool = False
    signing: Signed = field(default_factory=Signed)

    def of(
        self,
        files: Mapping[str, bytes],
        signature: SignatureReport | None,
        known: Geometry | None,
        **more: Any,
    ) -> Outcome:
        from oscar_zoo.artifact.verify import verify_files

        verify = partial(
            verify_files,
            files,
            expected_digest=self.digest,
            geometry=self.geometry or known,
            strict=self.strict,
            **more,
        )
        return with_signature(verify, signature, self.signing)


def run(params: VerifyParams, observer: Observer = SILENT) -> VerifyReport:
    from oscar_zoo.models.config_file import geometry_of_folder

    named = params.targets if isinstance(params.targets, tuple) else (params.targets,)
    targets = [parse(target) for target in named]
    if params.digest is not None and len(targets) > 1:
        raise errors.UsageError("--digest goes with exactly one target.")
    expected = Expected(
        _model_geometry(params.model, geometry_of_folder) if params.model is not None else None,
        parse_digest(params.digest) if params.digest is not None else None,
        params.strict,
        params,
    )
    results: list[Outcome] = []
    for target in targets:
        if isinstance(target, NameTarget):
            with looking_up(target, observer):
                results.append(_check_installed(target.reference, expected))
            continue
        path, found = artifacts_at(target.path)
        if expected.digest is not None and len(found) > 1:
            text = f"--digest goes with one artifact, {path} holds {len(found)}."
            raise errors.UsageError(text, hint="name one of them")
        results += [check_one(item, expected) for item in found]
    return VerifyReport.of(results)


def _one(params: VerifyParams) -> Outcome:
    """Check a rotation file, a folder with a K/V pair, or an installed artifact by name.

    Returns:
        `Verified`, `Rejected`, `DigestMismatch`, `Unsupported` or `Unreadable`: a value, not an
            exception.
    """
    assert not isinstance(params.targets, tuple)
    target = parse(params.targets)
    if not isinstance(target, NameTarget):
        params = replace(params, targets=one_artifact(target.path))
    return run(params).results[0]


verify = python_call(VerifyParams, _one)


def check_one(path: Path, expected: Expected | None = None) -> Outcome:
    from oscar_zoo.artifact.artifact_folder import read_path

    expected, label = expected or Expected(), path_text(path)
    if path.is_file() and expected.signing.require_signature:
        raise errors.UsageError(
            f"{label} is one file, and a signature is of an artifact.", hint="name its folder"
        )
    files = read_path(path)
    if not isinstance(files, dict):
        return replace(files, label=label)
    signature = None if path.is_file() else signature_in(path, files, expected.signing)
    outcome = expected.of(files, signature, _geometry_from_path(path), what=str(path))
    return replace(outcome, label=label)


def _check_installed(reference: Reference, expected: Expected) -> Outcome:
    """Verify what `reference` means in the local store; damage is an outcome, no exception."""
    store = Store()
    record = find_stored(reference, store)
    if record is None:
        close = close_names(reference.name)
        raise errors.ArtifactNotFound(
            f"{reference} is not in the store.",
            suggestions=close,
            next_step=None if close else Pull(str(reference)),
        )
    label = record.id.reference
    outcome: Outcome
    try:
        stored = store.open(record.digest, record.id)
    except errors.DigestMismatchError as error:
        failed = Check("bytes", "failed", error.message)
        outcome = DigestMismatch(error.what, error.want, error.got, (failed,))
    except errors.MalformedFile as error:
        outcome = Unreadable(error.message, label)
    else:
        outcome = verify_stored(stored, expected, signature_of(stored, expected.signing))
    remarks = status_warnings(record)
    return replace(outcome, label=label, fetch_again=record.fetch_again, remarks=remarks)


def verify_stored(
    stored: StoredArtifact,
    expected: Expected | None = None,
    signature: SignatureReport | None = None,
) -> Outcome:
    """Verify an entry that `Store.open` returned, with the geometry the zoo knows for its model."""
    record = stored.record
    return (expected or Expected()).of(
        stored.payload,
        signature,
        _geometry_of(record.id.model),
        manifest=stored.manifest,
        expected=record.files,
        what=record.id.reference,
    )


def existing_path(path: Path) -> Path:
    """What to verify for `path`: its folder for a manifest, its target for a linked artifact."""
    text = path_text(path)
    if path.is_symlink() and not path.exists():
        said = f"{text} is a symbolic link that leads nowhere."
        raise errors.PathNotFound(said, hint=f"see where: ls -l {shlex.quote(text)}")
    if not path.exists():
        raise errors.PathNotFound.for_path(text)
    if path.is_dir():
        from oscar_zoo.artifact.artifact_folder import is_artifact

        return path.resolve() if path.is_symlink() and is_artifact(path) else path
    if not path.is_file():
        raise errors.UsageError(f"{text} is neither a file nor a folder.", hint=WANTED)
    return path.parent if path.name == FILE_NAME else path


def artifacts_at(path: Path) -> tuple[Path, list[Path]]:
    """A path, and the artifacts at and below it, one at least; a file is one itself."""
    from oscar_zoo.artifact.artifact_folder import find_artifacts, refuse_links

    path = existing_path(path)
    found = [path] if path.is_file() else find_artifacts(path)
    if not found:
        refuse_links(path)
        message = f"no rotation files in {path_text(path)}."
        raise refusal(path, errors.PathNotFound(message, hint=WANTED))
    return path, found


def one_artifact(path: Path) -> Path:
    """The file `path`, or the folder of the one artifact at or below it."""
    path, found = artifacts_at(path)
    if path not in found and len(found) > 1:
        text, one = path_text(path), shlex.quote(path_text(found[0]))
        hint = f"name one, for example {one}"
        raise errors.UsageError(f"{text} holds {len(found)} artifacts.", hint=hint)
    return path if path in found else found[0]


def _geometry_of(model: str) -> Geometry | None:
    recipe = recipe_for(model)
    return recipe.geometry if recipe else None


def _geometry_from_path(path: Path) -> Geometry | None:
    """Of the model whose recipe a folder of `path` names, as in `<Model>/<tag>/file`."""
    parts = (path, *path.absolute().parents[:3])
    return next(filter(None, (_geometry_of(part.name) for part in parts)), None)


def _model_geometry(model: str | Path, describe: Callable[[Path], Geometry]) -> Geometry:
    path = Path(model).expanduser()
    known = _geometry_of(model) if isinstance(model, str) else None
    if known is not None:
        return known
    if path.exists() or isinstance(model, Path) or is_path(model):
        return describe(path)
    close = Catalog.packaged().close_matches(model)
    raise errors.UsageError(
        f"no model is called {model!r}.",
        hint=None if close else "give a folder with a config.json, or a name of: oscar-zoo list",
        suggestions=close,
    )
