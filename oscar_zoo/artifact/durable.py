"""Files and folders that appear whole or not at all, and locks that save work.

Everything new is written under a `.tmp.*` name in the same file system, forced to disk, and renamed
to its place; the parent folder is forced to disk after that. A kill leaves only `.tmp.*` names,
which say whose they are. The next process that writes there removes those of processes that run no
more, and an hour later those of which nothing is known.

Correctness never depends on a lock: flock lies or is missing on some network file systems. Lock
files are never deleted, because two processes would then hold locks on two files of one name.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import re
import shutil
import stat
import time
import uuid
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Literal

from oscar_zoo import paths
from oscar_zoo.artifact.files import sha256_hex
from oscar_zoo.errors import (
    ForeignFolder,
    MalformedFile,
    OscarZooError,
    PathNotFound,
    StorageError,
    UsageError,
)

TEMP_PREFIX = ".tmp."
_PROC = Path("/proc")
_NAME = re.compile(
    re.escape(TEMP_PREFIX) + r"(?:([0-9a-f]{8})\.([1-9][0-9]{0,9})\.([0-9]{1,20})\.)?[0-9a-f]{32}"
)
Life = Literal["alive", "dead", "unknown"]

STALE_SECONDS = 3600
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
_WHOLE = "nothing was half-written; run the same command again"
_ELSEWHERE = f"set {paths.CACHE} to a folder of your own"
_REFUSED = (errno.EACCES, errno.EPERM, errno.EROFS)
_tidied: set[Path] = set()
_TAKEN = (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR)

STORE = "store"
"""The lock of the whole store."""
_LONGEST_SLEEP = 0.05
State = Literal["held", "late", "none"]


def temp_path(folder: Path) -> Path:
    """A fresh name in `folder` for something not finished, which says whose it is."""
    place, start = _place(), _start(os.getpid())
    owner = f"{place}.{os.getpid()}.{start}." if place and start else ""
    return folder / f"{TEMP_PREFIX}{owner}{uuid.uuid4().hex}"


def write_new(path: Path, data: bytes, *, mode: int = 0o644) -> None:
    """Create `path` with `data` and force it to disk; the name must be free."""
    descriptor = os.open(path, _NEW | os.O_NOFOLLOW, 0o600)
    try:
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(descriptor, rest) :]
        os.fchmod(descriptor, mode)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_file(path: Path, data: bytes, *, mode: int = 0o644) -> None:
    tidy(path.parent)
    fresh = temp_path(path.parent)
    try:
        write_new(fresh, data, mode=mode)
        os.replace(fresh, path)  # noqa: PTH105
    finally:
        fresh.unlink(missing_ok=True)
    sync_folder(path.parent)


def refuse_links(root: Path, *parts: str) -> Path:
    """The path of `parts` below `root`, none of which is a link; `root` itself may be one."""
    place = root
    for part in parts:
        place = place / part
        if place.is_symlink():
            message = f"{place} is a symbolic link; links are not followed."
            hint = "put a copy of what it leads to in its place"
            raise MalformedFile("file.link", message, hint=hint)
    return place


def check_private(*folders: Path, open_to: int = 0o022, elsewhere: str = _ELSEWHERE) -> None:
    """Refuse folders into which others could put something, by any bit of `open_to` in their mode;
    missing ones pass. `elsewhere`: how another folder is named."""
    for folder in folders:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            status = folder.stat()
            mode = stat.S_IMODE(status.st_mode)
            if not stat.S_ISDIR(status.st_mode):
                raise StorageError(f"{folder} is no folder.", hint=elsewhere)
            if status.st_uid != os.getuid():
                message = f"{folder} belongs to uid {status.st_uid}, and you are uid {os.getuid()}."
                raise ForeignFolder(message, hint=elsewhere)
            if mode & open_to:
                message = f"{folder} is open to others (mode {mode:04o})."
                raise StorageError(message, hint=f"chmod 700 {folder}, or {elsewhere}")


def check_writable(folder: Path) -> None:
    """Raise `OSError` where `folder` takes no new file: rights alone do not tell what a system
    refuses."""
    probe = temp_path(folder)
    try:
        os.close(os.open(probe, _NEW, 0o600))
    finally:
        probe.unlink(missing_ok=True)


def check_creatable(path: Path) -> None:
    """Raise `OSError` where `path`, with the folders above it that are missing, cannot be made."""
    path = path.absolute()
    check_writable(next(folder for folder in path.parents if folder.exists()))


def sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folders(folder: Path, *, mode: int = 0o755) -> None:
    """Create `folder` and its missing parents, each forced to disk in its own parent."""
    if folder.is_dir():
        return
    make_folders(folder.parent, mode=mode)
    with contextlib.suppress(FileExistsError):
        os.mkdir(folder, mode)  # noqa: PTH102  (Path.mkdir hides which call failed)
    sync_folder(folder.parent)


@contextlib.contextmanager
def staged_folder(parent: Path, *, mode: int = 0o755) -> Iterator[Path]:
    """A new `.tmp.*` folder in `parent`, removed at the end unless it was renamed to its place."""
    tidy(parent)
    folder = temp_path(parent)
    os.mkdir(folder, mode)  # noqa: PTH102
    try:
        yield folder
    finally:
        remove_tree(folder)


def move_into_place(staged: Path, target: Path) -> bool:
    """Rename the finished folder `staged` to `target`, never over content: where `target` is there
    and no empty folder, it says so, and `staged` stays."""
    sync_folder(staged)
    try:
        os.rename(staged, target)  # noqa: PTH104
    except OSError as error:
        if error.errno in _TAKEN:
            return False
        raise
    sync_folder(target.parent)
    return True


def exchange(staged: Path, target: Path) -> bool:
    """Swap the finished folder `staged` and the folder `target` in one step. Where the system
    cannot, it says so, and nothing has changed."""
    sync_folder(staged)
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    names = os.fsencode(staged), os.fsencode(target)
    if call is None or call(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE) != 0:
        return False
    sync_folder(target.parent)
    return True


def write_files(folder: Path, files: Mapping[str, bytes]) -> None:
    for name in sorted(files):
        write_new(folder / name, files[name])


def remove_tree(folder: Path) -> None:
    """Remove `folder` and its content; one that cannot be removed is left to `sweep`."""
    shutil.rmtree(folder, ignore_errors=True)


def sweep(folder: Path, *, older_than: float = STALE_SECONDS, ours: bool = False) -> int:
    """Remove the leftovers in `folder` and count them; see `is_leftover`. In a folder of others
    only names that this library makes are `ours`."""
    removed = 0
    if not folder.is_dir():
        return 0
    for entry in list(os.scandir(folder)):
        path = Path(entry.path)
        if not entry.name.startswith(TEMP_PREFIX) or (ours and not _NAME.fullmatch(entry.name)):
            continue
        with contextlib.suppress(OSError):  # it is left to the next one
            if is_leftover(entry.name, entry.stat(follow_symlinks=False), older_than=older_than):
                remove_tree(path) if entry.is_dir(follow_symlinks=False) else path.unlink()
                removed += 1
    return removed


def is_leftover(name: str, info: os.stat_result, *, older_than: float = STALE_SECONDS) -> bool:
    """Whether nobody works on the `.tmp.*` entry `name` of this user any more: the process that
    made it is dead, or not known and the entry older than `older_than` seconds. With a number that
    is not positive, living processes do not count either."""
    if not name.startswith(TEMP_PREFIX) or info.st_uid != os.getuid():
        return False
    life = life_of(name) if older_than > 0 else "unknown"
    return life == "dead" or (life == "unknown" and time.time() - info.st_mtime >= older_than)


def tidy(folder: Path) -> None:
    """Remove what killed processes left in any folder that is written to, once per process; others
    may keep `.tmp.*` files there. A failure is none: it is not what was asked for."""
    if folder not in _tidied:
        _tidied.add(folder)
        with contextlib.suppress(OSError):
            sweep(folder, ours=True)


@contextlib.contextmanager
def storage_errors(what: str, *, cache: bool = False) -> Iterator[None]:
    """Turn operating system errors into one `StorageError`; our own errors pass unchanged. `cache`
    says that they are of the cache, which may lie elsewhere."""
    try:
        yield
    except OSError as error:
        if isinstance(error, OscarZooError):
            raise
        failure = StorageError.for_os(what, error, otherwise=_WHOLE)
        if cache and error.errno in _REFUSED:
            failure.advise(f"check its owner and permissions, or {_ELSEWHERE}")
        raise failure from error


def life_of(name: str) -> Life:
    """Whether the process that made `name` still runs. It is known by its number, its start time,
    and the place where the number counts, since a container has numbers of its own."""
    found = _NAME.fullmatch(name)
    if found is None or found[1] is None or found[1] != _place():
        return "unknown"
    start = _start(int(found[2]))
    if start is None:  # gone, or a system without such files, where `_place` is empty
        return "dead"
    return "alive" if start == found[3] else "dead"


@lru_cache(maxsize=1)
def _place() -> str:
    """Eight hex digits for where numbers of processes count; empty where that is not known."""
    try:
        boot = (_PROC / "sys/kernel/random/boot_id").read_bytes()
        numbers = os.readlink(_PROC / "self/ns/pid").encode()  # noqa: PTH115
    except OSError:
        return ""
    return sha256_hex(boot + numbers)[:8]


def _start(pid: int) -> str | None:
    """When the process began, in ticks since the boot."""
    try:
        text = (_PROC / str(pid) / "stat").read_text("ascii", "replace")
    except OSError:  # gone, maybe while it was read
        return None
    return text.rpartition(")")[2].split()[19]


@contextlib.contextmanager
def held(
    name: str, *, timeout: float = 600.0, shared: bool = False, root: Path | None = None
) -> Iterator[bool]:
    """Hold the lock `name` while the body runs, and say whether it is held; not re-entrant. Waiting
    ends at once on Ctrl-C. Where the file system has no locks, or the folder cannot be written, the
    body runs without one; after `timeout` seconds too. `root` is the folder of the store, by
    default the cache of this user."""
    path = (root or paths.cache_dir()) / "locks" / f"{sha256_hex(name.encode())[:16]}.lock"
    with held_file(path, timeout=timeout, shared=shared) as locked:
        yield locked


@contextlib.contextmanager
def held_file(path: Path, *, timeout: float, shared: bool = False) -> Iterator[bool]:
    descriptor = _open(path)
    if descriptor is None:
        yield False
        return
    with held_descriptor(descriptor, timeout=timeout, shared=shared) as state:
        yield state == "held"


@contextlib.contextmanager
def held_descriptor(descriptor: int, *, timeout: float, shared: bool = False) -> Iterator[State]:
    """Hold an open lock file, and close it at the end. `late` says that others held it until
    `timeout`, and `none` that the file system has no locks."""
    try:
        state = _lock(
            descriptor, fcntl.LOCK_SH if shared else fcntl.LOCK_EX, time.monotonic() + timeout
        )
        try:
            yield state
        finally:
            if state == "held":  # closing is not enough while a forked child has the same open file
                with contextlib.suppress(OSError):
                    fcntl.flock(descriptor, fcntl.LOCK_UN)
    finally:
        os.close(descriptor)


def _open(path: Path) -> int | None:
    """The lock file, or `None` when it cannot be; raises `MalformedFile` where its folder is a
    link."""
    refuse_links(path.parent.parent, path.parent.name)
    try:
        check_private(path.parent.parent, path.parent)
        make_folders(path.parent, mode=0o700)
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError:
        return None


def _lock(descriptor: int, kind: int, deadline: float) -> State:
    sleep = 0.001
    while True:
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            left = deadline - time.monotonic()
            if left <= 0:
                return "late"
            time.sleep(min(sleep, left))
            sleep = min(2 * sleep, _LONGEST_SLEEP)
        except OSError:
            return "none"
        else:
            return "held"


def check_file(path: Path | None) -> None:
    if path is None:
        return
    if path.is_dir():
        raise UsageError(f"{path} is a folder.", hint="name a file")
    if not path.parent.is_dir():
        raise PathNotFound.for_path(path.parent, "folder")
    with storage_errors(f"cannot write {path}"):
        check_writable(path.parent)


def check_folder(path: Path) -> None:
    with storage_errors(f"cannot write {path}"):
        check_creatable(path / "any")


def write_file(path: Path, content: bytes) -> None:
    with storage_errors(f"cannot write {path}"):
        replace_file(path, content)
