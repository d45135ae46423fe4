"""From bytes to one of five outcomes: the stages of verification, until the first failure.

`verify_files` is pure: it sees bytes in memory, the very bytes that are hashed, parsed and later
served. `verify_path` reads a file or a folder once and passes the bytes on. Nothing here trusts a
name, a manifest or a file size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from pathlib import Path, PurePosixPath

from oscar_zoo.artifact import strict_json
from oscar_zoo.artifact.checks import Problem
from oscar_zoo.artifact.digest import FileDigest, artifact_digest, file_digest
from oscar_zoo.artifact.files import MAX_ARTIFACT_BYTES, MAX_PAYLOAD_BYTES, read_file
from oscar_zoo.artifact.manifest import FILE_NAME, SUFFIX, Manifest, is_payload
from oscar_zoo.artifact.names import path_text
from oscar_zoo.artifact.outcome import (
    Check,
    DigestMismatch,
    Outcome,
    Unreadable,
    Unsupported,
    Verified,
)
from oscar_zoo.artifact.specs import Geometry
from oscar_zoo.artifact.stages import Verification, rejected
from oscar_zoo.errors import MalformedFile, PathNotFound, StorageError


def verify_files(
    files: Mapping[str, bytes],
    *,
    manifest: Manifest | None = None,
    expected: Sequence[FileDigest] | None = None,
    expected_digest: str | None = None,
    geometry: Geometry | None = None,
    name_hint: str = "",
    what: str = "the artifact",
    strict: bool = False,
) -> Outcome:
    """Verify an artifact, or one rotation file, whose bytes are in memory.

    Args:
        files: relative POSIX path -> content. `oscar.json` is the manifest unless `manifest` is
            given.
        manifest: the artifact's manifest, from a source other than `files`.
        expected: digests from a lock or an index; every one of them is compared, and there must be
            no other file.
        expected_digest: digest of the artifact, or sha256 of the one file; `sha256:` may be left
            out.
        geometry: of the model; names the attention layers of hybrid models and is checked against
            the manifest.
        name_hint: original name of a single file, where `files` calls it something else.
        what: the artifact, for messages about its digest.
        strict: rules for publishing our own artifacts: warnings about names and roles are
            rejections.
    """
    if expected_digest is not None and (mismatch := _compare_digest(what, files, expected_digest)):
        return mismatch
    outcome = Verification(files, manifest, expected, geometry, name_hint, strict).run()
    listed = bool(expected) or manifest is not None or FILE_NAME in files
    if expected_digest is None or listed or not isinstance(outcome, Verified):
        return outcome
    checked = Check(
        "bytes", "ok", f"{outcome.checks[0].detail.split(';')[0]}; the digest is the expected one"
    )
    return replace(outcome, checks=(checked, *outcome.checks[1:]))


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
        max_bytes: larger files are not read.

    Raises:
        PathNotFound: nothing is there.
    """
    try:
        files = (
            _read_folder(path, max_bytes)
            if path.is_dir()
            else {path.name: read_file(path, max_bytes=max_bytes)}
        )
    except (MalformedFile, StorageError) as error:
        return Unreadable(error.message, str(path))
    except OSError as error:
        return Unreadable(f"cannot read {path}: {error.strerror}", str(path))
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


def find_artifacts(path: Path) -> list[Path]:
    """Folders that directly hold rotation files or a manifest, sorted: `path` and those below.

    Hidden folders and symbolic links are skipped, and so are folders that vanish meanwhile. A file,
    or a folder that does not exist, holds none.

    Raises:
        StorageError: a folder cannot be listed.
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
        if any(
            entry.is_file() and (entry.suffix == SUFFIX or entry.name == FILE_NAME)
            for entry in entries
        ):
            found.append(folder)
        todo += [entry for entry in entries if entry.is_dir() and not entry.name.startswith(".")]
    return sorted(found)


def _read_folder(folder: Path, max_bytes: int) -> dict[str, bytes] | Outcome:
    """The manifest and the files it lists, or without one a pair and its statistics; never a link.

    Names are judged before anything is read, so a folder of many files costs no memory.
    """
    if folder.is_symlink():
        raise MalformedFile("file.kind", f"{folder} is a symbolic link.")
    names = {entry.name for entry in folder.iterdir() if is_payload(entry.name)}
    files: dict[str, bytes] = {}
    if (folder / FILE_NAME).exists() or (folder / FILE_NAME).is_symlink():
        files[FILE_NAME] = read_file(folder / FILE_NAME, max_bytes=strict_json.MAX_BYTES)
        names |= _listed(files[FILE_NAME])
    elif problem := _not_one_pair(folder, names):
        return problem
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


def _listed(manifest: bytes) -> set[str]:
    try:
        return {entry.path for entry in Manifest.from_bytes(manifest).files}
    except MalformedFile:
        return set()  # stage `schema` says why


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
        return rejected("schema", Problem("incomplete_pair", message), ())
    message = f"several pairs in one folder, name one file: {', '.join(names)}"
    return rejected("schema", Problem("ambiguous_pair", message), ())


def _compare_digest(name: str, files: Mapping[str, bytes], want: str) -> DigestMismatch | None:
    payload = [file_digest(name, data) for name, data in files.items() if name != FILE_NAME]
    got = artifact_digest(payload)
    accepted = {got} | ({"sha256:" + payload[0].sha256} if len(payload) == 1 else set())
    if "sha256:" + want.removeprefix("sha256:") in accepted:
        return None
    shown = min(accepted - {got}, default=got)
    return DigestMismatch(
        name, want, shown, (Check("bytes", "failed", f"digest is {shown}, expected {want}"),)
    )
