"""Switches that only the test suite may use, all in one place. Needs neither torch nor sglang.

Modes: `int2` is the real thing. `lossless` keeps float32 rows in the slots in place of codes: greedy tokens must then
equal those of a stock backend, so every difference is a plumbing bug. `poison` stores the codes of a wrong constant:
with a window longer than every request nothing may read a slot, so tokens must still be equal.

Mutants are deliberate bugs that the suite must notice; a suite that passes with one tests nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from oscar_zoo.errors import UsageError

MODES = ("int2", "lossless", "poison")
MUTANTS = ("", "keep_stale_rows", "ring_before_attention", "partner_is_forward", "publish_early")
ALLOW = "OSCAR_INT2_ALLOW_TEST_MODES"


@dataclass(frozen=True)
class TestKnobs:
    """The mode of the slots and the deliberate bug, if any."""

    __test__ = False

    mode: str = "int2"
    mutant: str = ""

    @property
    def active(self) -> bool:
        """Whether this is anything but a normal server."""
        return self != TestKnobs()

    def __str__(self) -> str:
        return f"{self.mode}{'/' + self.mutant if self.mutant else ''}"


def read_knobs(environ: Mapping[str, str]) -> TestKnobs:
    """The switches in `environ`.

    Raises:
        UsageError: a switch is set without permission, or has no such value.
    """
    knobs = TestKnobs(environ.get("OSCAR_INT2_TEST_MODE", "int2"), environ.get("OSCAR_INT2_TEST_MUTANT", ""))
    for value, allowed in ((knobs.mode, MODES), (knobs.mutant, MUTANTS)):
        if value not in allowed:
            raise UsageError(f"{value!r} is no test mode.", hint=f"one of {', '.join(filter(None, allowed))}")
    if knobs.active and environ.get(ALLOW) != "1":
        raise UsageError(f"test mode {knobs} gives wrong answers on purpose.", hint=f"unset it, or set {ALLOW}=1")
    return knobs
