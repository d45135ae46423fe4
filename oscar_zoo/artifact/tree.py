"""A folder of artifacts, laid out like the zoo (`<Model>/<tag>/files`): find those of a model.

A model is called by its hub id, by its name, or by the folder it lies in; the organisation may be
left out. Names are compared without case. An `oscar.json` that names the model counts like a folder
name.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from oscar_zoo.artifact.files import read_file
from oscar_zoo.artifact.manifest import FILE_NAME, STATISTICS_NAME, SUFFIX, Manifest
from oscar_zoo.artifact.names import CACHED, is_path, path_text
from oscar_zoo.artifact.pairing import role_of_name
from oscar_zoo.errors import (
    AmbiguousName,
    ArtifactNotFound,
    OscarZooError,
    PathNotFound,
    StorageError,
)

_SHOWN = 8
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".gguf")


def find_artifacts(path: Path) -> list[Path]:
    """Folders that directly hold rotation files or a manifest, sorted: `path` and those below.

    Hidden folders and symbolic links are skipped, and so are folders that vanish meanwhile. A file,
    or a folder that does not exist, holds none.
    """
    if not path.is_dir():
        return []
    found, todo = [], [path]
    while todo:
        folder = todo.pop()
        try:
            entries = [entry for entry in folder.iterdir() if not entry.is_symlink()]
        except FileNotFoundError:
            continue  # it went away after its parent was listed
        except OSError as error:
            raise StorageError(
                f"cannot read {folder}: {error.strerror}.",
                hint="check its permissions, or name a folder below it",
            ) from None
        if _holds_artifact(folder, entries):
            found.append(folder)
        todo += [entry for entry in entries if entry.is_dir() and not entry.name.startswith(".")]
    return sorted(found)


def is_artifact(folder: Path) -> bool:
    """Whether `folder` itself, not one below it, is among those of `find_artifacts`."""
    with suppress(OSError):  # what cannot be listed holds nothing that anybody could read
        return _holds_artifact(folder, [path for path in folder.iterdir() if not path.is_symlink()])
    return False


def artifact_of_model(tree: Path, model: str) -> Path:
    """The folder of the one artifact for `model` at or below `tree`.

    Args:
        model: `NAME`, `ORG/NAME`, or the path of a model's folder.
    """
    if not tree.is_dir():
        raise PathNotFound.for_path(path_text(tree), "folder of rotations")
    found = find_artifacts(tree)
    if not found:
        raise PathNotFound(
            f"no rotation files in {path_text(tree)}.",
            hint="its layout is <Model>/<tag>/k_rotation.pt",
        )
    return choose_artifact(tree, found, model)


def choose_artifact(tree: Path, found: Sequence[Path], model: str) -> Path:
    """The one of the folders `found` in `tree` that is for `model`; as `artifact_of_model`."""
    if tree in found:
        return tree
    model_id = hub_id(model)
    named = {folder: _names(folder) for folder in found}
    mine = [folder for folder in found if "/" in model_id and model_id in named[folder]]
    mine = mine or [
        folder for folder in found if _base(model_id) in {_base(name) for name in named[folder]}
    ]
    if len(mine) == 1:
        return mine[0]
    if mine:
        raise AmbiguousName.for_name(_last(model), [path_text(folder) for folder in mine])
    shown = [str(folder.relative_to(tree)) for folder in found]
    more = f" and {len(shown) - _SHOWN} more" if len(shown) > _SHOWN else ""
    raise ArtifactNotFound(
        f"no artifact in {tree} is for {_last(model)}: it has {', '.join(shown[:_SHOWN])}{more}.",
        hint=f"if one of them fits the model, give its folder: {path_text(found[0])}",
    )


def hub_id(model: str) -> str:
    """The name of a model in lower case: `org/name` or `name`.

    A folder is called by its name, and a cached model by its id.
    """
    path = Path(model).expanduser()
    if not path.is_dir() and not is_path(model):
        return model.casefold()
    path = path.resolve()
    for part in (path, *path.parents):
        if part.name.startswith(CACHED):
            return part.name.removeprefix(CACHED).replace("--", "/", 1).casefold()
    return path.name.casefold()


def _holds_artifact(folder: Path, entries: Sequence[Path]) -> bool:
    """Whether the `entries` of `folder` that are no links have a manifest or rotation files.

    Content decides what a rotation file is, so any `.pt` file may be one. Beside a model only those
    that are called K or V count: training leaves an `optimizer.pt` and a `scheduler.pt` there.
    """
    names = {
        entry.name
        for entry in entries
        if (entry.suffix == SUFFIX or entry.name == FILE_NAME) and entry.is_file()
    }
    if not names or FILE_NAME in names or any(map(role_of_name, names)):
        return bool(names)
    return not _is_model(folder)


def _is_model(folder: Path) -> bool:
    """Whether `folder` has the `config.json` of a model, and weights. Links count, because hubs
    keep models as links."""
    try:
        config = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        return False
    if not isinstance(config, dict) or not config.keys() & {"architectures", "model_type"}:
        return False
    return any(
        path.suffix in WEIGHT_SUFFIXES and path.name != STATISTICS_NAME for path in folder.iterdir()
    )


def _names(folder: Path) -> set[str]:
    """The model's name in the manifest of `folder`, in lower case."""
    folder = folder.resolve()
    names = {folder.name, folder.parent.name}
    with suppress(OscarZooError):  # no manifest, or a broken one: the folders' names remain
        manifest = Manifest.from_bytes(read_file(folder / FILE_NAME))
        names |= {manifest.artifact_id.model, manifest.model.id}
        names |= {other.id for other in manifest.model.compatible_with}
    return {name.casefold() for name in names}


def _base(name: str) -> str:
    return name.rpartition("/")[2]


def _last(model: str) -> str:
    return model if not Path(model).is_dir() else Path(model).resolve().name
