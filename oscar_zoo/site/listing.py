"""What can be had and what is here: artifacts as rows, found by words, and ranked by a score."""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from itertools import chain
from typing import Annotated, Any, Literal

from pydantic import Field, InstanceOf, PlainSerializer
from typing_extensions import TypedDict

from oscar_zoo.artifact.files import read_file
from oscar_zoo.artifact.manifest import FILE_NAME, Manifest
from oscar_zoo.artifact.outcome import HIDDEN, Digest, says
from oscar_zoo.artifact.specs import Geometry, Score
from oscar_zoo.errors import MalformedFile, NotFoundError, ScoreNotFound, StorageError, UsageError
from oscar_zoo.observer import SILENT, Observer
from oscar_zoo.registry import known_names
from oscar_zoo.registry.catalog import Catalog
from oscar_zoo.registry.entries import Entry, Where, collect, entry_of, score_summary
from oscar_zoo.registry.hubs.address import Sources
from oscar_zoo.registry.known_names import locked_warnings, quality_warnings
from oscar_zoo.registry.lookup import look
from oscar_zoo.registry.pins import PinFile
from oscar_zoo.registry.recipe import ModelRecipe
from oscar_zoo.registry.score_file import PERPLEXITY, is_lower_better
from oscar_zoo.registry.store import Record, Store
from oscar_zoo.registry.view import HubView
from oscar_zoo.site.facts import (
    MeasuredFacts,
    Name,
    ScoreSummary,
    Size,
    State,
    Unreachable,
    Warnings,
)
from oscar_zoo.site.params import FILTERS, SORTS, LeaderboardParams, ListParams, SearchParams
from oscar_zoo.verb import python_call

MOST_CHARACTERS = 1000
"""Of the words of a search."""
_SEARCH = "oscar-zoo search qwen3"


class ListedArtifact(TypedDict):
    """One artifact, as `list` and `search` show it."""

    id: Annotated[str, says("MODEL/TAG.")]
    model: Annotated[str, says("The part of the name before the tag.")]
    family: Annotated[
        str | None, says("What people call the kind of model; null where the zoo does not know it.")
    ]
    tag: Annotated[str, says("The calibration tag.")]
    format_version: Annotated[
        Size | None, says("Format of the rotation files; null where nobody has said.")
    ]
    method: Annotated[str | None, says("How the rotation was made, such as oscar.")]
    bits_per_element: Annotated[
        float | None, says("Stored bits per cached element, scales and offsets included.")
    ]
    digest: Annotated[Digest | None, says("Null until somebody has seen the bytes.")]
    bytes: Annotated[Size | None, says("Of all files; null until somebody has seen them.")]
    state: State
    scores: Annotated[Sequence[ScoreSummary], says("What was measured comes first.")]
    measured: Annotated[
        MeasuredFacts | None,
        says("Perplexity and recall beside BF16; null where they were not measured."),
    ]
    status: Annotated[
        Where,
        says(
            "In the store; on a hub in a folder; on a remote hub or packaged; or known, but on none"
            " of the hubs that were asked."
        ),
    ]
    hubs: Annotated[Sequence[str], says("The hubs that have it, in the order of asking.")]


def _rows(entries: Iterable[Entry]) -> list[dict[str, Any]]:
    return [
        entry.facts
        | {"model": entry.id.model, "tag": entry.id.tag}
        | {"status": entry.where, "hubs": list(entry.hubs)}
        for entry in entries
    ]


@dataclass(frozen=True)
class Listing:
    """What oscar-zoo list prints: the artifacts that can be had."""

    entries: Annotated[
        tuple[InstanceOf[Entry], ...],
        PlainSerializer(_rows, return_type=list[ListedArtifact]),
        Field(serialization_alias="artifacts"),
    ]
    recipes: Annotated[
        tuple[ModelRecipe, ...],
        PlainSerializer(lambda recipes: [one.name for one in recipes], return_type=list[str]),
        Field(
            serialization_alias="recipes_without_artifact",
            description="Models that the zoo knows and nobody has a rotation for.",
        ),
    ]
    unreachable: Unreachable
    close: Annotated[tuple[str, ...], *HIDDEN] = ()
    """Names like what was asked for, where nothing has that name."""
    warnings: Warnings = ()
    """For every version in the project's lock that was yanked or deprecated, and for every
    installed one that is poor."""
    by_environment: Annotated[str | None, *HIDDEN] = None
    """The hubs, where `OSCAR_ZOO_HUB` names them."""
    task: Annotated[str, *HIDDEN] = "gpqa"
    """Of the score that is shown, or the beginning of its name."""
    schema: Literal["oscar-zoo.list/1"] = "oscar-zoo.list/1"

    @property
    def rows(self) -> tuple[dict[str, Any], ...]:
        return tuple(_rows(self.entries))


