"""The private copy that a server loads: written from verified arrays, never a downloaded file.

Files have mode 0400 in a 0700 folder. The plugin compares their digest with the bytes that it read,
and the digest is checked again when the server is ready, so the verified bytes are the served ones.
Needs neither torch nor sglang.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from oscar_zoo import paths
from oscar_zoo.artifact.durable import (
    check_private,
    make_folders,
    refuse_links,
    storage_errors,
    write_new,
)
from oscar_zoo.artifact.files import FileDigest, artifact_digest, file_digest, read_file
from oscar_zoo.artifact.outcome import Verified
from oscar_zoo.artifact.writer import rotation_bytes
from oscar_zoo.engines.sglang.front.settings import FrontSettings
from oscar_zoo.errors import DigestMismatchError, VerificationFailed

PREFIX = "oscar-zoo-serve-"
FILES = {"k": "k_rotation.pt", "v": "v_rotation.pt"}


@contextlib.contextmanager
def private_folder() -> Iterator[Path]:
    """A new 0700 folder in the temporary directory; gone afterwards.

    Its name holds the process id and the pid namespace. The next start removes what a killed
    process left, which may hold a key file, and keeps the folders of other containers.
    """
    _sweep(Path(tempfile.gettempdir()))
    folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{_namespace()}-{os.getpid()}-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def kernels_folder() -> Path:
    """The folder of compiled kernels, which stay from one start to the next.

    Only this user may enter it.
    """
    folder = paths.cache_dir() / "kernels"
    refuse_links(folder.parent, folder.name)
    with storage_errors(f"cannot make {folder}", cache=True):
        check_private(folder.parent)
        make_folders(folder, mode=0o700)
        check_private(folder, open_to=0o077)
    return folder


def _sweep(parent: Path) -> None:
    ours = f"{PREFIX}{_namespace()}-"
    for folder in parent.glob(f"{ours}[0-9]*-*"):
        pid = folder.name.removeprefix(ours).partition("-")[0]
        with contextlib.suppress(OSError):
            if (
                folder.lstat().st_uid == os.getuid()
                and pid.isdigit()
                and not Path("/proc", pid).exists()
            ):
                shutil.rmtree(folder, ignore_errors=True)


def _namespace() -> int:
    """Inode of the pid namespace of this process."""
    return Path("/proc/self/ns/pid").stat().st_ino


def stage_rotations(verified: Verified, folder: Path) -> str:
    """Write the canonical K and V files of `verified` into the new folder `folder`.

    Returns:
        Digest over the two files, `sha256:<hex>`.
    """
    if verified.k is None or verified.v is None:
        raise VerificationFailed(
            "an artifact to serve needs a K and a V rotation.", hint="give a folder with a K/V pair"
        )
    folder.mkdir(mode=0o700)
    for role, rotations in (("k", verified.k), ("v", verified.v)):
        write_new(folder / FILES[role], rotation_bytes(rotations), mode=0o400)
    return folder_digest(folder)


def write_front(folder: Path, front: FrontSettings) -> tuple[Path, Path]:
    """Write the settings of a server's front, and the engine's configuration file with the keys
    that the engine knows; both with mode 0600.
    """
    settings, engine = folder / "front.json", folder / "engine.yaml"
    write_new(settings, front.to_bytes(), mode=0o600)
    keys = {"api-key": front.engine_key, "admin-api-key": front.administration_key}
    lines = [f'{name}: "{key}"\n' for name, key in keys.items() if key is not None]
    write_new(engine, "".join(lines).encode(), mode=0o600)
    return settings, engine


def folder_digest(folder: Path) -> str:
    """Digest of the staged files as they are on disk now."""
    return artifact_digest(_entries(folder))


def check_unchanged(folder: Path, digest: str) -> None:
    """Compare the staged files with `digest`."""
    now = folder_digest(folder)
    if now != digest:
        raise DigestMismatchError.for_content(
            "the served copy of the rotations", want=digest, got=now
        )


def _entries(folder: Path) -> list[FileDigest]:
    return [file_digest(name, read_file(folder / name)) for name in FILES.values()]
