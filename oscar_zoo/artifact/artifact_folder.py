"""Artifacts in folders: the files of one, read once and passed on as bytes, and those of a model in
a folder laid out like the zoo (`<Model>/<tag>/files`).

No link is followed, and names are judged before anything is read. A model is called by its hub id,
by its name, or by the folder it lies in; the organisation may be left out, and case does not count.
"""

from __future__ import annotations

import json
from collections.abc import Sequence, Set
from contextlib import suppress
from pathlib import Path, PurePosixPath
from shlex import quote
from typing import Any

from oscar_zoo.artifact import signature_file, strict_json
from oscar_zoo.artifact.files import MAX_ARTIFACT_BYTES, MAX_PAYLOAD_BYTES, read_file
from oscar_zoo.artifact.manifest import (
    FILE_NAME,
    SIGNATURE_NAME,
    STATISTICS_NAME,
    SUFFIX,
    Manifest,
    is_payload,
)
from oscar_zoo.artifact.names import cached_model, is_path, path_text
from oscar_zoo.artifact.outcome import Outcome, Rejected, Unreadable, Unsupported
from oscar_zoo.artifact.pairing import role_of_name
from oscar_zoo.artifact.verify import verify_files
from oscar_zoo.errors import (
    AmbiguousName,
    ArtifactNotFound,
    MalformedFile,
    OscarZooError,
    PathNotFound,
    StorageError,
)

_SHOWN = 8
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".gguf")


def verify_path(path: Path, **given: Any) -> Outcome:
    """Verify one rotation file, or a folder with one K/V pair; `given` as of `verify_files`."""
    files = read_path(path)
    return verify_files(files, what=str(path), **given) if isinstance(files, dict) else files


def read_path(path: Path) -> dict[str, bytes] | Outcome:
    """What `read_folder` reads of a folder, or one rotation file; what cannot be read is an
    outcome."""
    try:
        if path.is_dir():
            return read_folder(path)
        return {path.name: read_file(path, max_bytes=MAX_PAYLOAD_BYTES)}
    except (MalformedFile, StorageError) as error:
        return Unreadable(error.message, str(path), hint=error.hint)
    except OSError as error:
        return Unreadable(f"cannot read {path}: {error.strerror}", str(path))


def read_folder(folder: Path) -> dict[str, bytes] | Outcome:
    """The manifest and the files it lists, or without one a pair and its statistics; never a link.
    Names are judged before anything is read, so a folder of many files costs no memory."""
    if folder.is_symlink():
        raise MalformedFile("file.kind", f"{folder} is a symbolic link.")
    refuse_links(folder)
    names = {entry.name for entry in folder.iterdir() if is_payload(entry.name)}
    described = (folder / FILE_NAME).exists()
    if not described and (problem := _not_one_pair(folder, names)):
        return problem
    files: dict[str, bytes] = {}
    if described:
        files[FILE_NAME] = read_file(folder / FILE_NAME, max_bytes=strict_json.MAX_BYTES)
        manifest = Manifest.readable(files[FILE_NAME])  # stage `schema` says why it is none
        names |= {entry.path for entry in manifest.files} if manifest else set()
    left = MAX_ARTIFACT_BYTES
    for name in sorted(names):
        inside = [*PurePosixPath(name).parents][:-1]
        if any((folder / parent).is_symlink() for parent in inside):
            raise MalformedFile("file.kind", f"{name} lies behind a symbolic link.")
        try:
            files[name] = read_file(folder / name, max_bytes=min(MAX_PAYLOAD_BYTES, left))
        except PathNotFound:
            continue  # listed and absent: stage `bytes` says so
        left -= len(files[name])
    return files


def read_signature(folder: Path) -> bytes | None:
    try:
        return read_file(folder / SIGNATURE_NAME, max_bytes=signature_file.MAX_BYTES)
    except PathNotFound:
        return None


