"""What `PATH|NAME` on a command line means, for every command that takes one."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from oscar_zoo.artifact.manifest import FILE_NAME
from oscar_zoo.artifact.names import Reference
from oscar_zoo.artifact.outcome import Check, DigestMismatch, Outcome
from oscar_zoo.artifact.specs import Geometry
from oscar_zoo.errors import ArtifactNotFound, DigestMismatchError, PathNotFound, UsageError

WANTED = "give a rotation file, or a folder that holds a K/V pair"


def looks_like_path(text: str) -> bool:
    """Whether `text` can only be meant as a path: it exists, or it is written like one."""
    return _written_as_path(text) or text.endswith(".pt") or os.path.lexists(text)


def existing_path(text: str) -> Path:
    """The file or folder `text` names: a manifest means its folder, a link to a folder the folder itself.

    Raises:
        PathNotFound: nothing is there.
        UsageError: a pipe, a device or a socket.
    """
    path = Path(text).expanduser()
    if path.is_symlink() and not path.exists():
        raise PathNotFound(f"{text} is a symbolic link that leads nowhere.", hint=f"see where: ls -l {text}")
    if not path.exists():
        raise PathNotFound.for_path(text)
    if path.is_dir():
        return path.resolve() if path.is_symlink() else path
    if not path.is_file():
        raise UsageError(f"{text} is neither a file nor a folder.", hint=WANTED)
    return path.parent if path.name == FILE_NAME else path


def artifact_name(text: str) -> Reference:
    """The reference that `text` is, for commands that take names only; raises `UsageError` for a path."""
    if _written_as_path(text):
        raise UsageError(f"{text} is a path; this takes a name.", hint=f"oscar-zoo verify {shlex.quote(text)}")
    return Reference.parse(text)


def model_folder(text: str) -> Path | None:
    """The folder that `text` names, if it holds a model and no artifact."""
    path = Path(text).expanduser()
    if not (path / "config.json").is_file() or (path / FILE_NAME).exists():
        return None
    from oscar_zoo.artifact.verify import find_artifacts

    return None if find_artifacts(path) else path


def wanted_reference(text: str) -> Reference:
    """The artifact that `text` asks for: a name, or a folder with a model, whose name is meant; raises `UsageError`."""
    if model_folder(text) is None:
        return artifact_name(text)
    from oscar_zoo.cli.models import choose_model

    return Reference(choose_model(text).name)


def artifact_folders(path: Path) -> list[Path]:
    """The folders of artifacts at and below `path`; raises `PathNotFound` when there are none."""
    from oscar_zoo.artifact.verify import find_artifacts

    found = find_artifacts(path)
    if not found:
        raise PathNotFound(f"no rotation files in {path}.", hint=WANTED)
    return found


def _written_as_path(text: str) -> bool:
    return text.startswith((".", "/", "~")) or text.endswith("/")


def verify_targets(
    targets: Sequence[str], *, model: str | None, digest: str | None, strict: bool
) -> list[tuple[str, Outcome]]:
    """Verify every target; a tree gives one result per artifact in it.

    Raises:
        PathNotFound, ArtifactNotFound, UsageError: a target that means nothing.
    """
    geometry = model_geometry(model) if model else None
    results: list[tuple[str, Outcome]] = []
    for text in targets:
        if looks_like_path(text):
            results += _verify_tree(existing_path(text), geometry, digest, strict)
        else:
            results.append(_verify_installed(text, geometry, strict))
    return results


def _verify_tree(path: Path, geometry: Geometry | None, digest: str | None, strict: bool) -> list[tuple[str, Outcome]]:
    from oscar_zoo.artifact.verify import verify_path

    found = [path] if path.is_file() else artifact_folders(path)
    if digest is not None and len(found) > 1:
        raise UsageError(f"--digest goes with one artifact, {path} holds {len(found)}.")
    return [
        (
            str(item),
            verify_path(item, expected_digest=digest, geometry=geometry or geometry_from_path(item), strict=strict),
        )
        for item in found
    ]


def _verify_installed(text: str, geometry: Geometry | None, strict: bool) -> tuple[str, Outcome]:
    from oscar_zoo.artifact.verify import verify_files
    from oscar_zoo.registry.catalog import recipe_for
    from oscar_zoo.registry.installed import find_installed
    from oscar_zoo.registry.store import Store

    store = Store()
    record = find_installed(Reference.parse(text), store)
    if record is None:
        raise ArtifactNotFound(
            f"no file, folder or installed artifact is called {text!r}.", hint=f"fetch it: oscar-zoo pull {text}"
        )
    try:
        stored = store.open(record.digest, record.id)
    except DigestMismatchError as error:
        return record.id.reference, DigestMismatch(
            error.what, error.want, error.got, (Check("bytes", "failed", error.message),)
        )
    recipe = recipe_for(record.id.model)
    known = geometry or (recipe.geometry if recipe else None)
    outcome = verify_files(
        stored.payload, manifest=stored.manifest, expected=record.files, geometry=known, strict=strict
    )
    return record.id.reference, outcome


def geometry_from_path(path: Path) -> Geometry | None:
    """Geometry of the model whose recipe is named by a folder of `path`, as in `<Model>/<tag>/file`."""
    from oscar_zoo.registry.catalog import recipe_for

    for part in (path, *path.absolute().parents[:3]):
        recipe = recipe_for(part.name)
        if recipe is not None:
            return recipe.geometry
    return None


def model_geometry(model: str) -> Geometry:
    """Geometry of a model given as recipe name, hub id or folder with a `config.json`.

    Raises:
        UsageError: the model is unknown and is no folder.
    """
    from oscar_zoo.registry.catalog import Catalog

    recipe = Catalog.packaged().recipe(model)
    if recipe is not None:
        return recipe.geometry
    if Path(model).is_dir():
        from oscar_zoo.evaluate.models import inspect_model

        return inspect_model(model).geometry
    close = Catalog.packaged().close_matches(model)
    raise UsageError(f"no model is called {model!r}.", hint=f"did you mean {close[0]}?" if close else "oscar-zoo list")