@dataclass(frozen=True)
class Found(Listing):
    """What oscar-zoo search prints: artifacts and models that have every word."""

    schema: Literal["oscar-zoo.search/1"] = "oscar-zoo.search/1"  # type: ignore[assignment]


def listing(params: ListParams, observer: Observer = SILENT) -> Listing:
    """List the artifacts that hubs, the local store and this package know."""
    filters, words = [_filter(text) for text in params.filters], _words(params.words)
    sources = Sources(params.hubs, offline=params.offline)
    catalog, only_hubs = Catalog.packaged(), sources.are_named
    wanted = catalog.recipes() if params.family is None else catalog.of_family(params.family)
    views, unreachable = look(sources.hubs) if only_hubs or not params.installed else ([], [])
    installed = Store().installed()
    entries = _listed(catalog, views, installed, only_hubs=only_hubs)
    close: tuple[str, ...] = ()
    if params.model is not None:
        recipe = catalog.recipe(params.model)
        close = () if recipe else catalog.close_matches(params.model)
        entries = [one for one in entries if _is_of(params.model, recipe, views, one)]
    if params.installed:
        entries = [one for one in entries if one.where == "installed"]
    if params.family is not None:
        entries = [one for one in entries if one.recipe in wanted]
    recipes: tuple[ModelRecipe, ...] = ()
    if not (params.model or params.installed or only_hubs or params.filters):
        known = {one.id.model.casefold() for one in entries}
        recipes = tuple(recipe for recipe in wanted if recipe.name.casefold() not in known)
    if words:
        models = {one.id.model for one in entries}
        entries = [one for one in entries if _has_all(one, words)]
        recipes = tuple(x for x in recipes if _has(words, x.names, [x.family, _cache(x.geometry)]))
        close = () if entries or recipes else catalog.close_matches(" ".join(words), models)
    for key, pattern in filters:
        entries = [one for one in entries if _fits(_FACTS[key](one), pattern)]
    task = "gpqa"
    if params.task is not None:
        task = _meant(params.task, Counter(chain.from_iterable(one.claims for one in entries)))
    shown = tuple(_ordered(entries, params.sort, task))
    here = {one.id for one in shown if one.where == "installed"}
    poor = (quality_warnings(record) for record in installed if record.id in here)
    return Listing(
        shown,
        recipes,
        tuple(unreachable),
        close,
        (*locked_warnings(PinFile.of_project(), catalog), *chain.from_iterable(poor)),
        sources.by_environment,
        task,
    )


list_artifacts = python_call(ListParams, listing)


def found(params: SearchParams, observer: Observer = SILENT) -> Found:
    """Find the artifacts, and the models without one, that have every word in their names, aliases,
    family, method, tasks of scores or digest; case does not matter, and `7b` is a size."""
    _words(params.words, least=1)
    known = listing(ListParams(words=params.words, hubs=params.hubs, offline=params.offline))
    return Found(known.entries, known.recipes, known.unreachable, known.close, known.warnings)


search = python_call(SearchParams, found)


def _listed(
    catalog: Catalog, views: Sequence[HubView], installed: Iterable[Record], *, only_hubs: bool
) -> list[Entry]:
    """What package, hubs and store have, by id. With `only_hubs` just what the hubs have; a stored
    copy of other bytes does not count as installed then."""
    remote = {view.hub.name for view in views if view.is_remote}
    found = {}
    for entry in collect(catalog, views, quick=True):
        is_public = catalog.manifest(entry.id) is not None or remote & set(entry.hubs)
        where: Where = "public" if is_public else "local"
        where = "elsewhere" if remote and not entry.hubs else where
        if entry.hubs or not only_hubs:
            found[entry.id.key] = replace(entry, where=where)
    names = {view.hub.name for view in views}
    for record in installed:
        there = found.get(record.id.key)
        is_offered = there and (there.digest == record.digest or record.source in names)
        if is_offered or not only_hubs:
            entry = there or _stored(record, catalog)
            if entry.measured is None:
                summary = entry.summary.model_copy(update={"measured": record.measured})
                entry = replace(entry, summary=summary)
            size = sum(file.size for file in record.files)
            copy = replace(entry, where="installed", digest=record.digest, payload_bytes=size)
            found[record.id.key] = copy
    return [found[key] for key in sorted(found)]


def _stored(record: Record, catalog: Catalog) -> Entry:
    """What the `oscar.json` of a copy says that nobody offers; the name alone where it has none."""
    try:
        manifest = Manifest.from_bytes(read_file(record.path / FILE_NAME))
        if manifest.artifact_id == record.id:
            return entry_of(manifest)
    except (MalformedFile, NotFoundError, StorageError):
        pass
    recipe = catalog.recipe(record.id.model)
    return Entry(record.id, recipe=recipe, digest=record.digest)


