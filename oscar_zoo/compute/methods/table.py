"""Every fitting method: one row each.

A new method is one `Method` in a file beside this one, and one row here; nothing else changes. The
order is that of `auto`: of two equally good methods, the earlier one asks less of an engine.
Reading the table needs no torch. The module of a method is imported when the method is asked for.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from oscar_zoo.errors import UsageError

if TYPE_CHECKING:
    from oscar_zoo.artifact.specs import Capability
    from oscar_zoo.compute.methods.base import Method


@dataclass(frozen=True)
class MethodRow:
    """Facts about a method that need none of its code.

    Attributes:
        place: `module:name` of its `Method` in this package.
        requires: what an engine must be able to do to serve the result.
        tuned: whether it reads rows of the model besides the moments.
        publishable: whether an artifact may hold the result; a baseline is only measured.
        variant_of: the method that it refines. Rule `auto` treats the two as one method.
    """

    place: str
    requires: tuple[Capability, ...] = ()
    tuned: bool = False
    publishable: bool = True
    variant_of: str | None = None


WUSH_REQUIRES: tuple[Capability, ...] = ("per_head", "k_partner", "v_partner")
TABLE: Mapping[str, MethodRow] = {
    "identity": MethodRow("rotations:IDENTITY", publishable=False),
    "hadamard": MethodRow("rotations:HADAMARD"),
    "oscar": MethodRow("rotations:OSCAR"),
    "oscar-exact": MethodRow("rotations:OSCAR_EXACT"),
    "oscar-per-head": MethodRow("rotations:OSCAR_PER_HEAD", requires=("per_head",)),
    "wush": MethodRow("wush:METHOD", requires=WUSH_REQUIRES),
    "wush-tuned": MethodRow("tuned:METHOD", WUSH_REQUIRES, tuned=True, variant_of="wush"),
}


class Methods(Mapping[str, "Method"]):
    """Methods by name, in the order of the table. Each is imported when it is first looked up."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = tuple(names)

    def __getitem__(self, name: str) -> Method:
        if name not in self._names:
            raise KeyError(name)
        module, _, attribute = TABLE[name].place.partition(":")
        method: Method = getattr(importlib.import_module(f"{__package__}.{module}"), attribute)
        return method

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


METHODS = Methods([name for name, row in TABLE.items() if not row.tuned])
"""Methods that need only moments."""
TUNED = Methods([name for name, row in TABLE.items() if row.tuned])
"""Methods that also read rows of the model."""


def find_method(name: str) -> Method:
    """The method called `name`; raises `UsageError`."""
    if name not in TABLE:
        raise UsageError(f"no method is called {name!r}.", hint=f"methods: {', '.join(TABLE)}")
    return (TUNED if TABLE[name].tuned else METHODS)[name]


def main_method(name: str) -> str:
    """The method that `name` refines, or `name` itself."""
    return TABLE[name].variant_of or name
