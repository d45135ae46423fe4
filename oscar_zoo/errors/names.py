"""Errors of an artifact's name: it is unclear, unknown, not here, or taken."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Self

from oscar_zoo.errors.base import ConflictError, NetworkError, NotFoundError, UsageError
from oscar_zoo.next_step import Compute, ListNames

_UNASKED = "{} is not on this machine, and offline mode asks no hub."


WITHOUT_OPTION = "run it without --offline"
"""How to end the offline mode that the command line asked for."""
OFFLINE_OPTION = "--offline"
"""Value of `OSCAR_ZOO_OFFLINE` in a process whose command line asked for offline mode."""


def go_online() -> str:
    """How to end offline mode, as far as the environment of this process tells."""
    typed = os.environ.get("OSCAR_ZOO_OFFLINE") == OFFLINE_OPTION
    return WITHOUT_OPTION if typed else "unset HF_HUB_OFFLINE"


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
        error = cls(f"{name} is not in {lock}.")
        error.propose(f"oscar-zoo pull {name}", f"oscar-zoo pull {name} --lock")
        return error

    def propose(self, add: str, create: str) -> None:
        """Name the command line that adds the artifact to the lock of a project, and the one that
        makes a lock elsewhere."""
        elsewhere = f"; outside of a project: {create}" if create != add else ""
        self.advise(f"add it without --locked: {add}{elsewhere}")


class ArtifactNotFound(NotFoundError):
    """No known artifact has this name."""

    code = "not_found.artifact"

    @classmethod
    def for_name(cls, name: str, close: Sequence[str] = ()) -> Self:
        """Build the error for an unknown `name` with close matches, best first."""
        return cls(f"no artifact is called {name!r}.", suggestions=close, next_step=ListNames())

    @classmethod
    def among(cls, name: str, known: Sequence[str]) -> Self:
        """Build the error for an unknown version `name` of a model with other versions, `known`."""
        return cls(f"no artifact is called {name!r}.", hint=f"known: {', '.join(known)}")

    @classmethod
    def for_model(cls, name: str) -> Self:
        """Build the error for a model that the zoo knows and that nobody has a rotation for."""
        make = f"oscar-zoo pull {name} --compute"
        return cls(f"no rotation for {name} is known.", next_step=Compute(name, make))


class ScoreNotFound(NotFoundError):
    """Nobody reports a score of this benchmark."""

    code = "not_found.score"

    @classmethod
    def for_task(cls, task: str, known: Sequence[str], close: Sequence[str] = ()) -> Self:
        """Build the error for `task`; `known` are the tasks with scores, `close` those like it."""
        there = f"tasks with scores: {', '.join(known)}" if known else "nobody reports any score"
        return cls(f"no score of {task} is known.", suggestions=close, hint=there)

    @classmethod
    def for_measured(cls, task: str) -> Self:
        """Build the error for `task`, of which only what oscar-zoo measured was asked for."""
        others = f"what others report: oscar-zoo leaderboard --task {task}"
        return cls(f"no score of {task} was measured with oscar-zoo.", hint=others)


class OfflineError(NetworkError):
    """Something is needed from a hub in offline mode."""

    code = "network.offline"

    @classmethod
    def for_name(cls, name: str, *, go_online: str = WITHOUT_OPTION) -> Self:
        """Build the error for an artifact `name` that is not on this machine; `go_online` says how
        to end offline mode."""
        return cls(_UNASKED.format(name), hint=go_online)


class VersionExists(ConflictError):
    """A published version exists with other content; versions never change."""

    code = "conflict.version"
