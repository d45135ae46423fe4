"""What can be had and what is here: known artifacts as rows, chosen and in order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from oscar_zoo.errors import OscarZooError
from oscar_zoo.registry import known_names, row_order
from oscar_zoo.registry.catalog import Catalog
from oscar_zoo.registry.entries import summaries
from oscar_zoo.registry.hubs.address import Sources
from oscar_zoo.registry.known_names import locked_warnings, quality_warnings
from oscar_zoo.registry.lookup import look
from oscar_zoo.registry.pins import PinFile
from oscar_zoo.registry.recipe import ModelRecipe
from oscar_zoo.registry.store import Store
from oscar_zoo.registry.view import HubView


@dataclass(frozen=True)
class ListRequest:
    """What to list.

    Attributes:
        sources: the hubs; with hubs that were named, only what those have is listed.
        installed: only artifacts in the local store.
        model: only artifacts whose rotations have this model's name; a name of one version works.
        family: only models of this family, or of all whose name begins so.
        filters: each `KEY=PATTERN`; see `registry.row_order.filtered`.
        order: one of `registry.row_order.SORTS`.
    """

    sources: Sources
    installed: bool = False
    model: str | None = None
    family: str | None = None
    filters: tuple[str, ...] = ()
    order: str = "name"


@dataclass(frozen=True)
class Listing:
    """Known artifacts.

    Attributes:
        rows: one per artifact; see `registry.summary.summaries`.
        recipes: models with a recipe and no artifact, where everything or a family is listed.
        unreachable: what hubs said that did not answer.
        close: names like what was asked for, where nothing has that name.
        warnings: a sentence for every version in the project's lock that was yanked or deprecated,
            and for every installed one that is poor.
    """

    rows: tuple[Mapping[str, Any], ...]
    recipes: tuple[ModelRecipe, ...]
    unreachable: tuple[OscarZooError, ...]
    close: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


def list_artifacts(
    *,
    hubs: str | Sequence[str] | None = None,
    model: str | None = None,
    filters: Sequence[str] = (),
    sort: str = "name",
    offline: bool = False,
) -> Listing:
    """List the artifacts that hubs, the local store and this package know.

    Args:
        hubs: list only what these have; default what the configured hubs, the store and the
            package have.
        model: only artifacts for this model.
        filters: each `KEY=PATTERN`, such as `family=Qwen3`.
        sort: `name`, `gpqa`, `perplexity`, `recall` or `size`, the best first.
        offline: ask no hub over the network.

    Raises:
        UsageError: there is no such order or key, or a pattern is none.
        OscarZooError: the only hub did not answer.
    """
    sources = Sources(hubs, offline=offline)
    return listing(ListRequest(sources, model=model, filters=tuple(filters), order=sort))


def listing(request: ListRequest) -> Listing:
    """List what `request` asks for."""
    chosen = row_order.RowChoice.parse(request.filters, request.order)
    catalog, only_hubs = Catalog.packaged(), request.sources.are_named
    wanted = catalog.recipes() if request.family is None else catalog.of_family(request.family)
    views: list[HubView] = []
    unreachable: list[OscarZooError] = []
    if only_hubs or not request.installed:
        views, unreachable = look(request.sources.hubs)
    installed = Store().installed()
    rows = summaries(catalog, installed, views, only_hubs=only_hubs)
    close: tuple[str, ...] = ()
    if request.model is not None:
        recipe = catalog.recipe(request.model)
        close = () if recipe else catalog.close_matches(request.model)
        rows = _of_model(rows, request.model, recipe, views)
    if request.installed:
        rows = [row for row in rows if row["status"] == "installed"]
    if request.family is not None:
        meant = {recipe.name.casefold() for recipe in wanted}
        rows = [row for row in rows if row["model"].casefold() in meant]
    recipes: tuple[ModelRecipe, ...] = ()
    if not (request.model or request.installed or only_hubs or request.filters):
        known = {row["model"].casefold() for row in rows}
        recipes = tuple(recipe for recipe in wanted if recipe.name.casefold() not in known)
    shown = tuple(chosen.of(rows))
    here = {row["id"] for row in shown if row["status"] == "installed"}
    poor = (quality_warnings(record) for record in installed if str(record.id) in here)
    warnings = (*locked_warnings(PinFile.of_project(), catalog), *chain.from_iterable(poor))
    return Listing(shown, recipes, tuple(unreachable), close, warnings)


def _of_model(
    rows: list[dict[str, Any]], model: str, recipe: ModelRecipe | None, views: Sequence[HubView]
) -> list[dict[str, Any]]:
    version = None if recipe else known_names.aliased(model, views)
    name = recipe.name if recipe else version.model if version else model.rsplit("/", 1)[-1]
    rows = [row for row in rows if row["model"].casefold() == name.casefold()]
    if version is None:
        return rows
    return [row for row in rows if row["tag"].casefold() == version.tag.casefold()]
