"""Artifacts by their score in one benchmark with an INT2 cache, the best first."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from oscar_zoo.artifact.specs import Score
from oscar_zoo.errors import OscarZooError, ScoreNotFound
from oscar_zoo.registry.catalog import Catalog
from oscar_zoo.registry.entries import Entry, collect
from oscar_zoo.registry.hubs.address import Sources
from oscar_zoo.registry.lookup import look
from oscar_zoo.registry.score_file import PERPLEXITY, in_order, is_lower_better, is_of_recipe

TASK = "gpqa"
"""The benchmark, where nobody names one."""


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


@dataclass(frozen=True)
class Leaderboard:
    """The scores of one task.

    Attributes:
        task: its whole name.
        places: best first; yanked versions are left out.
        tasks: all that somebody reports.
        unreachable: what hubs said that did not answer.
    """

    task: str
    places: tuple[Place, ...]
    tasks: tuple[str, ...]
    unreachable: tuple[OscarZooError, ...]


def leaderboard(
    task: str = TASK,
    *,
    measured: bool = False,
    hubs: str | Sequence[str] | None = None,
    offline: bool = False,
) -> Leaderboard:
    """Rank artifacts by their score in `task`, under their recipe.

    Perplexity is ranked by its change over BF16, since models differ in theirs.

    Args:
        task: a benchmark, `perplexity` or `recall`. The beginning of a name means the task whose
            name begins so and that most artifacts have.
        measured: only scores that this tool measured.
        hubs: rank only what these have; default what the configured hubs and the package have.
        offline: ask no hub over the network.

    Raises:
        ScoreNotFound: nobody reports a score of such a task.
        OscarZooError: the only hub did not answer.
    """
    sources = Sources(hubs, offline=offline)
    views, unreachable = look(sources.hubs)
    entries = [
        one
        for one in collect(Catalog.packaged(), views)
        if one.status.state != "yanked" and (one.hubs or not sources.are_named)
    ]
    claims = [Place(entry, score) for entry in entries for score in _claims(entry)]
    counts = Counter(place.score.task for place in claims)
    meant = _meant(task, counts)
    places = [one for one in claims if one.score.task == meant]
    if measured:
        places = [one for one in places if one.score.reporter == "measured"]
    if not places:
        raise ScoreNotFound.for_measured(meant)
    places.sort(key=lambda one: one.rank_key)
    return Leaderboard(meant, tuple(places), tuple(sorted(counts)), tuple(unreachable))


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
