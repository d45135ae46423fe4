"""The root of every error, and the six branches that decide the exit code of the command line."""

from __future__ import annotations

from collections.abc import Sequence

from oscar_zoo.next_step import NextStep, rendered


class OscarZooError(Exception):
    """Base of every error this library raises on purpose.

    The words of `message` and `hint` are for people. A program decides by the class, the `code` and
    the data.

    Args:
        message: one line, cause and value seen; no secrets.
        hint: advice in words, or `None`.
        suggestions: names that may have been meant, best first; a path is a `SuggestedPath`.
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
    """A hub did not answer, or offline mode forbids asking.

    `said` is what the hubs said, where the message begins with what was looked for.
    """

    code = "network"
    said: str | None = None


class AccessError(OscarZooError, PermissionError):
    """A hub refused (no token, wrong token, gated), or a folder is another user's."""

    code = "access"


class ConflictError(OscarZooError):
    """Something else is already at the place where this should be written."""

    code = "conflict"
