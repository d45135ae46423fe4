"""The whole exception tree.

Seven branches decide the exit code of the command line (`cli/main.py` maps them, a test walks the tree); leaves are
named by what happened and carry a stable `code`. The wording lives here, in builders: cause, what was seen, what to
do next. Verification outcomes are values, not exceptions (`artifact/outcome.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self


class OscarZooError(Exception):
    """Base of every error this library raises on purpose.

    Args:
        message: one line, cause and value seen; no secrets.
        hint: the next step for the user, or `None`.
    """

    code = "error"

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


# --- the branches --------------------------------------------------------------------------------------------------


class UsageError(OscarZooError, ValueError):
    """The request itself makes no sense: bad option, ambiguous name."""

    code = "usage"


class NotFoundError(OscarZooError, LookupError):
    """Something named does not exist."""

    code = "not_found"


class IntegrityError(OscarZooError):
    """Bytes are not what a digest, a format or a check says they must be."""

    code = "integrity"


class NetworkError(OscarZooError, OSError):
    """A hub did not answer, or offline mode forbids asking."""

    code = "network"


class AccessError(OscarZooError, PermissionError):
    """A hub refused: no token, wrong token, gated."""

    code = "access"


class ConflictError(OscarZooError):
    """Something else already stands where this should be written."""

    code = "conflict"


# --- usage ---------------------------------------------------------------------------------------------------------


class InvalidName(UsageError):
    """A name, tag or digest outside the grammar of ARTIFACT names."""

    code = "usage.name"


class AmbiguousName(UsageError):
    """A name that means more than one artifact."""

    code = "usage.ambiguous"

    @classmethod
    def for_name(cls, name: str, choices: Sequence[str]) -> Self:
        """Build the error that lists `choices`, full references the user can copy."""
        return cls(f"{name!r} could be any of {', '.join(choices)}.", hint=f"name one, for example {choices[0]}")


class UnsupportedModel(UsageError):
    """A model whose attention this version cannot handle."""

    code = "usage.model"


# --- not found -----------------------------------------------------------------------------------------------------


class ArtifactNotFound(NotFoundError):
    """No known artifact has this name."""

    code = "not_found.artifact"

    @classmethod
    def for_name(cls, name: str, close: Sequence[str] = ()) -> Self:
        """Build the error for an unknown `name` with close matches, best first."""
        hint = f"did you mean {' or '.join(close)}? All: oscar-zoo list" if close else "all names: oscar-zoo list"
        return cls(f"no artifact is called {name!r}.", hint=hint)


class PathNotFound(NotFoundError):
    """A file or folder that was named does not exist."""

    code = "not_found.path"

    @classmethod
    def for_path(cls, path: object, what: str = "file or folder") -> Self:
        """Build the error for a missing `path`."""
        return cls(f"no such {what}: {path}", hint="check the path")


class MissingDependency(OscarZooError):
    """An optional library is needed and absent."""

    code = "missing_dependency"

    @classmethod
    def for_extra(cls, library: str, extra: str) -> Self:
        """Build the error naming the extra of this package that brings `library`."""
        return cls(f"this needs {library}, which is not installed.", hint=f"pip install 'oscar-zoo[{extra}]'")


# --- integrity -----------------------------------------------------------------------------------------------------


class MalformedFile(IntegrityError, ValueError):
    """A file breaks the rules of its format.

    Args:
        reason: stable code of the broken rule, such as `zip.crc` or `pickle.opcode`.
        message: what was seen.
    """

    code = "integrity.malformed"

    def __init__(self, reason: str, message: str, *, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.reason = reason


class UnsupportedFormat(MalformedFile):
    """A file of a kind we recognise and do not load; `reason` names the kind."""

    code = "integrity.unsupported"


class DigestMismatchError(IntegrityError):
    """Content does not have the digest it must have; `what`, `want` and `got` are the facts where they are known."""

    code = "integrity.digest"
    what = want = got = ""

    @classmethod
    def for_content(cls, what: str, *, want: str, got: str | None, hint: str | None = None) -> Self:
        """Build the error that shows both digests; `got` is `None` when the content is missing."""
        seen = "is missing" if got is None else f"has sha256 {got}"
        error = cls(f"{what} {seen}, expected {want}.", hint=hint or "fetch it again; do not use this copy")
        error.what, error.want, error.got = what, want, got or "no file"
        return error


class VerificationFailed(IntegrityError):
    """An artifact was checked and must not be used; `outcome` is what `artifact.verify` found."""

    code = "integrity.verification"

    def __init__(self, message: str, *, hint: str | None = None, outcome: object = None) -> None:
        super().__init__(message, hint=hint)
        self.outcome = outcome


# --- conflict ------------------------------------------------------------------------------------------------------


class VersionExists(ConflictError):
    """A published version exists with other content; versions never change."""

    code = "conflict.version"


class OutputExists(ConflictError):
    """The place for the result is taken."""

    code = "conflict.output"


class PortInUse(OscarZooError):
    """Another process listens on the wanted port."""

    code = "port_in_use"


# --- other ---------------------------------------------------------------------------------------------------------


class GeometryMismatch(OscarZooError, ValueError):
    """An artifact made for another shape of model."""

    code = "geometry"


class InvalidModel(OscarZooError):
    """A model folder without weights, configuration or tokenizer."""

    code = "model"


class StorageError(OscarZooError, OSError):
    """The local disk refused: full, read-only, wrong owner."""

    code = "storage"


class ServerFailed(OscarZooError):
    """The inference server did not start, or died."""

    code = "server"


class ComputeFailed(OscarZooError):
    """Calibration or fitting cannot give a trustworthy result."""

    code = "compute"
