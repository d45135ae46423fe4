"""Errors of content: bytes are not what a digest, a format or a check says they must be."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self

from oscar_zoo.errors.base import IntegrityError


class MalformedFile(IntegrityError, ValueError):
    """A file breaks the rules of its format."""

    code = "integrity.malformed"

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


class SignatureError(IntegrityError):
    """The index of a hub is not signed by the key that it was signed with before."""

    code = "integrity.signature"

    @classmethod
    def for_hub(cls, hub: str, seen: str) -> Self:
        """Build the error for an index of `hub` that `seen`."""
        return cls(
            f"the index of {hub} {seen}.",
            hint="ask its owner; if the key is a new one: --accept-new-digest",
        )


class ArtifactSignatureError(SignatureError):
    """An artifact has no valid signature of a known key, and one is required; the `code` of each
    error says why, such as `signature.missing`."""

    code = "integrity.artifact_signature"

    @classmethod
    def of(cls, what: str, code: str, seen: str) -> Self:
        """Build the error for the artifact `what` that `seen`; `code` begins with `signature.`."""
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


class FrozenIndex(IntegrityError):
    """The timestamp of a hub has expired: its owner stopped, or somebody serves an old state."""

    code = "integrity.frozen"

    @classmethod
    def for_hub(cls, hub: str, expired: str) -> Self:
        """Build the error for a timestamp that `expired`."""
        return cls(
            f"the index of {hub} was valid until {expired}: its owner did not renew it, or an old"
            " state is served.",
            hint="ask its owner; to use it all the same: --allow-downgrade",
        )


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
