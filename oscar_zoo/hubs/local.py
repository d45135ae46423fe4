"""A hub in a folder: `<Model>/<tag>/files`, with or without `oscar.json`; the layout of the public rotation hub.

Publishing stages the files in the same file system and renames the whole folder to its place, so a version is absent
or complete, and two publishers cannot mix. Links and unsafe names are never followed.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path

from oscar_zoo.artifact import durable
from oscar_zoo.artifact.digest import sha256_hex
from oscar_zoo.artifact.names import ArtifactId, check_part
from oscar_zoo.artifact.reader import read_file
from oscar_zoo.artifact.verify import MAX_PAYLOAD_BYTES
from oscar_zoo.errors import ArtifactNotFound, InvalidName, MalformedFile, PathNotFound, VersionExists
from oscar_zoo.hubs.base import HubFile, Progress


class LocalHub:
    """A hub whose artifacts lie in the folder `root`.

    Args:
        root: the folder. Reading never creates it; the first commit does.
        must_exist: whether reading a missing `root` is an error, or an empty hub.
    """

    def __init__(self, root: Path, *, must_exist: bool = True) -> None:
        self.root = root.absolute()
        self._must_exist = must_exist

    @property
    def name(self) -> str:
        """`file:` and the folder."""
        return f"file:{self.root}"

    def artifacts(self) -> tuple[ArtifactId, ...]:
        """Every artifact, sorted. Links and names outside the grammar are no artifacts.

        Raises:
            PathNotFound: the folder does not exist.
        """
        with durable.storage_errors(f"cannot list {self.name}"):
            if not self.root.is_dir():
                if self._must_exist or self.root.exists():
                    raise PathNotFound.for_path(self.root, "folder for a hub")
                return ()
            return tuple(
                sorted(
                    ArtifactId(model, tag)
                    for model in _folders(self.root)
                    for tag in _folders(self.root / model)
                    if _has_entries(self.root / model / tag)
                )
            )

    def files(self, artifact: ArtifactId) -> tuple[HubFile, ...]:
        """The files of `artifact` with size and sha256, sorted. Hidden files are left out; links are refused."""
        folder = self._folder(artifact)
        return tuple(
            HubFile(name, len(data), sha256_hex(data))
            for name in _plain_files(folder)
            for data in (read_file(folder / name, max_bytes=MAX_PAYLOAD_BYTES),)
        )

    def fetch(self, artifact: ArtifactId, path: str, *, limit: int, progress: Progress | None = None) -> bytes:
        """The bytes of one file; see `Hub.fetch`."""
        folder = self._folder(artifact)
        data = read_file(folder / check_part(path, "file name"), max_bytes=limit)
        if progress is not None:
            progress(path, len(data), len(data))
        return data

    def commit(self, artifact: ArtifactId, files: Mapping[str, bytes]) -> bool:
        """Publish `files`; see `Hub.commit`."""
        for name in files:
            check_part(name, "file name")
        with durable.storage_errors(f"cannot publish to {self.name}"):
            durable.make_folders(self.root)
            durable.sweep(self.root)
            spelled = self._spelled(artifact)
            if spelled is not None:
                return self._compare(spelled, artifact, files)
            model = self.root / artifact.model
            durable.make_folders(model)
            with durable.staged_folder(self.root) as staged:
                durable.write_files(staged, files)
                if durable.move_into_place(staged, model / artifact.tag):
                    return True
            return self._compare(artifact, artifact, files)

    def _compare(self, existing: ArtifactId, artifact: ArtifactId, files: Mapping[str, bytes]) -> bool:
        there = {file.path: file.sha256 for file in self.files(existing)}
        here = {name: sha256_hex(data) for name, data in files.items()}
        if there == here and existing == artifact:
            return False
        changed = sorted(name for name in there.keys() | here.keys() if there.get(name) != here.get(name))
        what = f"with other content ({', '.join(changed)})" if changed else f"spelled {existing}"
        raise VersionExists(
            f"{artifact} is already published on {self.name} {what}.",
            hint="a published version never changes: give the new one another tag",
        )

    def _spelled(self, artifact: ArtifactId) -> ArtifactId | None:
        return next((other for other in self.artifacts() if other.key == artifact.key), None)

    def _folder(self, artifact: ArtifactId) -> Path:
        folder = self.root
        for part in (artifact.model, artifact.tag):
            folder = folder / check_part(part)
            try:
                mode = folder.lstat().st_mode
            except (FileNotFoundError, NotADirectoryError):
                raise ArtifactNotFound(
                    f"{artifact} is not on {self.name}.", hint=f"see what is there: oscar-zoo list --hub {self.name}"
                ) from None
            if stat.S_ISLNK(mode):
                raise MalformedFile("file.link", f"{folder} is a symbolic link; links are not followed.")
        return folder


def _folders(folder: Path) -> list[str]:
    with os.scandir(folder) as entries:
        return [entry.name for entry in entries if entry.is_dir(follow_symlinks=False) and _is_safe(entry.name)]


def _has_entries(folder: Path) -> bool:
    with os.scandir(folder) as entries:
        return next(entries, None) is not None


def _plain_files(folder: Path) -> list[str]:
    names = []
    for entry in os.scandir(folder):
        if entry.name.startswith("."):
            continue
        if entry.is_symlink():
            raise MalformedFile("file.link", f"{folder / entry.name} is a symbolic link; links are not followed.")
        if not _is_safe(entry.name):
            raise MalformedFile("file.name", f"{folder} has a file with the name {entry.name[:120]!r}.")
        if entry.is_file(follow_symlinks=False):
            names.append(entry.name)
    return sorted(names)


def _is_safe(name: str) -> bool:
    try:
        check_part(name)
    except InvalidName:
        return False
    return True
