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
    """Facts about an alternative that need none of its code: `widths` are the bits that may follow
    the name. Exact `windows` of first and last tokens are those of the recipe, which the method as
    published does not have (`lent`), some of its own, or none. `made_by` is a `module:function` of
    this package, from bits (`bits` where the name has none) and a `Subject` to a cache; by default
    the function of that name in `formats`."""

    name: str
    title: str
    source: str | None
    widths: tuple[float, ...] = ()
    bits: float | None = None
    windows: Literal["lent", "own", "none"] | None = "lent"
    made_by: str = ""


_INT, _KIVI, _TURBO = "arXiv 2605.17757", "arXiv 2402.02750", "arXiv 2504.19874"
_OMNI, _SGLANG, _INTEGERS = "arXiv 2605.19660", "SGLang 0.5.21", "caches:integers"
_CLIP, _OWN = "caches:hadamard_clipped", "caches:transformed"
_ROWS = (
    AlternativeRow("fp8", "FP8 e4m3", _SGLANG, windows="none"),
    AlternativeRow("fp8-scaled", "FP8 e4m3, scaled", _SGLANG, windows="none"),
    AlternativeRow("int4", "INT4", _INT, bits=4, made_by=_INTEGERS),
    AlternativeRow("k4v2", "INT, K4V2", _INT, bits=3, made_by=_INTEGERS),
    AlternativeRow("int2", "INT2", _INT, bits=2, made_by=_INTEGERS),
    AlternativeRow("hadamard", "Hadamard", _INT, (2, 3, 4), made_by="caches:hadamard"),
    AlternativeRow("hadamard-clip", "Hadamard, clipped", _INT, bits=2, made_by=_CLIP),
    AlternativeRow("kivi", "KIVI", _KIVI, (2, 4), windows="own"),
    AlternativeRow("kivi-windows", "KIVI, our windows", _KIVI, (2, 4)),
    AlternativeRow("kivi-token", "KIVI, keys per token", _KIVI, (2, 4), windows="own"),
    AlternativeRow("omni-scaled", "OScaR of Su et al.", _OMNI, (2, 4), windows="own"),
    AlternativeRow("turboquant", "TurboQuant", _TURBO, (2, 2.5, 3, 3.5, 4)),
    AlternativeRow("turboquant-prod", "TurboQuant, products", _TURBO, (2, 3, 4)),
    AlternativeRow("lmdeploy", "LMDeploy K4V2", "LMDeploy PR 4510"),
    AlternativeRow(OWN, "This artifact", _INT, (2, 3, 4), windows="own", made_by=_OWN),
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
        place = self.row.made_by or f"formats:{self.row.name.replace('-', '_')}"
        make: Any = pkgutil.resolve_name(f"{__package__}.{place}")
        bits = self.row.bits if self.bits is None else self.bits
        cache: Alternative | CacheSpec = make(bits, subject)
        cache.check(subject.geometry)
        return cache


BF16 = Choice(AlternativeRow("bf16", "BF16", None, windows=None))


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
