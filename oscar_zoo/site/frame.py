"""What every page has: head, policy, skip link, header and footer.

Style and scripts stand inside the page. A content security policy allows exactly these by their
hash, and nothing else: no request, no other script, no frame, no form. So a page also works when it
is opened from a folder or sent alone.
"""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from importlib import resources

from oscar_zoo.site.html import Html, element, join, raw
from oscar_zoo.version import __version__

TITLE = "oscar-zoo"
PAPER = "https://arxiv.org/abs/2605.17757"
_ICON = (
    "data:image/svg+xml,%3Csvg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 16 16'%3E"
    "%3Crect width='16' height='16' rx='3' fill='%230b5d66'/%3E"
    "%3Cpath d='M4 4h3v3H4zM9 9h3v3H9z' fill='%23fff'/%3E%3C/svg%3E"
)


def page(
    *,
    title: str,
    description: str,
    root: str,
    main: Html,
    scripts: tuple[str, ...] = (),
    wide: bool = False,
) -> bytes:
    """One file of the site.

    Args:
        title: of the page; the name of the site is added.
        scripts: names of scripts of this package; the page works without them.
    """
    style = raw(_resource("style.css"))
    codes = [raw(_resource(name)) for name in scripts]
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", http_equiv="Content-Security-Policy", content=_policy(style, tuple(codes))),
        element("meta", name="referrer", content="no-referrer"),
        element("meta", name="color-scheme", content="light dark"),
        element("meta", name="description", content=description),
        element("meta", property="og:title", content=title),
        element("meta", property="og:description", content=description),
        element("link", rel="icon", href=_ICON),
        element("title", title if title == TITLE else f"{title} · {TITLE}"),
        element("style", style),
    )
    body = element(
        "body",
        element("a", "Skip to the content", class_="skip", href="#content"),
        element(
            "header",
            element(
                "div",
                element("a", _mark(), TITLE, class_="brand", href=f"{root}index.html"),
                element("span", "rotations for 2-bit KV caches", class_="tagline"),
                class_="bar wide" if wide else "bar",
            ),
            class_="top",
        ),
        element("main", main, id="content", class_="wide" if wide else None, tabindex="-1"),
        element(
            "footer",
            element(
                "p",
                f"Made by oscar-zoo {__version__} from manifests. Values are what these say;"
                " a gap means that nobody reported it.",
                class_="wide" if wide else None,
            ),
        ),
        join(element("script", code) for code in codes),
    )
    document = element("html", head, body, lang="en")
    return f"<!doctype html>\n{document.text}\n".encode()


@cache
def _policy(style: Html, scripts: tuple[Html, ...]) -> str:
    hashes = " ".join(_hash(code) for code in scripts) or "'none'"
    return (
        f"default-src 'none'; style-src {_hash(style)}; script-src {hashes}; img-src data:;"
        " base-uri 'none'; form-action 'none'"
    )


def _hash(code: Html) -> str:
    digest = base64.b64encode(hashlib.sha256(code.text.encode()).digest()).decode()
    return f"'sha256-{digest}'"


@cache
def _resource(name: str) -> str:
    return resources.files("oscar_zoo.site").joinpath(name).read_text("utf-8")


def _mark() -> Html:
    """The sign of the site: a matrix of which two blocks are kept."""
    squares = [
        element("rect", x=x, y=y, width=6, height=6, rx=1.2, class_="on" if x == y else "off")
        for x in (1, 9)
        for y in (1, 9)
    ]
    return element("svg", squares, viewBox="0 0 16 16", aria_hidden="true", class_="mark")
