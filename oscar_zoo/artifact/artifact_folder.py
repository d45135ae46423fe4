"""An artifact in a folder: its files, read once and passed on as bytes.

No link is followed, and names are judged before anything is read.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from pathlib import Path, PurePosixPath
from shlex import quote

from oscar_zoo.artifact import signature_file, strict_json
from oscar_zoo.artifact.checks import Problem
from oscar_zoo.artifact.digest import FileDigest
from oscar_zoo.artifact.files import MAX_ARTIFACT_BYTES, MAX_PAYLOAD_BYTES, read_file
from oscar_zoo.artifact.manifest import (
    FILE_NAME,
    SIGNATURE_NAME,
    SUFFIX,
    Manifest,
    is_payload,
)
from oscar_zoo.artifact.names import path_text
from oscar_zoo.artifact.outcome import Outcome, Unreadable, Unsupported
from oscar_zoo.artifact.specs import Geometry
from oscar_zoo.artifact.stages import rejected
from oscar_zoo.artifact.verify import verify_files
from oscar_zoo.errors import MalformedFile, PathNotFound, StorageError


def verify_path(
    path: Path,
    *,
    expected_digest: str | None = None,
    expected: Sequence[FileDigest] | None = None,
    geometry: Geometry | None = None,
    strict: bool = False,
    max_bytes: int = MAX_PAYLOAD_BYTES,
) -> Outcome:
    """Verify one rotation file, or an artifact folder that holds one K/V pair.

    A manifest may be absent.

    Args:
        path: file or folder; not a symbolic link.
        expected_digest: digest of the artifact, or sha256 of the one file; `sha256:` may be left
            out.
    """
    files = read_path(path, max_bytes)
    if not isinstance(files, dict):
        return files
    return verify_files(
        files,
        expected=expected,
        expected_digest=expected_digest,
        geometry=geometry,
        what=str(path),
        strict=strict,
    )


def read_path(path: Path, max_bytes: int = MAX_PAYLOAD_BYTES) -> dict[str, bytes] | Outcome:
    """One rotation file, or what `read_folder` reads of a folder; what cannot be read is an
    outcome.
    """
    try:
        if path.is_dir():
            return read_folder(path, max_bytes)
        return {path.name: read_file(path, max_bytes=max_bytes)}
    except (MalformedFile, StorageError) as error:
        return Unreadable(error.message, str(path), hint=error.hint)
    except OSError as error:
        return Unreadable(f"cannot read {path}: {error.strerror}", str(path))


def read_folder(folder: Path, max_bytes: int = MAX_PAYLOAD_BYTES) -> dict[str, bytes] | Outcome:
    """The manifest and the files it lists, or without one a pair and its statistics; never a link.

    Names are judged before anything is read, so a folder of many files costs no memory.
    """
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
        parents = [
            folder.joinpath(*PurePosixPath(name).parts[:depth])
            for depth in range(1, name.count("/") + 1)
        ]
        if any(parent.is_symlink() for parent in parents):
            raise MalformedFile("file.kind", f"{name} lies behind a symbolic link.")
        try:
            files[name] = read_file(folder / name, max_bytes=min(max_bytes, left))
        except PathNotFound:
            continue  # listed and absent: stage `bytes` says so
        left -= len(files[name])
    return files


def read_signature(folder: Path) -> bytes | None:
    """The signature file in `folder`, or `None` where there is none."""
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
    they lead to.
    """
    for path in sorted(folder.iterdir()):
        if path.is_symlink() and (path.name == FILE_NAME or is_payload(path.name)):
            text = path_text(folder)
            raise MalformedFile(
                "file.kind",
                f"{path_text(path)} is a symbolic link, which is not followed.",
                hint="copy the folder with what its links lead to:"
                f" cp -rL {quote(text)} {quote(f'{text}-copy')}",
            )


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
        message = (
            "an artifact is a K file and a V file; here is only"
            f" {', '.join(names) or 'no rotation file'}"
        )
        problem = Problem(
            "incomplete_pair", message, path=min(payload) if len(payload) == 1 else None
        )
        return rejected("schema", problem, ())
    message = f"several pairs in one folder, name one file: {', '.join(names)}"
    return rejected("schema", Problem("ambiguous_pair", message), ())
