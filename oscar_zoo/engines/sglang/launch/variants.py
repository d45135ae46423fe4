"""Settings of an INT2 server that must not change its results: chunk and page size, prefix cache
and tensor parallelism.

A sweep covers every pair of values with as few servers as a greedy choice finds. A difference that
needs three values at once shows only in the full product. Pure.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Any

from oscar_zoo.engines.sglang.launch.user_flags import TENSOR_PARALLEL, UserFlags
from oscar_zoo.errors import UsageError

MOST = 64
"""Combinations of values."""
OWN_FLAGS = (
    *TENSOR_PARALLEL,
    *"--chunked-prefill-size --page-size --disable-radix-cache --dtype".split(),
)


@dataclass(frozen=True)
class ServerVariant:
    chunk: int = 512  # tokens prefilled at once
    page_size: int = 1  # tokens of a page of the cache
    radix: bool = True  # whether prefixes are reused
    tp: int = 1  # tensor-parallel ranks

    def __str__(self) -> str:
        radix = "on" if self.radix else "off"
        return f"chunk {self.chunk}, page {self.page_size}, radix {radix}, tp {self.tp}"

    @property
    def flags(self) -> tuple[str, ...]:
        flags = (
            f"--chunked-prefill-size={self.chunk}",
            f"--page-size={self.page_size}",
            f"--tp-size={self.tp}",
        )
        return flags if self.radix else (*flags, "--disable-radix-cache")

    def environment(self, device: str) -> dict[str, str]:
        """Variables that the engine needs for it: on a CPU, the core of every rank."""
        if device != "cpu" or self.tp == 1:
            return {}
        return {"SGLANG_CPU_OMP_THREADS_BIND": "|".join(map(str, range(self.tp)))}


def variants(
    chunks: Sequence[int],
    pages: Sequence[int],
    radix: Sequence[bool],
    tps: Sequence[int],
    *,
    full: bool = False,
) -> tuple[ServerVariant, ...]:
    """Servers that together have every pair of the given values, or every combination with `full`.
    The first server has the first values."""
    for chunk, page in itertools.product(chunks, pages):
        if chunk % page:
            raise UsageError(
                f"chunks of {chunk} tokens are not whole pages of {page}.", hint="choose a multiple"
            )
    every = [ServerVariant(*values) for values in itertools.product(chunks, pages, radix, tps)]
    if len(every) > MOST:
        raise UsageError(
            f"{len(every)} combinations are more than {MOST}.", hint="give fewer values"
        )
    if full:
        return tuple(every)
    values = [astuple(one) for one in every]
    differing = [i for i, column in enumerate(zip(*values, strict=True)) if len(set(column)) > 1]
    # Pairs of the values that differ, or single values if only one setting differs.
    parts = [
        {*itertools.combinations([(i, row[i]) for i in differing], min(2, len(differing)))} - {()}
        for row in values
    ]
    orders = (
        [0, *range(1 + first, len(every)), *range(1, 1 + first)] for first in range(len(every))
    )
    return tuple(every[i] for i in min((_cover(parts, order) for order in orders), key=len))


def _cover(parts: Sequence[set[tuple[Any, ...]]], order: Sequence[int]) -> list[int]:
    """The first of `order`, then always the one with the most missing parts, until all are in."""
    chosen = [order[0]]
    missing = set().union(*parts) - parts[order[0]]
    while missing:
        chosen.append(max(order, key=lambda i: len(missing & parts[i])))
        missing -= parts[chosen[-1]]
    return chosen


def check_flags(flags: UserFlags) -> None:
    """Refuse engine flags that a variant sets itself; raises `UsageError`."""
    for name in (flag.name for flag in flags.given):
        if len(name) > 3 and any(own.startswith(name) for own in OWN_FLAGS):
            raise UsageError(
                f"{name} is not allowed after --: use --chunk, --page-size, --radix, --tp or"
                " --dtype.",
                hint="try: oscar-zoo eval --help",
            )
