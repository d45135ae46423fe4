"""Find artifacts and models by words."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from oscar_zoo.app.listing import Listing, ListRequest, listing
from oscar_zoo.app.sources import Sources
from oscar_zoo.errors import UsageError
from oscar_zoo.registry.catalog import Catalog


def search(
    words: str | Sequence[str],
    *,
    hubs: str | Sequence[str] | None = None,
    offline: bool = False,
) -> Listing:
    """Find the artifacts, and the models without one, that have every word in their names, aliases,
    family, method, tasks of scores or digest; case does not matter.

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
    known = listing(ListRequest(Sources(hubs, offline=offline)))
    rows = tuple(row for row in known.rows if _has(wanted, _words_of(row)))
    recipes = tuple(one for one in known.recipes if _has(wanted, (*one.names, one.family)))
    models = {row["model"] for row in known.rows}
    nothing = not rows and not recipes
    close = Catalog.packaged().close_matches(text, models) if nothing else ()
    return replace(known, rows=rows, recipes=recipes, close=close)


def _has(words: Iterable[str], facts: Iterable[str | None]) -> bool:
    text = " ".join(filter(None, facts)).casefold()
    return all(word in text for word in words)


def _words_of(row: Mapping[str, Any]) -> tuple[str | None, ...]:
    recipe = Catalog.packaged().recipe(row["model"])
    names = recipe.names if recipe else ()
    tasks = (score["task"] for score in row["scores"])
    reference = f"{row['model']}:{row['tag']}"
    facts = (row["id"], reference, row["family"], row["method"], row["digest"])
    return *facts, row["status"], row["state"], *names, *tasks
