"""Every exception that this library raises on purpose.

Six branches decide the exit code of the command line (`cli/main.py`). Each leaf is named by what
happened and carries a stable `code`; its builders word a message that several callers share.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Self

from oscar_zoo.next_step import Compute, Install, ListNames, Login, NextStep, rendered

WITHOUT_OPTION = "run it without --offline"
"""How to end the offline mode that the command line asked for."""
OFFLINE_OPTION = "--offline"
"""Value of `OSCAR_ZOO_OFFLINE` in a process whose command line asked for offline mode."""


def go_online() -> str:
    """How to end offline mode, as far as the environment of this process tells."""
    typed = os.environ.get("OSCAR_ZOO_OFFLINE") == OFFLINE_OPTION
    return WITHOUT_OPTION if typed else "unset HF_HUB_OFFLINE"


class OscarZooError(Exception):
    """Base of every error this library raises on purpose.

    `message` is one line with the cause and the value seen, and no secrets. `suggestions` are names
    that may have been meant, best first; a path is a `SuggestedPath`.
    """

    code = "error"

    def __init_subclass__(cls, code: str | None = None) -> None:
        super().__init_subclass__()
        cls.code = code or cls.code

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

    @property
    def __notes__(self) -> list[str]:  # type: ignore[override]
        """What a traceback shows below the message: of a worker, or in a notebook."""
        return [f"hint: {self.hint}"] if self.hint else []

    def advise(self, advice: str | None = None, *, next_step: NextStep | None = None) -> None:
        self.suggestions, self.advice, self.next_step = (), advice, next_step


# The six branches


class UsageError(OscarZooError, ValueError, code="usage"):
    """The request itself makes no sense: bad option, ambiguous name."""


class NotFoundError(OscarZooError, LookupError, code="not_found"):
    """Something that was named does not exist."""


class IntegrityError(OscarZooError, code="integrity"):
    """Bytes are not what a digest, a format or a check says they must be."""


class NetworkError(OscarZooError, OSError, code="network"):
    """A hub did not answer, or offline mode forbids asking."""

    said: str | None = None
    """What the hubs said, where the message begins with what was looked for."""


class AccessError(OscarZooError, PermissionError, code="access"):
    """A hub refused (no token, wrong token, gated), or a folder is another user's."""


class ConflictError(OscarZooError, code="conflict"):
    """Something else is already at the place where this should be written."""


# A name is unclear, unknown, not here, or taken


class InvalidName(UsageError, code="usage.name"):
    """A name, tag or digest that does not follow the grammar of artifact names."""


class AmbiguousName(UsageError, code="usage.ambiguous"):
    """A name that means more than one artifact."""

    @classmethod
    def for_name(cls, name: str, choices: Sequence[str]) -> Self:
        """`choices` are full references that the user can copy."""
        hint = f"name one, for example {choices[0]}"
        return cls(f"{name!r} could be any of {', '.join(choices)}.", hint=hint)


class NotLocked(UsageError, code="usage.locked"):
    """In locked mode, something is needed that the lock file does not have."""

    @classmethod
    def for_name(cls, name: str, lock: object) -> Self:
        error = cls(f"{name} is not in {lock}.")
        error.propose(f"oscar-zoo pull {name}", f"oscar-zoo pull {name} --lock")
        return error

    def propose(self, add: str, create: str) -> None:
        """Name the command lines that add it to the lock of a project, and make another lock."""
        elsewhere = f"; outside of a project: {create}" if create != add else ""
        self.advise(f"add it without --locked: {add}{elsewhere}")


class ArtifactNotFound(NotFoundError, code="not_found.artifact"):
    """No known artifact has this name."""

    @classmethod
    def for_name(cls, name: str, close: Sequence[str] = ()) -> Self:
        return cls(f"no artifact is called {name!r}.", suggestions=close, next_step=ListNames())

    @classmethod
    def among(cls, name: str, known: Sequence[str]) -> Self:
        """An unknown version `name` of a model with other versions, `known`."""
        return cls(f"no artifact is called {name!r}.", hint=f"known: {', '.join(known)}")

    @classmethod
    def for_model(cls, name: str) -> Self:
        return cls(f"no rotation for {name} is known.", next_step=Compute(name))


