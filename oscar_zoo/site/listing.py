"""What can be had and what is here: artifacts as rows, found by words, and ranked by a score."""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import chain
from typing import Annotated, Any, Literal

from pydantic import Field, PlainSerializer
from typing_extensions import TypedDict

from oscar_zoo.artifact.outcome import HIDDEN, Digest, says
from oscar_zoo.artifact.specs import Score
from oscar_zoo.errors import ScoreNotFound, UsageError
from oscar_zoo.observer import SILENT, Observer
from oscar_zoo.registry import known_names
from oscar_zoo.registry.catalog import Catalog
from oscar_zoo.registry.entries import Entry, collect, score_summary, summaries
from oscar_zoo.registry.hubs.address import Sources
from oscar_zoo.registry.known_names import locked_warnings, quality_warnings
from oscar_zoo.registry.lookup import look
from oscar_zoo.registry.pins import PinFile
from oscar_zoo.registry.recipe import ModelRecipe
from oscar_zoo.registry.score_file import PERPLEXITY, in_order, is_lower_better, is_of_recipe
from oscar_zoo.registry.store import Store
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
from oscar_zoo.site.params import (
    FILTERS,
    SORTS,
    LeaderboardParams,
    ListParams,
    SearchParams,
)
from oscar_zoo.verb import python_call

MOST_CHARACTERS = 1000
"""Of the words of a search."""
Row = Mapping[str, Any]


class ListedArtifact(TypedDict):
    """One artifact, as `list` and `search` show it."""

    id: Annotated[str, says("MODEL/TAG.")]
    model: Annotated[str, says("The part of the name before the tag.")]
    family: Annotated[
        str | None,
        says("What people call the kind of model; null where the zoo does not know it."),
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
        Literal["installed", "local", "public", "elsewhere"],
        says(
            "In the store; on a hub in a folder; on a remote hub or packaged; or known, but on none"
            " of the hubs that were asked."
        ),
    ]
    hubs: Annotated[Sequence[str], says("The hubs that have it, in the order of asking.")]


def _names(recipes: tuple[ModelRecipe, ...]) -> list[str]:
    return [recipe.name for recipe in recipes]


