"""Ways to run one INT2 server that must not change its results: chunk and page size, prefix cache, tensor parallel.

A sweep covers every pair of values with as few servers as a greedy choice finds; differences that need three values at
once are for the full product. Pure.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import astuple, dataclass

from oscar_zoo.errors import UsageError

MOST = 64
"""Combinations of values."""
OWN_FLAGS = (
    "--chunked-prefill-size",
    "--page-size",
    "--disable-radix-cache",
    "--tp",
    "--tp-size",
    "--tensor-parallel-size",
    "--dtype",
)


@dataclass(frozen=True)
class Variant:
    """One server.

    Attributes:
        chunk: tokens prefilled at once.
        page_size: tokens of a page of the cache.
        radix: whether prefixes are reused.
        tp: tensor-parallel ranks.
    """

    chunk: int = 512
    page_size: int = 1
    radix: bool = True
    tp: int = 1

    def __str__(self) -> str:
        return f"chunk {self.chunk}, page {self.page_size}, radix {'on' if self.radix else 'off'}, tp {self.tp}"

    @property
    def flags(self) -> tuple[str, ...]:
        """For the engine's command line."""
        flags = (f"--chunked-prefill-size={self.chunk}", f"--page-size={self.page_size}", f"--tp-size={self.tp}")
        return flags if self.radix else (*flags, "--disable-radix-cache")

    def environment(self, device: str) -> dict[str, str]:
        """Variables that the engine needs for it: on a CPU, which core is whose."""
        if device != "cpu" or self.tp == 1:
            return {}
        return {"SGLANG_CPU_OMP_THREADS_BIND": "|".join(map(str, range(self.tp)))}


def variants(
    chunks: Sequence[int], pages: Sequence[int], radix: Sequence[bool], tps: Sequence[int], *, full: bool = False
) -> tuple[Variant, ...]:
    """Servers that have every pair of the given values, or every combination with `full`; the first has the first ones.

    Raises:
        UsageError: a chunk is not a whole number of pages, or there are too many combinations.
    """
    for chunk, page in itertools.product(chunks, pages):
        if chunk % page:
            raise UsageError(f"chunks of {chunk} tokens are not whole pages of {page}.", hint="choose a multiple")
    every = [Variant(*values) for values in itertools.product(chunks, pages, radix, tps)]
    if len(every) > MOST:
        raise UsageError(f"{len(every)} combinations are more than {MOST}.", hint="give fewer values")
    if full:
        return tuple(every)
    turned = (every[1:][number:] + every[1:][:number] for number in range(len(every)))
    return min((_cover([every[0], *others]) for others in turned), key=len)


def _cover(every: Sequence[Variant]) -> tuple[Variant, ...]:
    """The first, then always the one with the most pairs of values that none before has, until all are there."""
    chosen = [every[0]]
    missing = {part for variant in every for part in _parts(variant, every)} - _parts(every[0], every)
    while missing:
        chosen.append(max(every, key=lambda variant: len(missing & _parts(variant, every))))
        missing -= _parts(chosen[-1], every)
    return tuple(chosen)


def _parts(variant: Variant, every: Sequence[Variant]) -> set[tuple[tuple[int, object], ...]]:
    """Its pairs of values, of what is not the same everywhere; where only one thing differs, its value."""
    rows = [astuple(one) for one in every]
    values = [(i, value) for i, value in enumerate(astuple(variant)) if any(row[i] != value for row in rows)]
    return set(itertools.combinations(values, min(2, len(values)))) - {()}


def check_flags(extra: Sequence[str]) -> None:
    """Refuse engine flags that a variant sets itself; raises `UsageError`."""
    for token in extra:
        name = token.split("=", 1)[0].replace("_", "-")
        if len(name) > 3 and any(own.startswith(name) for own in OWN_FLAGS):
            raise UsageError(
                f"{name} is not allowed after --: use --chunk, --page-size, --radix, --tp or --dtype.",
                hint="oscar-zoo eval --help",
            )
