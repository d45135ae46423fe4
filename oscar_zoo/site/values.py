"""How the pages write values: the same words as `list` and `info`, and text that never is markup.

Names, notes and scores come from manifests that anybody may have written. Templates escape them;
what is made outside of a template is made by `markup`.
"""

from __future__ import annotations

from markupsafe import Markup

from oscar_zoo.artifact.specs import Score
from oscar_zoo.registry.score_file import value_text


def plain_text(text: str) -> str:
    """`text` with its spaces, without characters that are not seen, such as those that turn a
    line around."""
    if text.isprintable():
        return text
    return "".join(" " if c.isspace() else c for c in text if c.isspace() or c.isprintable())


def markup(template: str, **values: object) -> Markup:
    """`template` is markup of this package; values that are text are escaped in it."""
    return Markup(template).format(**{name: shown(value) for name, value in values.items()})


def shown(value: object) -> object:
    """A value before it is escaped; markup stays."""
    return plain_text(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def code(text: str | None) -> Markup | None:
    """A text in letters of one width."""
    return markup("<code>{text}</code>", text=text) if text else None


def counted(number: int, what: str) -> str:
    """A number with its noun."""
    return f"1 {what}" if number == 1 else f"{number:,} {what}s"


def value_of(score: Score | None, *, unit: bool = False) -> str | None:
    """A value with its standard error; `None` where there is none."""
    text = value_text(score)
    return f"{text} {unit_of(score)}".rstrip() if score and text and unit else text


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
