"""Copy a stored artifact to plain files in a project folder, in the layout of the public rotation
hub.

`<folder>/<Model>/<tag>/` holds copies, never links into the store, so changes to them cannot damage
the store. The scripts of the OSCAR authors take that folder as `ROT_DIR`.
"""

from __future__ import annotations

from pathlib import Path

from oscar_zoo.artifact import durable
from oscar_zoo.artifact.files import MAX_PAYLOAD_BYTES, read_file
from oscar_zoo.errors import MalformedFile, OutputExists, PathNotFound
from oscar_zoo.registry.store import StoredArtifact


def export(artifact: StoredArtifact, folder: Path, *, replace: bool = False) -> Path:
    """Copy the files of `artifact`, hashed when it was opened, into `folder`.

    Args:
        replace: whether a folder with other content may be replaced.
    """
    identity = artifact.record.id
    target = folder.expanduser().absolute() / identity.model / identity.tag
    with durable.storage_errors(f"cannot write {target}"):
        if _has(target, artifact):
            return target
        durable.make_folders(target.parent)
        with durable.staged_folder(target.parent) as staged:
            durable.write_files(staged, artifact.files)
            while not durable.move_into_place(staged, target):
                if _has(target, artifact):
                    return target
                if not replace:
                    raise OutputExists(
                        f"{target} exists with other content.",
                        hint="move it away, or replace it: --force",
                    )
                if target.is_dir() and durable.exchange(staged, target):
                    return target
                away = durable.temp_path(target.parent)
                target.rename(away)
                durable.remove_tree(away) if away.is_dir() else away.unlink()
    return target


def _has(target: Path, artifact: StoredArtifact) -> bool:
    """Whether `target` holds exactly the files of `artifact`."""
    if not target.is_dir() or {path.name for path in target.iterdir()} != set(artifact.files):
        return False
    try:
        found = {
            name: read_file(target / name, max_bytes=MAX_PAYLOAD_BYTES) for name in artifact.files
        }
    except (PathNotFound, MalformedFile):
        return False
    return found == dict(artifact.files)
