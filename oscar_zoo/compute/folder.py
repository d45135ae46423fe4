"""Writing an artifact folder in one step: everything beside the target first, then one rename.

The target is either as it was, or complete. Only a folder that holds an artifact and nothing else
is ever replaced, so a wrong path cannot destroy other files.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from oscar_zoo.artifact import durable, strict_json
from oscar_zoo.artifact.files import read_file
from oscar_zoo.artifact.manifest import FILE_NAME, Manifest
from oscar_zoo.artifact.names import ArtifactId, path_text
from oscar_zoo.errors import MalformedFile, OutputExists, UsageError
from oscar_zoo.models import config_file

MOMENTS_NAME = "moments.safetensors"
"""How the name of a moments file ends, and what manifests call it."""


def moments_beside(target: Path) -> Path:
    """The moments file that belongs to the artifact in `target`."""
    return target.with_name(f"{target.name}.{MOMENTS_NAME}")


def check_target(target: Path, *, force: bool) -> None:
    """Find out before the long work whether the result may be written to `target`. What killed runs
    left beside it goes, also when the target is refused; nothing else changes."""
    shown, hint = path_text(target), "choose another output folder"
    if target.is_symlink() and not target.exists():
        raise UsageError(f"{shown} is a link to nothing.", hint=hint)
    try:
        target.name.encode()
    except UnicodeEncodeError:
        raise UsageError(
            f"the name of {shown} is no UTF-8, and manifests hold it.", hint=hint
        ) from None
    durable.tidy(target.absolute().parent)
    with durable.storage_errors(f"cannot write {target}"):
        if target.is_dir():
            _check_replaceable(target, force=force)
        there = next(one for one in (target, *target.absolute().parents) if one.exists())
        if not there.is_dir():
            raise UsageError(f"{there} is a file, not a folder.", hint=hint)
        durable.check_creatable(target)


def default_target(artifact: ArtifactId) -> Path:
    """Where an artifact goes when the user names no folder: `./<Model>/<tag>`. The folder of a
    model stays as it is. Where a model lies in `./<Model>`, the artifact goes to
    `./<Model>-rotation/<tag>`, and where one lies in the current folder, beside that."""
    name, above = artifact.model, _default_parent()
    taken = above != Path() or _is_model(Path(name))
    return above / (f"{name}-rotation" if taken else name) / artifact.tag


def _default_parent() -> Path:
    return Path("..") if _is_model(Path()) else Path()


def _is_model(folder: Path) -> bool:
    return (folder / config_file.NAME).is_file()


def check_place(target: Path | None, *, force: bool) -> None:
    """`check_target`, or of the folder that `default_target` lies in where the user named none."""
    if target is not None:
        check_target(target, force=force)
        return
    here = _default_parent().resolve()
    with durable.storage_errors(f"cannot write {here}, and no --output-dir is given"):
        durable.check_writable(here)


def write_folder(target: Path, files: Mapping[str, bytes], *, force: bool) -> None:
    """Make `target` hold exactly `files`."""
    check_target(target, force=force)
    target = target.resolve()
    with durable.storage_errors(f"cannot write {target}"):
        durable.make_folders(target.parent)
        with durable.staged_folder(target.parent) as staged:
            durable.write_files(staged, files)
            moved = durable.move_into_place(staged, target)
            if not moved and not (force and _replace(staged, target)):
                raise OutputExists(
                    f"{target} appeared meanwhile.", hint="choose another output folder"
                )


def _check_replaceable(target: Path, *, force: bool) -> None:
    names, shown = {entry.name for entry in target.iterdir()}, path_text(target)
    if not names:
        return
    if FILE_NAME not in names:
        raise OutputExists(f"{shown} holds other files.", hint="choose another output folder")
    if not force:
        raise OutputExists(
            f"{shown} already holds an artifact.",
            hint="replace it with --force, or choose a folder",
        )
    try:
        content = read_file(target / FILE_NAME, max_bytes=strict_json.MAX_BYTES)
        manifest = Manifest.from_bytes(content)
    except MalformedFile as error:
        raise OutputExists(
            f"{shown}: {error.message}", hint="remove the folder, or choose another"
        ) from None
    if others := sorted(names - {FILE_NAME, *(file.path for file in manifest.files)}):
        raise OutputExists(
            f"{shown} also holds {others[0]}, which is no part of its artifact.",
            hint="move it away",
        )


def _replace(staged: Path, target: Path) -> bool:
    """Put `staged` in place of the artifact `target`, which comes back if that fails."""
    if durable.exchange(staged, target):
        return True
    old = durable.temp_path(target.parent)
    target.rename(old)
    try:
        return durable.move_into_place(staged, target)
    finally:
        if target.exists():
            durable.remove_tree(old)
        else:
            old.rename(target)
