"""From arrival times of streamed tokens to the figures of a case. Pure.

Decoding is timed while all requests of a batch run: from the first token of the last request to the
end of the first one. The first quarter of the tokens in between is left out as warm-up. A case that
is measured several times has the medians of its figures, and the smallest and the largest of each.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

Arrivals = Sequence[tuple[float, int]]
"""One request: pairs of seconds since all were sent and tokens by then; both ascend."""


@dataclass(frozen=True)
class Figures:
    """The figures of one repeat of a case, or their medians over several.

    Attributes:
        ttft_s: seconds until the last request of the batch has its first token.
        ttft_median_s: the median over the requests.
        ms_per_token: median of the time between two tokens of a request, milliseconds; `None` with
            too few tokens.
        tokens_per_second: new tokens of all requests together over the same stretch; `None` with
            too few tokens.
    """

    ttft_s: float
    ttft_median_s: float
    ms_per_token: float | None
    tokens_per_second: float | None


NUMBERS = tuple(each.name for each in fields(Figures))
"""The names of the figures."""


def figures(requests: Sequence[Arrivals]) -> Figures:
    """The figures of one batch.

    Args:
        requests: one entry per request, each with at least one arrival.
    """
    firsts = [arrivals[0][0] for arrivals in requests]
    begin, end = max(firsts), min(arrivals[-1][0] for arrivals in requests)
    steady = [
        _last_three_quarters([a for a in arrivals if begin <= a[0] <= end]) for arrivals in requests
    ]
    gaps = [gap for arrivals in steady for gap in _gaps(arrivals)]
    rates = [rate for arrivals in steady if (rate := _rate(arrivals)) is not None]
    return Figures(
        ttft_s=begin,
        ttft_median_s=statistics.median(firsts),
        ms_per_token=1000 * statistics.median(gaps) if gaps else None,
        tokens_per_second=sum(rates) if len(rates) == len(requests) else None,
    )


def medians(repeats: Sequence[Figures]) -> Figures:
    """The median of each figure over the repeats that have it.

    Args:
        repeats: at least one.
    """
    found = {name: statistics.median(seen) for name in NUMBERS if (seen := _seen(repeats, name))}
    return Figures(**{name: found.get(name) for name in NUMBERS})  # type: ignore[arg-type]


def spread(repeats: Sequence[Figures]) -> dict[str, tuple[float, float]]:
    """The smallest and the largest value of each figure, by its name, where there is one."""
    return {name: (min(seen), max(seen)) for name in NUMBERS if (seen := _seen(repeats, name))}


def _seen(repeats: Sequence[Figures], name: str) -> list[float]:
    values = (getattr(one, name) for one in repeats)
    return [value for value in values if value is not None]


def _last_three_quarters(arrivals: Arrivals) -> Arrivals:
    return arrivals[len(arrivals) // 4 :]


def _gaps(arrivals: Arrivals) -> Iterator[float]:
    """Seconds per token between neighbours; tokens that arrive together share their time."""
    for (earlier, fewer), (later, more) in itertools.pairwise(arrivals):
        yield from [(later - earlier) / (more - fewer)] * (more - fewer)


def _rate(arrivals: Arrivals) -> float | None:
    if len(arrivals) < 2:
        return None
    seconds = arrivals[-1][0] - arrivals[0][0]
    return (arrivals[-1][1] - arrivals[0][1]) / seconds if seconds > 0 else None