@dataclass(frozen=True)
class Listing:
    """What oscar-zoo list prints: the artifacts that can be had."""

    rows: Annotated[tuple[ListedArtifact, ...], Field(serialization_alias="artifacts")]
    recipes: Annotated[
        tuple[ModelRecipe, ...],
        PlainSerializer(_names, return_type=list[str]),
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
    schema: Literal["oscar-zoo.list/1"] = "oscar-zoo.list/1"


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
    rows = summaries(catalog, installed, views, only_hubs=only_hubs)
    close: tuple[str, ...] = ()
    if params.model is not None:
        recipe = catalog.recipe(params.model)
        close = () if recipe else catalog.close_matches(params.model)
        rows = _of_model(rows, params.model, recipe, views)
    if params.installed:
        rows = [row for row in rows if row["status"] == "installed"]
    if params.family is not None:
        meant = {recipe.name.casefold() for recipe in wanted}
        rows = [row for row in rows if row["model"].casefold() in meant]
    recipes: tuple[ModelRecipe, ...] = ()
    if not (params.model or params.installed or only_hubs or params.filters):
        known = {row["model"].casefold() for row in rows}
        recipes = tuple(recipe for recipe in wanted if recipe.name.casefold() not in known)
    if words:
        models = {row["model"] for row in rows}
        rows = [row for row in rows if _has(words, _names_of(row), _words_of(row))]
        recipes = tuple(one for one in recipes if _has(words, one.names, [one.family]))
        close = () if rows or recipes else catalog.close_matches(" ".join(words), models)
    fitting = [row for row in rows if all(_fits(row[key], pattern) for key, pattern in filters)]
    shown: Any = tuple(_ordered(fitting, params.sort))
    here = {row["id"] for row in shown if row["status"] == "installed"}
    poor = (quality_warnings(record) for record in installed if str(record.id) in here)
    warnings = (*locked_warnings(PinFile.of_project(), catalog), *chain.from_iterable(poor))
    return Listing(
        shown, recipes, tuple(unreachable), close, warnings, by_environment=sources.by_environment
    )


list_artifacts = python_call(ListParams, listing)


def _of_model(
    rows: list[dict[str, Any]], model: str, recipe: ModelRecipe | None, views: Sequence[HubView]
) -> list[dict[str, Any]]:
    version = None if recipe else known_names.aliased(model, views)
    name = recipe.name if recipe else version.model if version else model.rsplit("/", 1)[-1]
    rows = [row for row in rows if row["model"].casefold() == name.casefold()]
    if version is None:
        return rows
    return [row for row in rows if row["tag"].casefold() == version.tag.casefold()]


_KEYS = {name: name for name in FILTERS} | {"format": "format_version", "bits": "bits_per_element"}
"""Key of a filter -> key of the rows."""
_EXAMPLE = f"write, for example, --filter family='Qwen3*'; keys are {', '.join(FILTERS)}"


def _filter(text: str) -> tuple[str, str]:
    """Key of the rows and pattern of a `KEY=PATTERN`. In a pattern, `*` stands for any text, `?`
    for one character and `[ab]` for one of these. Case does not matter."""
    key, equals, pattern = text.partition("=")
    key = key.strip().casefold()
    if not equals or not pattern.strip():
        raise UsageError(f"--filter {text!r} is not KEY=PATTERN.", hint=_EXAMPLE)
    if key not in _KEYS:
        close = difflib.get_close_matches(key, _KEYS, n=1)
        keys = None if close else f"keys are {', '.join(FILTERS)}"
        raise UsageError(f"--filter has no key {key!r}.", suggestions=close, hint=keys)
    if pattern.count("[") != pattern.count("]"):
        raise UsageError(f"the pattern {pattern!r} has a [ or ] without the other.", hint=_EXAMPLE)
    return _KEYS[key], pattern.strip().casefold()


def _fits(value: str | float | None, pattern: str) -> bool:
    if value is None:
        return False
    text = value if isinstance(value, str) else f"{value:g}"
    return fnmatchcase(text.casefold(), pattern)


def gpqa(row: Row) -> Row | None:
    """The score of GPQA with an INT2 cache under the recipe that a list shows: what was measured,
    before what others say. `None` where nobody reports a value."""
    for score in row["scores"]:
        of_recipe = score["kv_dtype"] == "int2" and not score["recipe_changes"]
        named = score["task"].casefold().startswith("gpqa")
        if named and of_recipe and score["value"] is not None:
            found: Row = score
            return found
    return None


def _gpqa_value(row: Row) -> float | None:
    score = gpqa(row)
    return None if score is None else score["value"]


def _figure(name: str) -> Callable[[Row], float | None]:
    return lambda row: row["measured"][name] if row["measured"] else None


_ORDERS: Mapping[str, tuple[Callable[[Row], Any], bool]] = {
    "name": (lambda row: str(row["id"]).casefold(), False),
    "gpqa": (_gpqa_value, True),
    "perplexity": (_figure("change_percent"), False),
    "recall": (_figure("recall"), True),
    "size": (lambda row: row["bytes"], False),
}
"""Name of an order -> what it looks at, and whether the largest comes first."""
assert tuple(_ORDERS) == SORTS


def _ordered(rows: Iterable[Row], order: str) -> list[Row]:
    """The best first; those without the value of the order come last, as they came."""
    rows, (look_at, largest_first) = list(rows), _ORDERS[order]
    known = [row for row in rows if look_at(row) is not None]
    unknown = [row for row in rows if look_at(row) is None]
    return [*sorted(known, key=look_at, reverse=largest_first), *unknown]


def found(params: SearchParams, observer: Observer = SILENT) -> Found:
    """Find the artifacts, and the models without one, that have every word in their names, aliases,
    family, method, tasks of scores or digest; case does not matter, and `7b` is a size."""
    if not _words(params.words):
        raise UsageError("there is no word to search for.", hint=_SEARCH)
    known = listing(ListParams(words=params.words, hubs=params.hubs, offline=params.offline))
    return Found(known.rows, known.recipes, known.unreachable, known.close, known.warnings)


search = python_call(SearchParams, found)


_SEARCH = "oscar-zoo search qwen3"


def _words(words: str | Sequence[str]) -> list[str]:
    text = words if isinstance(words, str) else " ".join(words)
    if len(text) > MOST_CHARACTERS:
        raise UsageError(
            f"the words to search for have {len(text):,} characters, and at most"
            f" {MOST_CHARACTERS} make sense.",
            hint=_SEARCH,
        )
    return text.casefold().split()


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


def _names_of(row: Row) -> tuple[str, ...]:
    recipe = Catalog.packaged().recipe(row["model"])
    return (row["model"], *(recipe.names if recipe else ()))


def _words_of(row: Row) -> tuple[str | None, ...]:
    tasks = (score["task"] for score in row["scores"])
    reference = f"{row['model']}:{row['tag']}"
    facts = (row["id"], reference, row["family"], row["method"], row["digest"])
    return *facts, row["status"], row["state"], *tasks


class PlaceFacts(TypedDict):
    """One place of a leaderboard."""

    rank: Annotated[int, Field(ge=1, description="1 is the best.")]
    id: Name
    digest: Annotated[Digest | None, says("Null until somebody has seen the bytes.")]
    score: ScoreSummary
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


@dataclass(frozen=True)
class Place:
    """One line of the board."""

    entry: Entry
    score: Score

    @property
    def change_percent(self) -> float | None:
        """Change of perplexity over BF16, in percent; `None` for other tasks, and where BF16 is not
        known. Only this can be compared between models."""
        before = self.score.baseline.value if self.score.baseline else None
        if self.score.task != PERPLEXITY or not before or self.score.value is None:
            return None
        return 100 * (self.score.value / before - 1)

    @property
    def is_calibrated_on(self) -> bool:
        """Whether the text of the fit is known to have questions of the benchmark."""
        manifest = self.entry.manifest
        used = manifest.fit.calibration if manifest else None
        seen = self.score.task in used.overlaps_with if used else False
        return seen or bool(self.score.calibrated_on)

    @property
    def rank_key(self) -> tuple[bool, float, str]:
        """The smallest is the best."""
        value = self.score.value or 0.0
        if self.score.task == PERPLEXITY:
            change = self.change_percent
            return change is None, value if change is None else change, self.entry.id.key
        return False, value if is_lower_better(self.score) else -value, self.entry.id.key

    def facts(self, rank: int) -> PlaceFacts:
        """Its JSON."""
        score, paired = self.score, self.score.paired
        summary: Any = score_summary(score)
        return {
            "rank": rank,
            "id": self.entry.id,
            "digest": self.entry.digest,
            "score": summary,
            "n": score.n,
            "repeats": score.repeats,
            "difference": paired.difference if paired else None,
            "lower95": paired.lower95 if paired else None,
            "upper95": paired.upper95 if paired else None,
            "change_percent": self.change_percent,
            "calibrated_on": self.is_calibrated_on,
        }


def _ranked(places: tuple[Place, ...]) -> list[PlaceFacts]:
    return [place.facts(rank) for rank, place in enumerate(places, 1)]


@dataclass(frozen=True)
class Leaderboard:
    """What oscar-zoo leaderboard prints: the scores of one task with an INT2 cache, best first."""

    task: Annotated[str, says("Its whole name.")]
    places: Annotated[tuple[Place, ...], PlainSerializer(_ranked, return_type=list[PlaceFacts])]
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
    entries = [
        one
        for one in collect(Catalog.packaged(), views)
        if one.status.state != "yanked" and (one.hubs or not sources.are_named)
    ]
    claims = [Place(entry, score) for entry in entries for score in _claims(entry)]
    counts = Counter(place.score.task for place in claims)
    meant = _meant(params.task, counts)
    places = [one for one in claims if one.score.task == meant]
    if params.measured:
        places = [one for one in places if one.score.reporter == "measured"]
    if not places:
        raise ScoreNotFound.for_measured(meant)
    places.sort(key=lambda one: one.rank_key)
    return Leaderboard(meant, tuple(places), tuple(sorted(counts)), tuple(unreachable))


leaderboard = python_call(LeaderboardParams, ranked)


def _claims(entry: Entry) -> list[Score]:
    """One score of INT2 for every task, under the recipe: what was measured before what others
    say."""
    made = entry.measured.as_scores() if entry.measured else ()
    found: dict[str, Score] = {}
    for score in in_order((*entry.scores, *made)):
        if is_of_recipe(score):
            found.setdefault(score.task, score)
    return list(found.values())


def _meant(task: str, counts: Counter[str]) -> str:
    wanted = task.strip().casefold()
    begun = [name for name in sorted(counts) if name.casefold().startswith(wanted)]
    exact = [name for name in begun if name.casefold() == wanted]
    if not wanted or not begun:
        close = difflib.get_close_matches(wanted, counts, n=1)
        raise ScoreNotFound.for_task(task, sorted(counts), close)
    return exact[0] if exact else max(begun, key=lambda name: counts[name])