def _is_of(model: str, recipe: ModelRecipe | None, views: Sequence[HubView], entry: Entry) -> bool:
    """Whether an entry is of a model, or the version that an alias names."""
    version = None if recipe else known_names.aliased(model, views)
    name = recipe.name if recipe else version.model if version else model.rsplit("/", 1)[-1]
    is_tagged = version is None or entry.id.tag.casefold() == version.tag.casefold()
    return is_tagged and entry.id.model.casefold() == name.casefold()


_FACTS: Mapping[str, Callable[[Entry], str | float | None]] = {
    "model": lambda entry: entry.id.model,
    "tag": lambda entry: entry.id.tag,
    "family": lambda entry: entry.family,
    "method": lambda entry: entry.summary.method,
    "format": lambda entry: entry.summary.format_version,
    "bits": lambda entry: entry.summary.bits_per_element,
    "status": lambda entry: entry.where,
    "state": lambda entry: entry.status.state,
}
assert tuple(_FACTS) == FILTERS
_EXAMPLE = f"write, for example, --filter family='Qwen3*'; keys are {', '.join(FILTERS)}"


def _filter(text: str) -> tuple[str, str]:
    """Key and pattern of a `KEY=PATTERN`. In a pattern, `*` stands for any text, `?` for one
    character and `[ab]` for one of these. Case does not matter."""
    key, equals, pattern = text.partition("=")
    key = key.strip().casefold()
    if not equals or not pattern.strip():
        raise UsageError(f"--filter {text!r} is not KEY=PATTERN.", hint=_EXAMPLE)
    if key not in _FACTS:
        close = difflib.get_close_matches(key, _FACTS, n=1)
        keys = None if close else f"keys are {', '.join(FILTERS)}"
        raise UsageError(f"--filter has no key {key!r}.", suggestions=close, hint=keys)
    if pattern.count("[") != pattern.count("]"):
        raise UsageError(f"the pattern {pattern!r} has a [ or ] without the other.", hint=_EXAMPLE)
    return key, pattern.strip().casefold()


def _fits(value: str | float | None, pattern: str) -> bool:
    if value is None:
        return False
    return fnmatchcase((value if isinstance(value, str) else f"{value:g}").casefold(), pattern)


def _score_rank(task: str, entry: Entry) -> tuple[Any, ...] | None:
    score = entry.score(task.casefold())
    return None if score is None else Place.of(entry, score).rank_key


_ORDERS: Mapping[str, Callable[[Entry, str], Any]] = {
    "name": lambda entry, task: str(entry.id).casefold(),
    "score": lambda entry, task: _score_rank(task, entry),
    "gpqa": lambda entry, task: _score_rank("gpqa", entry),
    "perplexity": lambda entry, task: entry.perplexity_change,
    "recall": lambda entry, task: None if entry.recall is None else -entry.recall,
    "size": lambda entry, task: entry.payload_bytes,
}
"""What an order looks at; the smallest is the best."""
assert tuple(_ORDERS) == SORTS


def _ordered(entries: list[Entry], order: str, task: str) -> list[Entry]:
    keyed = [(_ORDERS[order](entry, task), entry) for entry in entries]
    known = sorted((one for one in keyed if one[0] is not None), key=lambda one: one[0])
    return [entry for _, entry in [*known, *(one for one in keyed if one[0] is None)]]


def _words(words: str | Sequence[str], *, least: int = 0) -> list[str]:
    text = words if isinstance(words, str) else " ".join(words)
    if len(text) > MOST_CHARACTERS or len(text.split()) < least:
        raise UsageError(
            f"a search takes words of {least} to {MOST_CHARACTERS} characters in all, and there are"
            f" {len(text.strip()):,}.",
            hint=_SEARCH,
        )
    return text.casefold().split()


_SIZE = re.compile(r"(?<![\w.])(\d+(?:\.\d+)?)([bm])(?![\w.])")
"""The size of a model in its name: parameters in billions or millions."""


def _has(words: Iterable[str], names: Iterable[str], facts: Iterable[str | None]) -> bool:
    """Whether every word is in the `names` of a model or in other `facts`. A size must be that of a
    name, or what it rounds to where the word has no point."""
    named = " ".join(names).casefold()
    text = " ".join((named, *filter(None, facts))).casefold()

    def is_size(word: str) -> bool:
        sizes = [float(number) for number, unit in _SIZE.findall(named) if unit == word[-1]]
        return float(word[:-1]) in (sizes if "." in word else [int(size + 0.5) for size in sizes])

    return all(is_size(word) if _SIZE.fullmatch(word) else word in text for word in words)


def _cache(geometry: Geometry | None) -> str | None:
    """Words for a cache that has no keys and values of heads."""
    return "mla latents" if geometry is not None and geometry.rotary_key else None


