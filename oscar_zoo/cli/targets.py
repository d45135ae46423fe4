"""What `PATH|NAME` on a command line means, for every command that takes one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from oscar_zoo.artifact.names import Reference
from oscar_zoo.artifact.outcome import Outcome
from oscar_zoo.artifact.specs import Geometry
from oscar_zoo.errors import ArtifactNotFound, PathNotFound, UsageError


def looks_like_path(text: str) -> bool:
    """Whether `text` can only be meant as a path: it exists, or it is written like one."""
    path = Path(text).expanduser()
    return path.exists() or path.is_symlink() or text.startswith((".", "/", "~")) or text.endswith((".pt", "/"))


def existing_path(text: str) -> Path:
    """The path `text` names; raises `PathNotFound`."""
    path = Path(text).expanduser()
    if not path.exists() and not path.is_symlink():
        raise PathNotFound.for_path(text)
    return path


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
    from oscar_zoo.artifact.verify import find_artifacts, verify_path

    found = [path] if path.is_file() else find_artifacts(path)
    if not found:
        raise PathNotFound(f"no rotation files in {path}.", hint="give a .pt file or a folder that holds some")
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
        raise ArtifactNotFound(f"no artifact called {text!r} is installed.", hint=f"fetch it: oscar-zoo pull {text}")
    stored = store.open(record.digest, record.id)
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