def other_files(folder: Path, names: Set[str]) -> list[str]:
    """Paths of what lies in `folder` and below and is not in `names`, without what a signature
    leaves out; at most one per folder below, because one is enough."""
    found, todo = [], [folder]
    while todo:
        place = todo.pop()
        for entry in sorted(place.iterdir()):
            path = entry.relative_to(folder).as_posix()
            if path in signature_file.NOT_SIGNED or path in names:
                continue
            if entry.is_dir() and not entry.is_symlink():
                todo.append(entry)
                continue
            found.append(path)
            break
    return found


def refuse_links(folder: Path) -> None:
    """Refuse a folder whose manifest or rotation files are symbolic links, and say how to copy what
    they lead to."""
    for path in sorted(folder.iterdir()):
        if path.is_symlink() and (path.name == FILE_NAME or is_payload(path.name)):
            text = path_text(folder)
            message = f"{path_text(path)} is a symbolic link, which is not followed."
            copy = f"cp -rL {quote(text)} {quote(f'{text}-copy')}"
            hint = f"copy the folder with what its links lead to: {copy}"
            raise MalformedFile("file.kind", message, hint=hint)


def _not_one_pair(folder: Path, payload: Set[str]) -> Outcome | None:
    names = sorted(name for name in payload if name.endswith(SUFFIX))
    if not payload:
        return Unreadable(f"no rotation files in {path_text(folder)}", str(folder))
    if len(names) == 2:
        return None
    if names and all(name.startswith("layer_") for name in names):
        return Unsupported(
            "mla_latent", "one file per layer: rotations of MLA latents cannot be served"
        )
    if len(names) < 2:
        seen = ", ".join(names) or "no rotation file"
        message = f"an artifact is a K file and a V file; here is only {seen}"
        path = min(payload) if len(payload) == 1 else None
        return Rejected("schema", "incomplete_pair", message, path)
    message = f"several pairs in one folder, name one file: {', '.join(names)}"
    return Rejected("schema", "ambiguous_pair", message)


def find_artifacts(path: Path) -> list[Path]:
    """Folders that directly hold rotation files or a manifest, sorted: `path` and those below.
    Hidden folders and symbolic links are skipped, and so are folders that vanish meanwhile."""
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
            hint = "check its permissions, or name a folder below it"
            raise StorageError(f"cannot read {folder}: {error.strerror}.", hint=hint) from None
        if _holds_artifact(folder, entries):
            found.append(folder)
        todo += [entry for entry in entries if entry.is_dir() and not entry.name.startswith(".")]
    return sorted(found)


def is_artifact(folder: Path) -> bool:
    with suppress(OSError):  # what cannot be listed holds nothing that anybody could read
        return _holds_artifact(folder, [path for path in folder.iterdir() if not path.is_symlink()])
    return False


def artifact_of_model(tree: Path, model: str) -> Path:
    """The folder of the one artifact at or below `tree` for `model`: a name or a model's folder."""
    if not tree.is_dir():
        raise PathNotFound.for_path(path_text(tree), "folder of rotations")
    found = find_artifacts(tree)
    if not found:
        message = f"no rotation files in {path_text(tree)}."
        raise PathNotFound(message, hint="its layout is <Model>/<tag>/k_rotation.pt")
    return choose_artifact(tree, found, model)


def choose_artifact(tree: Path, found: Sequence[Path], model: str) -> Path:
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
    """The name of a model in lower case; a folder is called by its name, a cached model by its
    id."""
    path = Path(model).expanduser()
    if not path.is_dir() and not is_path(model):
        return model.casefold()
    cached = cached_model(path.resolve())
    return (cached[0] if cached else path.resolve().name).casefold()


def _holds_artifact(folder: Path, entries: Sequence[Path]) -> bool:
    """Whether the `entries` of `folder` that are no links have a manifest or rotation files.
    Content decides what a rotation file is, so any `.pt` file may be one. Beside a model only those
    that are called K or V count: training leaves an `optimizer.pt` there."""
    names = {
        entry.name
        for entry in entries
        if (entry.suffix == SUFFIX or entry.name == FILE_NAME) and entry.is_file()
    }
    if not names or FILE_NAME in names or any(map(role_of_name, names)):
        return bool(names)
    return not _is_model(folder)


def _is_model(folder: Path) -> bool:
    """Whether `folder` has a model. Links count, because hubs keep models as links."""
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