def _has_all(entry: Entry, words: Iterable[str]) -> bool:
    names = (entry.id.model, *(entry.recipe.names if entry.recipe else ()))
    facts = (str(entry.id), entry.id.reference, entry.family, entry.summary.method, entry.digest)
    known = entry.manifest.model if entry.manifest else entry.recipe
    more = (_cache(known.geometry if known else None), *(score.task for score in entry.scores))
    return _has(words, names, (*facts, entry.where, entry.status.state, *more))


@dataclass(frozen=True)
class Place:
    """One place of a leaderboard."""

    entry: Annotated[InstanceOf[Entry], *HIDDEN]
    rank: Annotated[int, Field(ge=1, description="1 is the best.")]
    id: Name
    digest: Annotated[Digest | None, says("Null until somebody has seen the bytes.")]
    score: Annotated[InstanceOf[Score], PlainSerializer(score_summary, return_type=ScoreSummary)]
    n: Annotated[int | None, says("Questions.")]
    repeats: Annotated[int | None, says("Runs over all of them.")]
    difference: Annotated[
        float | None,
        says("INT2 minus BF16 on the same questions; null where it was not measured so."),
    ]
    lower95: Annotated[float | None, says("Low end of its 95 % confidence interval.")]
    upper95: Annotated[float | None, says("High end of it.")]
    change_percent: Annotated[
        float | None,
        says("Of perplexity over BF16; null for other tasks. Perplexity is ranked by it."),
    ]
    calibrated_on: Annotated[
        bool, says("Whether the text of the fit is known to have questions of the task.")
    ]

    @classmethod
    def of(cls, entry: Entry, score: Score) -> Place:
        """A place whose rank is not known yet."""
        paired, change, used = score.paired, None, entry.calibration
        before = score.baseline.value if score.baseline else None
        if score.task == PERPLEXITY and before and score.value is not None:
            change = 100 * (score.value / before - 1)
        seen = bool((used and score.task in used.overlaps_with) or score.calibrated_on)
        return cls(
            *(entry, 1, entry.id, entry.digest, score, score.n, score.repeats),
            difference=paired.difference if paired else None,
            lower95=paired.lower95 if paired else None,
            upper95=paired.upper95 if paired else None,
            change_percent=change,
            calibrated_on=seen,
        )

    @property
    def rank_key(self) -> tuple[bool, float, str]:
        value, change = self.score.value or 0.0, self.change_percent
        if self.score.task == PERPLEXITY:
            return change is None, value if change is None else change, self.id.key
        return False, value if is_lower_better(self.score) else -value, self.id.key


@dataclass(frozen=True)
class Leaderboard:
    """What oscar-zoo leaderboard prints: the scores of one task with an INT2 cache, best first."""

    task: Annotated[str, says("Its whole name.")]
    places: tuple[Place, ...]
    tasks: Annotated[tuple[str, ...], says("All tasks that somebody reports a score of.")]
    unreachable: Unreachable
    schema: Literal["oscar-zoo.leaderboard/1"] = "oscar-zoo.leaderboard/1"


def ranked(params: LeaderboardParams, observer: Observer = SILENT) -> Leaderboard:
    """Rank artifacts by their score in a task, under their recipe; yanked versions are left out.

    Perplexity is ranked by its change over BF16, since models differ in theirs. The beginning of a
    name means the task whose name begins so and that most artifacts have.
    """
    sources = Sources(params.hubs, offline=params.offline)
    views, unreachable = look(sources.hubs)
    claims = [
        (entry, entry.claims)
        for entry in collect(Catalog.packaged(), views)
        if entry.status.state != "yanked" and (entry.hubs or not sources.are_named)
    ]
    counts = Counter(task for _, found in claims for task in found)
    meant = _meant(params.task, counts)
    places = [Place.of(entry, found[meant]) for entry, found in claims if meant in found]
    if params.measured:
        places = [one for one in places if one.score.reporter == "measured"]
    if not places:
        raise ScoreNotFound.for_measured(meant)
    places.sort(key=lambda one: one.rank_key)
    ranked = tuple(replace(place, rank=rank) for rank, place in enumerate(places, 1))
    return Leaderboard(meant, ranked, tuple(sorted(counts)), tuple(unreachable))


leaderboard = python_call(LeaderboardParams, ranked)


def _meant(task: str, counts: Counter[str]) -> str:
    wanted = task.strip().casefold()
    begun = [name for name in sorted(counts) if name.casefold().startswith(wanted)]
    exact = [name for name in begun if name.casefold() == wanted]
    if not wanted or not begun:
        close = difflib.get_close_matches(wanted, counts, n=1)
        raise ScoreNotFound.for_task(task, sorted(counts), close)
    return exact[0] if exact else max(begun, key=lambda name: counts[name])
