"""Every alternative: one row each.

A new one is one file beside this one and one row here; nothing else changes. Reading the table
needs no torch. The module of an alternative is imported when its cache is built.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from oscar_zoo.errors import UsageError

if TYPE_CHECKING:
    from oscar_zoo.evaluate.alternatives.base import Subject
    from oscar_zoo.evaluate.reading import Simulated

ALL = "all"
OWN = "oscar"
"""The artifact itself."""


@dataclass(frozen=True)
class AlternativeRow:
    """Facts about an alternative that need none of its code.

    Attributes:
        name: as in `--against`.
        title: for people.
        module: file of this package.
        function: of that file. It makes a cache from bits and a `Subject`.
        source: where the method is described.
        widths: bits that may follow the name; empty for one setting.
        bits: what the function is given without bits behind the name.
    """

    name: str
    title: str
    module: str
    function: str
    source: str
    widths: tuple[float, ...] = ()
    bits: float | None = None


_INT = "arXiv 2605.17757"
_KIVI, _TURBO = "arXiv 2402.02750", "arXiv 2504.19874"
TABLE: Mapping[str, AlternativeRow] = {
    row.name: row
    for row in (
        AlternativeRow("fp8", "FP8 e4m3", "fp8", "fp8", "SGLang 0.5.21"),
        AlternativeRow("int4", "INT4", "integers", "integers", _INT, bits=4),
        AlternativeRow("k4v2", "INT, K4V2", "integers", "integers", _INT, bits=3),
        AlternativeRow("int2", "INT2", "integers", "integers", _INT, bits=2),
        AlternativeRow("hadamard", "Hadamard", "integers", "hadamard", _INT, (2, 3, 4)),
        AlternativeRow(
            "hadamard-clip", "Hadamard, clipped", "integers", "hadamard_clipped", _INT, bits=2
        ),
        AlternativeRow("kivi", "KIVI", "kivi", "kivi", _KIVI, (2, 4)),
        AlternativeRow("kivi-windows", "KIVI, our windows", "kivi", "windows", _KIVI, (2, 4)),
        AlternativeRow("kivi-token", "KIVI, keys per token", "kivi", "per_token", _KIVI, (2, 4)),
        AlternativeRow(
            "turboquant", "TurboQuant", "turboquant", "turboquant", _TURBO, (2, 2.5, 3, 3.5, 4)
        ),
        AlternativeRow(
            "turboquant-prod", "TurboQuant, products", "turboquant", "prod", _TURBO, (2, 3, 4)
        ),
        AlternativeRow("lmdeploy", "LMDeploy K4V2", "lmdeploy", "lmdeploy", "LMDeploy PR 4510"),
        AlternativeRow(OWN, "This artifact", "integers", "transformed", _INT, (2, 3, 4)),
    )
}


@dataclass(frozen=True)
class Choice:
    """An alternative with its bits.

    Attributes:
        row: of the table.
        bits: that were chosen; `None` for the only setting, or the artifact's own.
    """

    row: AlternativeRow
    bits: float | None = None

    @property
    def name(self) -> str:
        """As in `--against`, such as `kivi:2`."""
        return self.row.name if self.bits is None else f"{self.row.name}:{self.bits:g}"

    @property
    def title(self) -> str:
        """For people."""
        if self.bits is None:
            return self.row.title
        return f"{self.row.title}, {self.bits:g} bits"

    def build(self, subject: Subject) -> Simulated:
        """The cache, ready to be simulated; raises `UsageError` where the model does not fit."""
        module = importlib.import_module(f"{__package__}.{self.row.module}")
        bits = self.row.bits if self.bits is None else self.bits
        cache: Simulated = getattr(module, self.row.function)(bits, subject)
        cache.check(subject.geometry)
        return cache


def choices(names: Sequence[str]) -> tuple[Choice, ...]:
    """Alternatives by name, each once, in the order of the table.

    Args:
        names: `NAME`, `NAME:BITS`, or `all`. A name alone means all its widths.
    """
    wanted = [name.strip() for name in names if name.strip()]
    if not wanted:
        raise UsageError("--against names nothing.", hint=f"known: {', '.join((*TABLE, ALL))}")
    found = {one.name: one for name in wanted for one in _of(name)}
    order = [one.name for row in TABLE.values() for one in _every(row)]
    return tuple(sorted(found.values(), key=lambda one: order.index(one.name)))


def _of(name: str) -> list[Choice]:
    if name == ALL:
        return [one for row in TABLE.values() for one in _every(row)]
    plain, colon, bits = name.partition(":")
    if plain not in TABLE:
        raise UsageError(
            f"no alternative is called {plain!r}.", hint=f"known: {', '.join((*TABLE, ALL))}"
        )
    row = TABLE[plain]
    if not colon:
        return _every(row)
    chosen = [one for one in row.widths if f"{one:g}" == bits]
    if not chosen:
        known = ", ".join(f"{plain}:{one:g}" for one in row.widths) or plain
        raise UsageError(f"{name} is not known.", hint=f"known: {known}")
    return [Choice(row, chosen[0])]


def _every(row: AlternativeRow) -> list[Choice]:
    """All settings of an alternative; the artifact also with its own bits."""
    own = [Choice(row)] if row.name == OWN or not row.widths else []
    return own + [Choice(row, bits) for bits in row.widths]
