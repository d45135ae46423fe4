"""Numbers as the pages write them, the same words as `list` and `info`."""

from __future__ import annotations

from oscar_zoo.artifact.specs import Score

UNKNOWN = "not reported"
NONE = "–"
"""In a table, where `UNKNOWN` would be all that a column says."""
_THIN = "\u202f"


def value_of(score: Score | None, *, unit: bool = False) -> str | None:
    """A value with its standard error; `None` where there is none."""
    if score is None or score.value is None:
        return None
    error = "" if score.stderr is None else f" ± {score.stderr:.2f}"
    named = f" {unit_of(score)}" if unit and unit_of(score) else ""
    return f"{score.value:.2f}{error}{named}"


def unit_of(score: Score) -> str:
    """The unit in a few characters; empty where it is the metric itself, such as perplexity."""
    return "%" if score.unit == "percent" else "" if score.unit == score.metric else score.unit


def percent_change(change: float | None) -> str | None:
    """A change with its sign."""
    if change is None:
        return None
    return f"{change:+.2f} %" if abs(change) < 1000 else f"{change:+.2e} %"


def share(value: float | None) -> str | None:
    """A share as percent."""
    return None if value is None else f"{100 * value:.1f} %"


def size(nbytes: int | None) -> str | None:
    """Bytes in units of 1000."""
    if nbytes is None:
        return None
    for unit, divisor in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if nbytes >= divisor:
            return f"{nbytes / divisor:.1f} {unit}"
    return f"{nbytes} B"


def count(number: int) -> str:
    """A whole number with thin spaces between thousands."""
    return f"{number:,}".replace(",", _THIN)


def short_digest(digest: str | None) -> str | None:
    """The beginning of a digest, enough to compare by eye."""
    return None if digest is None else digest.removeprefix("sha256:")[:12]
