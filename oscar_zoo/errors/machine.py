"""Errors of this machine: its files, its libraries and the servers on it."""

from __future__ import annotations

from typing import Self

from oscar_zoo.errors.base import ConflictError, NotFoundError, OscarZooError
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


class StorageError(OscarZooError, OSError):
    """The local disk is full or read-only, or belongs to somebody else."""

    code = "storage"


class ServerNotFound(NotFoundError):
    """No server of this name or port runs here."""

    code = "not_found.server"


class PortInUse(OscarZooError):
    """Another process listens on the wanted port."""

    code = "port_in_use"


class ServerFailed(OscarZooError):
    """The inference server did not start, or died."""

    code = "server"
