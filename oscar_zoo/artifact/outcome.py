"""The outcomes of verification: a closed union of five.

`Verified.level` is the highest stage that really ran; text for people never says "verified" without
it.
"""

from __future__ import annotations

from dataclasses import dataclass
from shlex import quote
from typing import TYPE_CHECKING, Literal, NoReturn, assert_never

from oscar_zoo.artifact.digest import FileDigest
from oscar_zoo.errors import VerificationFailed

if TYPE_CHECKING:  # formats need numpy, and a pull of an installed artifact does not
    from oscar_zoo.artifact.formats import RotationSet
    from oscar_zoo.artifact.manifest import Manifest

Level = Literal["structural", "numeric", "statistics", "probe"]
Grade = Literal["fp64", "fp32"]
State = Literal["ok", "warning", "failed", "not checked"]


@dataclass(frozen=True)
class Check:
    """One line of a report: a stage of verification and what it found.

    It may also say why the stage did not run.
    """

    name: str
    state: State
    detail: str


@dataclass(frozen=True)
class Verified:
    """Every check that could run passed. The rotation sets hold exactly the bytes that were
    hashed, and the manifest, where there is one, is the one that was checked."""

    level: Level
    grade: Grade
    warnings: tuple[str, ...]
    checks: tuple[Check, ...]
    files: tuple[FileDigest, ...]
    digest: str
    k: RotationSet | None
    v: RotationSet | None
    manifest: Manifest | None = None


@dataclass(frozen=True)
class DigestMismatch:
    """Bytes differ from what a manifest, a lock or the caller promised (stage 1)."""

    path: str
    want: str
    got: str
    checks: tuple[Check, ...] = ()


@dataclass(frozen=True)
class Rejected:
    """A check failed: the artifact must not be used. `code` is stable."""

    stage: str
    code: str
    message: str
    path: str | None = None
    layer: int | None = None
    head: int | None = None
    measured: float | None = None
    limit: float | None = None
    checks: tuple[Check, ...] = ()


@dataclass(frozen=True)
class Unsupported:
    """A kind of file we recognise and do not load."""

    kind: str
    reason: str
    checks: tuple[Check, ...] = ()


@dataclass(frozen=True)
class Unreadable:
    """The bytes could not be read at all; `hint` says what to do, where that is known."""

    cause: str
    path: str | None = None
    checks: tuple[Check, ...] = ()
    hint: str | None = None


Failure = DigestMismatch | Rejected | Unsupported | Unreadable
Outcome = Verified | Failure


def why(failure: Failure) -> str:
    """The cause in one clause without a full stop, for messages."""
    match failure:
        case DigestMismatch(path, want, got):
            return f"{path} has {got}, expected {want}"
        case Rejected():
            return f"{failure.message.rstrip('.')} ({failure.code})"
        case Unsupported(kind, reason):
            return f"{kind} is not supported: {reason.rstrip('.')}"
        case Unreadable(cause):
            return cause.rstrip(".")
        case _:
            assert_never(failure)


def failed_verification(name: str, failure: Failure) -> str:
    """A warning about the artifact `name`, which is as for `refuse`."""
    return f"{name} failed verification: {why(failure)}; details: oscar-zoo verify {quote(name)}"


def refuse(name: str, outcome: Failure) -> NoReturn:
    """Raise the error for an outcome that is not `Verified`; `name` is as people type it, a folder
    as `path_text`.

    Raises:
        VerificationFailed: always.
    """
    step = outcome.hint if isinstance(outcome, Unreadable) else None
    raise VerificationFailed(
        f"{name} failed verification: {why(outcome)}.",
        hint=step or f"do not use this copy; details: oscar-zoo verify {quote(name)}",
        outcome=outcome,
    )


WARNINGS = {
    "pair.unproven": "nothing in the files says that K and V come from one fit",
    "pair.tokens": "K and V were calibrated on different numbers of tokens",
    "role.label": "a file's objective names the other side",
    "role.unknown": "neither content nor name says which side a file is",
    "role.file_name": "a file's name says another side than its content",
    "numeric.fp32_grade": (
        "orthogonal to float32 rounding only: fitted or saved in single precision"
    ),
    "numeric.condition": "a transform is badly conditioned; check the accuracy of the served model",
    "eigenvalues.missing": "no eigenvalues, so the statistics can never be checked",
    "eigenvalues.tied": "equal eigenvalues: the order of their columns is arbitrary",
    "layers.not_checked": (
        "the layers have gaps, as in a hybrid model; name the model to check them: --model"
    ),
    "content.uresidual": "the published `uresidual` method is transposed; expect no gain from it",
    "localisation.k": "K does not look like a calibrated rotation",
    "localisation.v": "V does not look like a calibrated rotation",
    "localisation.order": "V is more localised than K, which no real pair shows",
}
"""The meaning of each warning code of verification, in words for people."""


def warning_text(code: str) -> str:
    """The sentence for a warning code, or the code itself when it is new."""
    return WARNINGS.get(code, code)
