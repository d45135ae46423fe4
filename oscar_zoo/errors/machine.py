"""Errors of this machine: its files, its libraries and the servers on it."""

from __future__ import annotations

import errno
from collections.abc import Mapping
from typing import Self

from oscar_zoo.errors.base import (
    AccessError,
    ConflictError,
    NotFoundError,
    OscarZooError,
    UsageError,
)
from oscar_zoo.next_step import Install


class UnsupportedMachine(OscarZooError):
    """This machine, or something installed on it, cannot run what was asked for."""

    code = "unsupported.machine"


class MissingDependency(OscarZooError):
    """An optional library is needed and not installed."""

    code = "missing_dependency"

    @classmethod
    def for_extra(cls, library: str, extra: str) -> Self:
        """Build the error naming the extra of this package that brings `library`."""
        return cls(f"this needs {library}, which is not installed.", next_step=Install(extra))


class PathNotFound(NotFoundError):
    """A file or folder that was named does not exist."""

    code = "not_found.path"

    @classmethod
    def for_path(cls, path: object, what: str = "file or folder") -> Self:
        """Build the error for a missing `path`."""
        return cls(f"no such {what}: {path}", hint="check the path")


class OutputExists(ConflictError):
    """Something else is at the place where the result should go."""

    code = "conflict.output"


_RIGHTS = "check who owns it and its permissions"
_DISK_HINTS: Mapping[int, str] = {
    errno.ENOSPC: "free some space, then run the same command again",
    errno.EDQUOT: "your disk quota is used up; free some space, then run the same command again",
    errno.EIO: "the disk, or what it is on, has an error; see the log of the system (dmesg)",
    errno.EMFILE: "too many files are open in this process; raise the limit: ulimit -n 4096",
    errno.ENFILE: "too many files are open on this machine; end other programs",
    errno.ENOMEM: "the memory of this machine is used up; end other programs",
    errno.ESTALE: "the network file system lost it; run the same command again",
    errno.ETIMEDOUT: "the network file system does not answer; run the same command again",
    errno.EROFS: "the file system is read-only; choose another folder",
    errno.EACCES: _RIGHTS,
    errno.EPERM: _RIGHTS,
    errno.EISDIR: "check the path: it is a folder",
    errno.ENOTDIR: "check the path: a part of it is a file",
    errno.EEXIST: "check the path: a part of it is a file or a broken link",
    errno.ENOENT: "check the path: a part of it is missing, or a broken link",
    errno.ELOOP: "check the path: a part of it is a link to itself",
    errno.ENAMETOOLONG: "choose a shorter path",
}


class StorageError(OscarZooError, OSError):
    """The local disk is full, broken or read-only, or a file belongs to somebody else."""

    code = "storage"

    @classmethod
    def for_os(
        cls, what: str, error: OSError, *, otherwise: str = "run the same command again"
    ) -> Self:
        """Build the error of an error of the operating system."""
        hint = _DISK_HINTS.get(error.errno or 0, otherwise)
        return cls(f"{what}: {error.strerror or error}.", hint=hint)


class ForeignFolder(AccessError):
    """A folder that must be this user's own belongs to another one."""

    code = "access.owner"


class ServerNotFound(NotFoundError):
    """No server of this name or port runs here."""

    code = "not_found.server"


class PortInUse(ConflictError):
    """Another process listens on the wanted port."""

    code = "port_in_use"


class ServerFailed(OscarZooError):
    """The inference server did not start, or died."""

    code = "server"


class FlagRefused(ServerFailed, UsageError):
    """A flag that the user gave to the inference server is unknown to it, or has a bad value."""

    code = "usage.engine_flag"

    @classmethod
    def for_flags(cls, why: str, log: object | None = None) -> Self:
        """Build the error from what the parser of SGLang said, one line without a full stop."""
        where = "" if log is None else f"; log: {log}"
        return cls(
            f"SGLang does not take the flags behind --: {why}.",
            hint=f"its flags: python -P -m sglang.launch_server --help{where}",
        )
