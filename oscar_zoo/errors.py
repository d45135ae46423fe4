"""Every exception that this library raises on purpose.

Six branches decide the exit code of the command line; `cli/main.py` maps them, and a test walks the
tree. Each leaf is named by what happened and carries a stable `code`. The builders here word the
messages: the cause, what was seen, and what to do next. Outcomes of verification are values, not
exceptions (`artifact/outcome.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

from oscar_zoo.next_step import Install, ListNames, Login, NextStep, rendered

_UNASKED = "{} is not on this machine, and offline mode asks no hub."
WITHOUT_OPTION = "run it without --offline"
"""How to end the offline mode that the command line asked for."""


class OscarZooError(Exception):
    """Base of every error this library raises on purpose.

    The words of `message` and `hint` are for people. A program decides by the class, the `code` and
    the data.

    Args:
        message: one line, cause and value seen; no secrets.
        hint: advice in words, or `None`.
        suggestions: names that may have been meant, best first; a path is a `SuggestedPath`.
        next_step: what to do next, as data.
    """

    code = "error"

    def __init__(
        self,
        message: str,
        *,
        hint: str | None = None,
        suggestions: Sequence[str] = (),
        next_step: NextStep | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.advice = hint
        self.suggestions = tuple(suggestions)
        self.next_step = next_step

    @property
    def hint(self) -> str | None:
        """What to do, for people: suggestions, advice and the next step in one line."""
        return rendered(self.suggestions, self.advice, self.next_step)

    def advise(self, advice: str | None = None, *, next_step: NextStep | None = None) -> None:
        """Replace everything that the error suggests."""
        self.suggestions, self.advice, self.next_step = (), advice, next_step


class UsageError(OscarZooError, ValueError):
    """The request itself makes no sense: bad option, ambiguous name."""

    code = "usage"


class NotFoundError(OscarZooError, LookupError):
    """Something that was named does not exist."""

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
    """Something else is already at the place where this should be written."""

    code = "conflict"


class UnsupportedModel(OscarZooError):
    """A model whose attention this version cannot handle."""

    code = "unsupported.model"


class UnsupportedMachine(OscarZooError):
    """This machine, or something installed on it, cannot run what was asked for."""

    code = "unsupported.machine"


class InvalidName(UsageError):
    """A name, tag or digest that does not follow the grammar of artifact names."""

    code = "usage.name"


class AmbiguousName(UsageError):
    """A name that means more than one artifact."""

    code = "usage.ambiguous"

    @classmethod
    def for_name(cls, name: str, choices: Sequence[str]) -> Self:
        """Build the error that lists `choices`, full references the user can copy."""
        return cls(
            f"{name!r} could be any of {', '.join(choices)}.",
            hint=f"name one, for example {choices[0]}",
        )


class NotLocked(UsageError):
    """In locked mode, something is needed that the lock file does not have."""

    code = "usage.locked"

    @classmethod
    def for_name(cls, name: str, lock: object) -> Self:
        """Build the error for an artifact `name` without an entry in the file `lock`."""
        hint = (
            f"add it without --locked: oscar-zoo pull {name}; outside of a project: oscar-zoo pull"
            f" {name} --lock"
        )
        return cls(f"{name} is not in {lock}.", hint=hint)


class ArtifactNotFound(NotFoundError):
    """No known artifact has this name."""

    code = "not_found.artifact"

    @classmethod
    def for_name(cls, name: str, close: Sequence[str] = ()) -> Self:
        """Build the error for an unknown `name` with close matches, best first."""
        return cls(f"no artifact is called {name!r}.", suggestions=close, next_step=ListNames())


class ArtifactNotAsked(ArtifactNotFound):
    """An artifact is not on this machine, and offline mode asked no hub for it."""

    code = "not_found.offline"

    @classmethod
    def for_name(
        cls, name: str, close: Sequence[str] = (), *, go_online: str = WITHOUT_OPTION
    ) -> Self:
        """Build the error for `name`; see `ArtifactNotFound.for_name`. `go_online` says how to end
        offline mode."""
        return cls(_UNASKED.format(name), hint=go_online, suggestions=close)


class PathNotFound(NotFoundError):
    """A file or folder that was named does not exist."""

    code = "not_found.path"

    @classmethod
    def for_path(cls, path: object, what: str = "file or folder") -> Self:
        """Build the error for a missing `path`."""
        return cls(f"no such {what}: {path}", hint="check the path")


class ServerNotFound(NotFoundError):
    """No server of this name or port runs here."""

    code = "not_found.server"


class MissingDependency(OscarZooError):
    """An optional library is needed and not installed."""

    code = "missing_dependency"

    @classmethod
    def for_extra(cls, library: str, extra: str) -> Self:
        """Build the error naming the extra of this package that brings `library`."""
        return cls(f"this needs {library}, which is not installed.", next_step=Install(extra))


class RepositoryNotFound(NotFoundError):
    """A hub does not have the repository, or hides it from this user."""

    code = "not_found.repository"

    @classmethod
    def for_hub(cls, hub: str) -> Self:
        """Build the error for a repository `hub` that is missing, or hidden from the account that
        asks."""
        return cls(
            f"{hub} does not exist, or this account may not see it.",
            hint="check the name: oscar-zoo doctor",
        )


class RevisionNotFound(NotFoundError):
    """A hub no longer has the commit, branch or tag asked for."""

    code = "not_found.revision"

    @classmethod
    def for_hub(cls, hub: str, revision: str) -> Self:
        """Build the error for a `revision` that is gone from `hub`."""
        return cls(
            f"{hub} has no revision {revision}.",
            hint="its history was rewritten, or the name is wrong",
        )


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
    """A file of a kind that is recognised but not loaded; `reason` names the kind."""

    code = "integrity.unsupported"


class DigestMismatchError(IntegrityError):
    """Content does not have the digest it must have; `what`, `want` and `got` are the facts where
    they are known."""

    code = "integrity.digest"
    what = want = got = ""

    @classmethod
    def for_content(cls, what: str, *, want: str, got: str | None, hint: str | None = None) -> Self:
        """Build the error that shows both digests; `got` is `None` when the content is missing."""
        seen = "is missing" if got is None else f"has sha256 {got}"
        error = cls(
            f"{what} {seen}, expected {want}.", hint=hint or "fetch it again; do not use this copy"
        )
        error.what, error.want, error.got = what, want, got or "no file"
        return error


class VerificationFailed(IntegrityError):
    """An artifact was checked and must not be used; `outcome` is what `artifact.verify` found."""

    code = "integrity.verification"

    def __init__(self, message: str, *, hint: str | None = None, outcome: object = None) -> None:
        super().__init__(message, hint=hint)
        self.outcome = outcome


class RevisionGone(IntegrityError):
    """The commit that a lock names no longer exists. Another commit is never taken silently."""

    code = "integrity.revision_gone"


class RollbackError(IntegrityError):
    """A hub offers an older index than it did before."""

    code = "integrity.rollback"

    @classmethod
    def for_serial(cls, hub: str, seen: int, offered: int) -> Self:
        """Build the error for an index whose serial went from `seen` down to `offered`."""
        return cls(
            f"the index of {hub} went back from serial {seen} to {offered}.",
            hint="ask its owner; if that is intended: --allow-downgrade",
        )


class HubUnreachable(NetworkError):
    """A hub could not be reached, broke off, or answered with a server error."""

    code = "network.unreachable"

    @classmethod
    def for_hub(cls, hub: str, cause: str) -> Self:
        """Build the error naming `hub` and the `cause` in a few words, such as
        `connection refused`."""
        hint = "check the connection; here already: oscar-zoo list --installed"
        return cls(f"{hub} cannot be reached: {cause}.", hint=hint)


class HubTimeout(NetworkError, TimeoutError):
    """A hub did not answer in time, or sends too slowly."""

    code = "network.timeout"

    @classmethod
    def for_hub(cls, hub: str, what: str) -> Self:
        """Build the error naming `hub` and `what` it failed to do, such as
        `did not answer within 8 s`."""
        return cls(
            f"{hub} {what}.", hint="try again later; here already: oscar-zoo list --installed"
        )


class RateLimited(NetworkError):
    """A hub limits the rate of requests."""

    code = "network.rate_limited"

    @classmethod
    def for_hub(cls, hub: str, seconds: float | None) -> Self:
        """Build the error; `seconds` is what the hub asked to wait, where it said so."""
        wait = "later" if seconds is None else f"in {seconds:.0f} s"
        return cls(
            f"{hub} limits the rate of requests.",
            hint=f"try again {wait}; logged-in users are allowed more",
        )


class OfflineError(NetworkError):
    """Something is needed from a hub in offline mode."""

    code = "network.offline"

    @classmethod
    def for_name(cls, name: str, *, go_online: str = WITHOUT_OPTION) -> Self:
        """Build the error for an artifact `name` that is not on this machine; `go_online` says how
        to end offline mode."""
        return cls(_UNASKED.format(name), hint=go_online)


class LoginRequired(AccessError):
    """A hub wants a (valid) token."""

    code = "access.login"

    @classmethod
    def for_hub(cls, hub: str, *, sent_token: bool) -> Self:
        """Build the error; `sent_token` says whether a token was sent and refused."""
        if sent_token:
            return cls(f"{hub} refused the token.", next_step=Login())
        return cls(
            f"{hub} does not exist, or is private.", hint="check the name", next_step=Login()
        )


class GatedRepository(AccessError):
    """A repository whose owner must grant access."""

    code = "access.gated"

    @classmethod
    def for_hub(cls, hub: str) -> Self:
        """Build the error for a gated repository."""
        return cls(f"{hub} is gated.", hint="ask for access on its web page, then: oscar-zoo login")


class Forbidden(AccessError):
    """A hub knows the user and does not allow this."""

    code = "access.forbidden"

    @classmethod
    def for_hub(cls, hub: str, what: str = "this") -> Self:
        """Build the error for an action `what` (`reading`, `writing`) that `hub` does not allow."""
        return cls(
            f"{hub} does not allow {what} with this account.",
            hint="check the token's rights: oscar-zoo doctor",
        )


class VersionExists(ConflictError):
    """A published version exists with other content; versions never change."""

    code = "conflict.version"


class StaleRevision(ConflictError):
    """A hub moved on between reading and writing; nothing was written."""

    code = "conflict.stale"

    @classmethod
    def for_hub(cls, hub: str) -> Self:
        """Build the error for a change that was made for an older state of `hub`."""
        return cls(
            f"{hub} changed while this was being published.",
            hint="nothing was written; run it again",
        )


class OutputExists(ConflictError):
    """Something else is at the place where the result should go."""

    code = "conflict.output"


class PortInUse(OscarZooError):
    """Another process listens on the wanted port."""

    code = "port_in_use"


class GeometryMismatch(OscarZooError, ValueError):
    """An artifact made for another shape of model."""

    code = "geometry"


class InvalidModel(OscarZooError):
    """A model folder without weights, configuration or tokenizer."""

    code = "model"


class NotEnoughMemory(OscarZooError, MemoryError):
    """A model is larger than the device it should run on."""

    code = "memory"

    @classmethod
    def for_model(cls, model: str, need: int, device: str, free: int, *, hint: str) -> Self:
        """Build the error; `need` and `free` are bytes on `device`."""
        return cls(
            f"{model} needs about {_gigabytes(need)} GB on {device}, {_gigabytes(free)} GB are"
            " free.",
            hint=hint,
        )


class StorageError(OscarZooError, OSError):
    """The local disk is full or read-only, or belongs to somebody else."""

    code = "storage"


class ServerFailed(OscarZooError):
    """The inference server did not start, or died."""

    code = "server"


class ComputeFailed(OscarZooError):
    """Calibration or fitting cannot give a trustworthy result."""

    code = "compute"

    @classmethod
    def incomplete(cls, what: str) -> Self:
        """The capture did not see everything it must see; `what` names the first thing missing."""
        return cls(
            f"the capture is incomplete: {what}.", hint="nothing was written; report the model"
        )


def _gigabytes(number: int) -> str:
    value = number / 1e9
    return f"{value:.0f}" if value >= 10 else f"{value:.1f}" if value >= 0.1 else f"{value:.3f}"
