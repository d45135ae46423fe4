"""HTML as values: text is escaped where an element is made, so no page can forget it.

Names, notes and scores come from manifests that anybody may have written. A `str` is always text
and never markup; only `element` and `raw` make `Html`. A template language would be one more
dependency of every installation for about ten kinds of elements.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from html import escape

Attribute = str | int | float | bool | None

_VOID = frozenset(
    "area base br col embed hr img input link meta source track wbr".split()  # no end tag
)
_NAME = re.compile(r"[a-zA-Z][a-zA-Z0-9:-]*")
_BLOCKS = frozenset(
    "article body dd div dl dt figure footer form h1 h2 h3 head header html li main nav ol p pre"
    " section table tbody thead tr ul svg".split()
)
"""Elements that end a line, so that the files can be read and compared."""


@dataclass(frozen=True)
class Html:
    """Markup that is ready to be written."""

    text: str

    def __add__(self, other: Html) -> Html:
        return Html(self.text + other.text)


def element(
    tag: str, /, *children: Html | str | Iterable[Html | str | None] | None, **attributes: Attribute
) -> Html:
    """One element with its children.

    Args:
        children: markup, text, or lists of them; `None` is left out.
        attributes: `class_` is written `class`, and `aria_label` `aria-label`. `True` is an
            attribute without a value; `None` and `False` are left out.
    """
    opened = _checked(tag) + "".join(_attribute(key, value) for key, value in attributes.items())
    if tag in _VOID:
        return Html(f"<{opened}>")
    inside = "".join(_markup(child) for child in children)
    return Html(f"<{opened}>{inside}</{tag}>" + ("\n" if tag in _BLOCKS else ""))


def raw(text: str) -> Html:
    """Markup of this package, such as a style sheet; never text from outside."""
    return Html(text)


def join(parts: Iterable[Html]) -> Html:
    """All parts, one after the other."""
    return Html("".join(part.text for part in parts))


def _markup(child: Html | str | Iterable[Html | str | None] | None) -> str:
    if child is None:
        return ""
    if isinstance(child, Html):
        return child.text
    if isinstance(child, str):
        return escape(plain_text(child), quote=False)
    return "".join(_markup(one) for one in child)


def plain_text(text: str) -> str:
    """`text` with its spaces, without characters that are not seen."""
    if text.isprintable():
        return text
    return "".join(" " if c.isspace() else c for c in text if c.isspace() or c.isprintable())


@cache
def _checked(name: str) -> str:
    """The name of an element or attribute, without the underscores of Python."""
    written = name.rstrip("_").replace("_", "-")
    if _NAME.fullmatch(written) is None:
        raise ValueError(f"{name!r} is no name of HTML")
    return written


def _attribute(key: str, value: Attribute) -> str:
    if value is None or value is False:
        return ""
    if value is True:
        return f" {_checked(key)}"
    return f' {_checked(key)}="{escape(plain_text(str(value)))}"'
