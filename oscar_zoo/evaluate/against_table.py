"""The caches that `eval --against` knows, one row each, and which of several are Pareto-optimal.

A new one is a function in `formats.py`, and a row here. Reading the table needs no torch.
"""

from __future__ import annotations

import math
import pkgutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from oscar_zoo.errors import UsageError

if TYPE_CHECKING:
    from oscar_zoo.evaluate.formats import Alternative, Subject
    from oscar_zoo.evaluate.outcome import AgainstRow
    from oscar_zoo.evaluate.simulated_cache import CacheSpec

ALL = "all"
OWN = "artifact"
"""The artifact itself."""
LONG = "32768"
"""Tokens of the long sequence of tables and charts, as a key of `bits_per_element_at`."""


@dataclass(frozen=True)
class AlternativeRow:
    """Facts about an alternative that need none of its code: `made_by` is a `module:function` of
    this package, from bits and a `Subject` to a cache; `widths` are the bits that may follow the
    name, and `bits` those that the function is given without them. Exact `windows` of first and
    last tokens are those of the recipe, which the method as published does not have (`lent`), some
    of its own, or none."""

    name: str
    title: str
    made_by: str
    source: str | None
    widths: tuple[float, ...] = ()
    bits: float | None = None
    windows: Literal["lent", "own", "none"] | None = "lent"


_INT, _KIVI, _TURBO = "arXiv 2605.17757", "arXiv 2402.02750", "arXiv 2504.19874"
_OMNI = "arXiv 2605.19660"
_ROWS = (
    AlternativeRow("fp8", "FP8 e4m3", "formats:fp8", "SGLang 0.5.21", windows="none"),
    AlternativeRow(
        "fp8-scaled", "FP8 e4m3, scaled", "formats:fp8_scaled", "SGLang 0.5.21", windows="none"
    ),
    AlternativeRow("int4", "INT4", "caches:integers", _INT, bits=4),
    AlternativeRow("k4v2", "INT, K4V2", "caches:integers", _INT, bits=3),
    AlternativeRow("int2", "INT2", "caches:integers", _INT, bits=2),
    AlternativeRow("hadamard", "Hadamard", "caches:hadamard", _INT, (2, 3, 4)),
    AlternativeRow("hadamard-clip", "Hadamard, clipped", "caches:hadamard_clipped", _INT, bits=2),
    AlternativeRow("kivi", "KIVI", "formats:kivi", _KIVI, (2, 4), windows="own"),
    AlternativeRow("kivi-windows", "KIVI, our windows", "formats:kivi_windows", _KIVI, (2, 4)),
    AlternativeRow(
        "kivi-token", "KIVI, keys per token", "formats:kivi_token", _KIVI, (2, 4), windows="own"
    ),
    AlternativeRow(
        "omni-scaled", "OScaR of Su et al.", "formats:omni_scaled", _OMNI, (2, 4), windows="own"
    ),
    AlternativeRow("turboquant", "TurboQuant", "formats:turboquant", _TURBO, (2, 2.5, 3, 3.5, 4)),
    AlternativeRow(
        "turboquant-prod", "TurboQuant, products", "formats:turboquant_prod", _TURBO, (2, 3, 4)
    ),
    AlternativeRow("lmdeploy", "LMDeploy K4V2", "formats:lmdeploy", "LMDeploy PR 4510"),
    AlternativeRow(OWN, "This artifact", "caches:transformed", _INT, (2, 3, 4), windows="own"),
)
TABLE: Mapping[str, AlternativeRow] = {row.name: row for row in _ROWS}


@dataclass(frozen=True)
class Choice:
    """An alternative with its bits; `None` for the only setting, or the artifact's own."""

    row: AlternativeRow
    bits: float | None = None

    @property
    def name(self) -> str:
        """As in `--against`, such as `kivi:2`."""
        return self.row.name if self.bits is None else f"{self.row.name}:{self.bits:g}"

    @property
    def title(self) -> str:
        return self.row.title if self.bits is None else f"{self.row.title}, {self.bits:g} bits"

    def build(self, subject: Subject) -> Alternative | CacheSpec:
        """The cache, ready to be simulated; raises `UsageError` where the model does not fit."""
        make: Any = pkgutil.resolve_name(f"{__package__}.{self.row.made_by}")
        bits = self.row.bits if self.bits is None else self.bits
        cache: Alternative | CacheSpec = make(bits, subject)
        cache.check(subject.geometry)
        return cache


BF16 = Choice(AlternativeRow("bf16", "BF16", "", None, windows=None))


def choices(names: Sequence[str]) -> tuple[Choice, ...]:
    """Alternatives by `NAME`, `NAME:BITS` or `all`, each once, in the order of the table; a name
    alone means all its widths."""
    wanted = [name.strip() for name in names if name.strip()]
    known = f"known: {', '.join((*TABLE, ALL))}"
    if not wanted:
        raise UsageError("--against names nothing.", hint=known)
    every = [
        Choice(row, bits)
        for row in _ROWS  # the artifact also has its own bits
        for bits in ((None, *row.widths) if row.name == OWN else row.widths or (None,))
    ]
    for name in wanted:
        plain = name.partition(":")[0]
        if name != ALL and plain not in TABLE:
            raise UsageError(f"no alternative is called {plain!r}.", hint=known)
        if ":" in name and name not in [one.name for one in every]:
            widths = ", ".join(f"{plain}:{one:g}" for one in TABLE[plain].widths) or plain
            raise UsageError(f"{name} is not known.", hint=f"known: {widths}")
    return tuple(one for one in every if not {ALL, one.name, one.row.name}.isdisjoint(wanted))


def by_bits(rows: Sequence[AgainstRow]) -> tuple[AgainstRow, ...]:
    """Rows by their bits with windows, with the Pareto-optimal ones marked."""
    whole = pareto_optimal([(r.bits_per_element_with_windows, r.divergence) for r in rows])
    at = {
        n: pareto_optimal([(r.bits_per_element_at[n], r.divergence) for r in rows])
        for n in rows[0].bits_per_element_at
    }
    marked = [
        replace(row, pareto=whole[i], pareto_at={n: one[i] for n, one in at.items()})
        for i, row in enumerate(rows)
    ]
    return tuple(sorted(marked, key=lambda r: (r.bits_per_element_with_windows, r.divergence)))


def pareto_optimal(points: Sequence[tuple[float, float]]) -> list[bool]:
    """Whether each point, `(bits, loss)`, is one that no other equals or beats in both. Of equal
    points all are; one whose loss is not a number never is."""
    return [
        not math.isnan(loss)
        and not any(p != (bits, loss) and p[0] <= bits and p[1] <= loss for p in points)
        for bits, loss in points
    ]
