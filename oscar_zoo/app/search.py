"""Find artifacts and models by words."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from oscar_zoo.app.listing import Listing, ListRequest, listing
from oscar_zoo.errors import UsageError
from oscar_zoo.registry.catalog import Catalog
from oscar_zoo.registry.hubs.address import Sources

MOST_CHARACTERS = 1000


def search(
    words: str | Sequence[str],
    *,
    hubs: str | Sequence[str] | None = None,
    offline: bool = False,
) -> Listing:
    """Find the artifacts, and the models without one, that have every word in their names, aliases,
    family, method, tasks of scores or digest; case does not matter, and `7b` is a size.

    Args:
        words: a text, or a list of texts, which are taken apart at spaces.
        hubs: search only what these have; default what the configured hubs, the store and the
            package have.
        offline: ask no hub over the network.

    Raises:
        UsageError: there is no word.
        OscarZooError: the only hub did not answer.
    """
    text = words if isinstance(words, str) else " ".join(words)
    wanted = text.casefold().split()
    if not wanted:
        raise UsageError("there is no word to search for.", hint="oscar-zoo search qwen3")
    if len(text) > MOST_CHARACTERS:
        raise UsageError(
            f"the words to search for have {len(text):,} characters, and at most"
            f" {MOST_CHARACTERS} make sense.",
            hint="oscar-zoo search qwen3",
        )
    known = listing(ListRequest(Sources(hubs, offline=offline)))
    rows = tuple(row for row in known.rows if _has(wanted, _names_of(row), _words_of(row)))
    recipes = tuple(one for one in known.recipes if _has(wanted, one.names, [one.family]))
    models = {row["model"] for row in known.rows}
    nothing = not rows and not recipes
    close = Catalog.packaged().close_matches(text, models) if nothing else ()
    return replace(known, rows=rows, recipes=recipes, close=close)


def _has(words: Iterable[str], names: Iterable[str], facts: Iterable[str | None]) -> bool:
    """Whether every word is in the `names` of a model or in other `facts`; a size is in names."""
    named = " ".join(names).casefold()
    text = " ".join((named, *filter(None, facts))).casefold()
    sizes = {(float(number), unit) for number, unit in _SIZE.findall(named)}
    return all(_is_size(word, sizes) if _SIZE.fullmatch(word) else word in text for word in words)


_SIZE = re.compile(r"(?<![\w.])(\d+(?:\.\d+)?)([bm])(?![\w.])")
"""The size of a model in its name: parameters in billions or millions."""


def _is_size(word: str, sizes: Collection[tuple[float, str]]) -> bool:
    """Whether one of `sizes` is that of `word`, or rounds to it where `word` has no point."""
    wanted, unit = float(word[:-1]), word[-1]
    exact = "." in word
    return any(
        unit == other and wanted == (size if exact else int(size + 0.5)) for size, other in sizes
    )


def _names_of(row: Mapping[str, Any]) -> tuple[str, ...]:
    recipe = Catalog.packaged().recipe(row["model"])
    return (row["model"], *(recipe.names if recipe else ()))


def _words_of(row: Mapping[str, Any]) -> tuple[str | None, ...]:
    tasks = (score["task"] for score in row["scores"])
    reference = f"{row['model']}:{row['tag']}"
    facts = (row["id"], reference, row["family"], row["method"], row["digest"])
    return *facts, row["status"], row["state"], *tasks
