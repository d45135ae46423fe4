"""All files of the site, made from what is shown and nothing else: no clock, no network, no
place of this machine, so the same input gives the same bytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from oscar_zoo.registry.recipe import ModelRecipe
from oscar_zoo.site.artifact_page import artifact_page
from oscar_zoo.site.exhibit import INDEX, Exhibit
from oscar_zoo.site.index_page import index_page


def files_of(
    exhibits: Sequence[Exhibit], recipes: Sequence[ModelRecipe]
) -> Iterator[tuple[str, bytes]]:
    """Path from the root and content of every file.

    Args:
        recipes: models without an artifact, by name.
    """
    yield INDEX, index_page(exhibits, recipes)
    for exhibit in exhibits:
        yield exhibit.path, artifact_page(exhibit)
    yield ".nojekyll", b""