class ScoreNotFound(NotFoundError, code="not_found.score"):
    """Nobody reports a score of this benchmark."""

    @classmethod
    def for_task(cls, task: str, known: Sequence[str], close: Sequence[str] = ()) -> Self:
        there = f"tasks with scores: {', '.join(known)}" if known else "nobody reports any score"
        return cls(f"no score of {task} is known.", suggestions=close, hint=there)

    @classmethod
    def for_measured(cls, task: str) -> Self:
        others = f"what others report: oscar-zoo leaderboard --task {task}"
        return cls(f"no score of {task} was measured with oscar-zoo.", hint=others)


class OfflineError(NetworkError, code="network.offline"):
    """Something is needed from a hub in offline mode."""

    @classmethod
    def for_name(cls, name: str, *, go_online: str = WITHOUT_OPTION) -> Self:
        said = f"{name} is not on this machine, and offline mode asks no hub."
        return cls(said, hint=go_online)


class VersionExists(ConflictError, code="conflict.version"):
    """A published version exists with other content; versions never change."""


# A hub lacks something, refuses, or cannot be reached


class RepositoryNotFound(NotFoundError, code="not_found.repository"):
    """A hub does not have the repository, or hides it from this user."""

    @classmethod
    def for_hub(cls, hub: str) -> Self:
        hint = "check the name of the hub; which account asks: oscar-zoo doctor"
        return cls(f"{hub} does not exist, or this account may not see it.", hint=hint)


class RevisionNotFound(NotFoundError, code="not_found.revision"):
    """A hub no longer has the commit, branch or tag asked for."""

    @classmethod
    def for_hub(cls, hub: str, revision: str) -> Self:
        hint = "its history was rewritten, or the name is wrong"
        return cls(f"{hub} has no revision {revision}.", hint=hint)


class HubUnreachable(NetworkError, code="network.unreachable"):
    """A hub could not be reached, broke off, or answered with a server error."""

    @classmethod
    def for_hub(cls, hub: str, cause: str) -> Self:
        hint = "check the connection; here already: oscar-zoo list --installed"
        return cls(f"{hub} cannot be reached: {cause}.", hint=hint)

    @classmethod
    def for_unknown(cls, name: str, said: Sequence[str], close: Sequence[str] = ()) -> Self:
        """This machine does not know `name`, and hubs that may have it did not answer, as they
        `said`; `close` are names that are known here, best first."""
        facts = "; ".join(text.rstrip(".") for text in said)
        message = f"{name} is unknown on this machine, and not every hub can be asked: {facts}."
        hint = "or check the network" if close else "check the network"
        return cls(message, hint=hint, suggestions=close)


class UnusableEnvironment(NetworkError, code="network.environment"):
    """Variables of the environment, such as those of a proxy, let no connection be made."""

    @classmethod
    def of(cls, what: str, variables: Sequence[str], hint: str) -> Self:
        """`variables` set a `what` (`proxy`, `certificate`) that cannot be used. Their values,
        which may hold a password, are not shown."""
        found = ", ".join(variables) or "no details"
        return cls(f"the {what} of the environment cannot be used: {found}.", hint=hint)


class HubTimeout(NetworkError, TimeoutError, code="network.timeout"):
    """A hub did not answer in time, or sends too slowly."""

    @classmethod
    def for_hub(cls, hub: str, what: str) -> Self:
        hint = "try again later; here already: oscar-zoo list --installed"
        return cls(f"{hub} {what}.", hint=hint)


class RateLimited(NetworkError, code="network.rate_limited"):
    """A hub limits the rate of requests."""

    @classmethod
    def for_hub(cls, hub: str, seconds: float | None) -> Self:
        wait = "later" if seconds is None else f"in {seconds:.0f} s"
        hint = f"try again {wait}; logged-in users are allowed more"
        return cls(f"{hub} limits the rate of requests.", hint=hint)


class LoginRequired(AccessError, code="access.login"):
    """A hub wants a (valid) token."""

    @classmethod
    def for_hub(cls, hub: str, *, sent_token: bool) -> Self:
        if sent_token:
            return cls(f"{hub} refused the token.", next_step=Login())
        said = f"{hub} does not exist, or is private."
        return cls(said, hint="check the name", next_step=Login())


class GatedRepository(AccessError, code="access.gated"):
    """A repository whose owner must grant access."""

    @classmethod
    def for_hub(cls, hub: str) -> Self:
        return cls(f"{hub} is gated.", hint="ask for access on its web page, then: oscar-zoo login")


class Forbidden(AccessError, code="access.forbidden"):
    """A hub knows the user and does not allow this."""

    @classmethod
    def for_hub(cls, hub: str, what: str = "this") -> Self:
        hint = "check the token's rights: oscar-zoo doctor"
        return cls(f"{hub} does not allow {what} with this account.", hint=hint)


