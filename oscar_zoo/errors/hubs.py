"""Errors of a hub: it lacks something, refuses, or cannot be reached."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

from oscar_zoo.errors.base import AccessError, ConflictError, NetworkError, NotFoundError
from oscar_zoo.next_step import Login


class RepositoryNotFound(NotFoundError):
    """A hub does not have the repository, or hides it from this user."""

    code = "not_found.repository"

    @classmethod
    def for_hub(cls, hub: str) -> Self:
        """Build the error for a repository `hub` that is missing, or hidden from the account that
        asks."""
        return cls(
            f"{hub} does not exist, or this account may not see it.",
            hint="check the name of the hub; which account asks: oscar-zoo doctor",
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


class HubUnreachable(NetworkError):
    """A hub could not be reached, broke off, or answered with a server error."""

    code = "network.unreachable"

    @classmethod
    def for_hub(cls, hub: str, cause: str) -> Self:
        """Build the error naming `hub` and the `cause` in a few words, such as
        `connection refused`."""
        hint = "check the connection; here already: oscar-zoo list --installed"
        return cls(f"{hub} cannot be reached: {cause}.", hint=hint)

    @classmethod
    def for_unknown(cls, name: str, said: Sequence[str], close: Sequence[str] = ()) -> Self:
        """Build the error for a `name` that this machine does not know, where hubs that may have it
        did not answer.

        Args:
            close: names that are known here, best first.
        """
        facts = "; ".join(text.rstrip(".") for text in said)
        return cls(
            f"{name} is unknown on this machine, and not every hub can be asked: {facts}.",
            hint="or check the network" if close else "check the network",
            suggestions=close,
        )


class UnusableEnvironment(NetworkError):
    """Variables of the environment, such as those of a proxy, let no connection be made."""

    code = "network.environment"

    @classmethod
    def of(cls, what: str, variables: Sequence[str], hint: str) -> Self:
        """Build the error for a `what` (`proxy`, `certificate`) that `variables` set and that
        cannot be used. Their values, which may hold a password, are not shown."""
        found = ", ".join(variables) or "no details"
        return cls(f"the {what} of the environment cannot be used: {found}.", hint=hint)


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


class StaleRevision(ConflictError):
    """A hub moved on between reading and writing.

    `placed` says that the version of the change was written, and its root files were not.
    """

    code = "conflict.stale"
    placed = False

    @classmethod
    def for_hub(cls, hub: str, *, placed: bool = False) -> Self:
        """Build the error for a change that was made for an older state of `hub`."""
        written = (
            "the version is there, and not in the index yet" if placed else "nothing was written"
        )
        error = cls(
            f"{hub} changed while this was being published.", hint=f"{written}; run it again"
        )
        error.placed = placed
        return error
