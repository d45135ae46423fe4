"""Switches that only the test suite may use, all in one place. Needs neither torch nor sglang.

Modes: `int2` is the real thing. `lossless` keeps float32 rows in the slots in place of codes:
greedy tokens must then equal those of a stock backend, so every difference is a plumbing bug.
`poison` stores the codes of a wrong constant: with a window longer than every request nothing may
read a slot, so tokens must still be equal.

Mutants are deliberate bugs that the suite must notice; a suite that passes with one tests nothing.

The executor `kernels` runs what a GPU runs on a CPU, with Triton's interpreter.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from oscar_zoo.errors import UsageError

MODES = ("int2", "lossless", "poison")
MUTANTS = ("", "keep_stale_rows", "ring_before_attention", "partner_is_forward", "publish_early")
EXECUTORS = ("", "kernels")
ALLOW = "OSCAR_INT2_ALLOW_TEST_MODES"


@dataclass(frozen=True)
class TestKnobs:
    """The mode of the slots, the deliberate bug if any, and the executor if not that of the
    machine."""

    __test__ = False

    mode: str = "int2"
    mutant: str = ""
    executor: str = ""

    @property
    def active(self) -> bool:
        """Whether this is anything but a normal server."""
        return self != TestKnobs()

    def __str__(self) -> str:
        return "/".join(filter(None, (self.mode, self.mutant, self.executor)))


def read_knobs(environ: Mapping[str, str]) -> TestKnobs:
    """The switches in `environ`.

    Raises:
        UsageError: a switch is set without permission, or has no such value.
    """
    knobs = TestKnobs(
        environ.get("OSCAR_INT2_TEST_MODE", "int2"),
        environ.get("OSCAR_INT2_TEST_MUTANT", ""),
        environ.get("OSCAR_INT2_TEST_EXECUTOR", ""),
    )
    for value, allowed in (
        (knobs.mode, MODES),
        (knobs.mutant, MUTANTS),
        (knobs.executor, EXECUTORS),
    ):
        if value not in allowed:
            raise UsageError(
                f"{value!r} is no test mode.", hint=f"one of {', '.join(filter(None, allowed))}"
            )
    if knobs.active and environ.get(ALLOW) != "1":
        raise UsageError(
            f"test mode {knobs} is for the test suite.", hint=f"unset it, or set {ALLOW}=1"
        )
    return knobs