class StaleRevision(ConflictError, code="conflict.stale"):
    """A hub moved on between reading and writing."""

    placed = False
    """Whether the version of the change was written, and its root files were not."""

    @classmethod
    def for_hub(cls, hub: str, *, placed: bool = False) -> Self:
        there = "the version is there, and not in the index yet"
        hint = f"{there if placed else 'nothing was written'}; run it again"
        error = cls(f"{hub} changed while this was being published.", hint=hint)
        error.placed = placed
        return error


# Bytes are not what a digest, a format or a check says they must be


class MalformedFile(IntegrityError, ValueError, code="integrity.malformed"):
    """A file breaks the rules of its format."""

    def __init__(self, reason: str, message: str, *, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.reason = reason


@contextmanager
def malformed_hint(hint: str) -> Iterator[None]:
    """Give a `MalformedFile` of the body, or of the decorated function, the `hint` where it has no
    next step of its own."""
    try:
        yield
    except MalformedFile as error:
        if error.hint is None:
            error.advise(hint)
        raise


class UnsupportedFormat(MalformedFile, code="integrity.unsupported"):
    """A file of a kind that is recognised but not loaded; `reason` names the kind."""


class DigestMismatchError(IntegrityError, code="integrity.digest"):
    """Content does not have the digest it must have; `what`, `want` and `got` are the facts where
    they are known."""

    what = want = got = ""

    @classmethod
    def for_content(cls, what: str, *, want: str, got: str | None, hint: str | None = None) -> Self:
        seen = "is missing" if got is None else f"has sha256 {got}"
        hint = hint or "fetch it again; do not use this copy"
        error = cls(f"{what} {seen}, expected {want}.", hint=hint)
        error.what, error.want, error.got = what, want, got or "no file"
        return error


class VerificationFailed(IntegrityError, code="integrity.verification"):
    """An artifact was checked and must not be used; `outcome` is what `artifact.verify` found."""

    def __init__(self, message: str, *, hint: str | None = None, outcome: object = None) -> None:
        super().__init__(message, hint=hint)
        self.outcome = outcome


class RevisionGone(IntegrityError, code="integrity.revision_gone"):
    """The commit that a lock names no longer exists. Another commit is never taken silently."""


class SignatureError(IntegrityError, code="integrity.signature"):
    """The index of a hub is not signed by the key that it was signed with before."""

    @classmethod
    def for_hub(cls, hub: str, seen: str) -> Self:
        hint = "ask its owner; if the key is a new one: --accept-new-digest"
        return cls(f"the index of {hub} {seen}.", hint=hint)


class ArtifactSignatureError(SignatureError, code="integrity.artifact_signature"):
    """An artifact has no valid signature of a known key, and one is required; the `code` of each
    error says why, such as `signature.missing`."""

    @classmethod
    def of(cls, what: str, code: str, seen: str) -> Self:
        """`code` begins with `signature.`; `seen` follows the name of the artifact."""
        error = cls(f"{what} {seen}.", hint=_SIGNATURE_HINTS.get(code, "do not use this copy"))
        error.code = code
        return error


_SIGNATURE_HINTS = {
    "signature.missing": "ask its publisher to sign it, or do without --require-signature",
    "signature.unknown_key": "name the file of its publisher's public key: --key PUBLIC.pem",
    "signature.not_checked": "install the extra `sign`",
    "signature.expired": "ask its publisher for a version signed with a newer key",
    "signature.format": "ask its publisher to sign it with a current release",
    "signature.added_file": "move other files away, or pull it again",
}


class FrozenIndex(IntegrityError, code="integrity.frozen"):
    """The timestamp of a hub has expired: its owner stopped, or somebody serves an old state."""

    @classmethod
    def for_hub(cls, hub: str, expired: str) -> Self:
        why = "its owner did not renew it, or an old state is served"
        hint = "ask its owner; to use it all the same: --allow-downgrade"
        return cls(f"the index of {hub} was valid until {expired}: {why}.", hint=hint)


class RollbackError(IntegrityError, code="integrity.rollback"):
    """A hub offers an older index than it did before."""

    @classmethod
    def for_serial(cls, hub: str, seen: int, offered: int) -> Self:
        hint = "ask its owner; if that is intended: --allow-downgrade"
        return cls(f"the index of {hub} went back from serial {seen} to {offered}.", hint=hint)


# A model, and computing an artifact for it


class UnsupportedModel(OscarZooError, code="unsupported.model"):
    """A model whose attention this version cannot handle."""


class InvalidModel(OscarZooError, code="model"):
    """A model folder without weights, configuration or tokenizer."""


class GeometryMismatch(OscarZooError, ValueError, code="geometry"):
    """An artifact made for another shape of model."""


class NotEnoughMemory(OscarZooError, MemoryError, code="memory"):
    """A model is larger than the device it should run on."""

    @classmethod
    def for_model(cls, model: str, need: int, device: str, free: int, *, hint: str) -> Self:
        needs, has = _gigabytes(need), _gigabytes(free)
        return cls(f"{model} needs about {needs} GB on {device}, {has} GB are free.", hint=hint)


def _gigabytes(number: int) -> str:
    value = number / 1e9
    return f"{value:.0f}" if value >= 10 else f"{value:.1f}" if value >= 0.1 else f"{value:.3f}"


class ComputeFailed(OscarZooError, code="compute"):
    """Calibration or fitting cannot give a trustworthy result."""

    @classmethod
    def incomplete(cls, what: str) -> Self:
        hint = "nothing was written; report the model"
        return cls(f"the capture is incomplete: {what}.", hint=hint)


# This machine: its files, its libraries and the servers on it


class UnsupportedMachine(OscarZooError, code="unsupported.machine"):
    """This machine, or something installed on it, cannot run what was asked for."""


class MissingDependency(OscarZooError, code="missing_dependency"):
    """An optional library is needed and not installed."""

    @classmethod
    def for_extra(cls, library: str, extra: str) -> Self:
        return cls(f"this needs {library}, which is not installed.", next_step=Install(extra))


class PathNotFound(NotFoundError, code="not_found.path"):
    """A file or folder that was named does not exist."""

    @classmethod
    def for_path(cls, path: object, what: str = "file or folder") -> Self:
        return cls(f"no such {what}: {path}", hint="check the path")


class OutputExists(ConflictError, code="conflict.output"):
    """Something else is at the place where the result should go."""


class StorageError(OscarZooError, OSError, code="storage"):
    """The local disk is full, broken or read-only, or a file belongs to somebody else."""

    @classmethod
    def for_os(
        cls, what: str, error: OSError, *, otherwise: str = "run the same command again"
    ) -> Self:
        hint = _DISK_HINTS.get(error.errno or 0, otherwise)
        return cls(f"{what}: {error.strerror or error}.", hint=hint)


_PATH = ("EISDIR", "ENOTDIR", "EEXIST", "ENOENT", "ELOOP", "ENAMETOOLONG")
_DISK = ("EIO", "ESTALE", "ETIMEDOUT")
_DISK_HINTS: Mapping[int, str] = {
    errno.ENOSPC: "free some space, then run the same command again",
    errno.EDQUOT: "your disk quota is used up; free some space, then run the same command again",
    errno.EROFS: "the file system is read-only; choose another folder",
    errno.EMFILE: "too many files are open in this process; raise the limit: ulimit -n 4096",
    **dict.fromkeys((errno.EACCES, errno.EPERM), "check who owns it and its permissions"),
    **{getattr(errno, name): "check the path, and each of its parts" for name in _PATH},
    **{getattr(errno, name): "the disk does not work; see the system's log" for name in _DISK},
}


class ForeignFolder(AccessError, code="access.owner"):
    """A folder that must be this user's own belongs to another one."""


class ServerNotFound(NotFoundError, code="not_found.server"):
    """No server of this name or port runs here."""


class PortInUse(ConflictError, code="port_in_use"):
    """Another process listens on the wanted port."""


class ServerFailed(OscarZooError, code="server"):
    """The inference server did not start, or died."""

    @classmethod
    def for_silence(cls, server: str, error: Exception) -> Self:
        cause = getattr(error, "strerror", None) or str(error) or type(error).__name__
        if isinstance(error, ConnectionRefusedError):
            cause = "nobody listens there"
        said = f"{server} does not answer: {cause}."
        return cls(said, hint="see what runs on this machine: oscar-zoo ps")


class FlagRefused(ServerFailed, UsageError, code="usage.engine_flag"):
    """A flag that the user gave to the inference server is unknown to it, or has a bad value."""

    @classmethod
    def for_flags(cls, why: str, log: object | None = None, engine: str = "SGLang") -> Self:
        where = "" if log is None else f"; log: {log}"
        told = {"SGLang": "python -P -m sglang.launch_server --help", "vLLM": "vllm serve --help"}
        hint = f"its flags: {told[engine]}{where}"
        return cls(f"{engine} does not take the flags behind --: {why}.", hint=hint)
