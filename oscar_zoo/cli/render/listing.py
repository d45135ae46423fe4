"""What `list`, `search` and `leaderboard` show."""

from __future__ import annotations

from collections.abc import Sequence

from oscar_zoo.artifact.specs import Score
from oscar_zoo.cli.render import terminal
from oscar_zoo.registry.entries import Entry
from oscar_zoo.registry.recipe import ModelRecipe
from oscar_zoo.registry.score_file import PERPLEXITY, both_text, value_text
from oscar_zoo.site.listing import Found, Leaderboard, Listing, Place
from oscar_zoo.site.params import LeaderboardParams, ListParams, SearchParams

_SHAPE = ("FMT", "BITS")
_MEASURED = ("PERPLEXITY", "RECALL BF16 → INT2")


def print_listing(listing: Listing, params: ListParams, *, quiet: bool) -> None:
    _print(listing.entries, listing.task)
    _print_recipes(listing.recipes, by_name=bool(params.family or params.words))
    for error in listing.unreachable:
        terminal.note(f"note: {error.message}")
    if listing.by_environment:
        terminal.note(f"note: OSCAR_ZOO_HUB is set: only {listing.by_environment} is listed.")
    for warning in listing.warnings:
        terminal.note(f"warning: {warning}")
    if listing.entries or (params.words and listing.recipes):
        return
    of = params.model or params.family
    found = f"No artifacts for {of}." if of else "No artifacts."
    if params.filters:
        found = f"{found[:-1]} that fit {' and '.join(params.filters)}. See all: oscar-zoo list"
    if params.words:
        found = f"Nothing has all of the words {' '.join(params.words)}."
    meant = f" Did you mean {' or '.join(listing.close)}?" if listing.close else ""
    terminal.note(found + meant)


def print_found(found: Found, params: SearchParams, *, quiet: bool) -> None:
    """The table of `search`, which is that of `list` with words."""
    print_listing(found, ListParams(words=params.words), quiet=quiet)


def _print_recipes(recipes: Sequence[ModelRecipe], *, by_name: bool) -> None:
    """Models without a published rotation: their names, or only their families."""
    if not recipes:
        return
    named = [recipe.name if by_name else recipe.family for recipe in recipes]
    shown = ", ".join(sorted(dict.fromkeys(named), key=str.casefold))
    if by_name:
        terminal.prose(f"Recipes without a published rotation (oscar-zoo compute): {shown}")
    else:
        terminal.prose(
            f"Recipes without a published rotation (oscar-zoo compute): {len(recipes)} models of"
            f" the families {shown}; see `oscar-zoo list --family NAME`"
        )


def _print(entries: Sequence[Entry], task: str) -> None:
    console = terminal.out()
    scores = [entry.score(task.casefold()) for entry in entries]
    if entries:
        measured = _MEASURED if any(entry.measured for entry in entries) else ()
        name = "GPQA" if task == "gpqa" else task
        numbers = (*_SHAPE, *measured, f"{name} BF16 → INT2")
        right = tuple(range(2, 1 + len(numbers)))
        # Some column says how good a row is: what was measured goes only where the score is known.
        spare = (_SHAPE, _MEASURED) if any(scores) else (_SHAPE,)
        table = terminal.table("MODEL", "TAG", *numbers, "STATUS", right=right, spare=spare)
        for entry, score in zip(entries, scores, strict=True):
            summary, state, figures = entry.summary, entry.status.state, entry.measured
            bits = f"{summary.bits_per_element:.2f}" if summary.bits_per_element else "-"
            cells = [entry.id.model, entry.id.tag, summary.format_version or "-", bits]
            if measured:
                cells += [getattr(figures, "short_perplexity", None) or "-"]
                cells += [getattr(figures, "short_recall", None) or "-"]
            both = both_text(score) if score else terminal.NOT_REPORTED
            both += " ᵘ" if score and score.reporter == "upstream" else ""
            where = entry.where if state == "active" else f"{entry.where}, {state}"
            table.add_row(*map(terminal.clean, (*cells, both, where)))
        console.print(table)
        if table.shows(_MEASURED[0], console):
            terminal.prose(
                "PERPLEXITY and RECALL: measured by oscar-zoo on held-out text; see `oscar-zoo info"
                " NAME`"
            )
        elif measured:
            terminal.prose(
                "PERPLEXITY and RECALL do not fit this terminal; see `oscar-zoo info NAME`"
            )
    if any(score.reporter == "upstream" for entry in entries for score in entry.scores):
        terminal.prose("ᵘ reported upstream, number of runs unknown; see `oscar-zoo info NAME`")


def print_board(board: Leaderboard, params: LeaderboardParams, *, quiet: bool) -> None:
    """A line for each artifact, and what is ranked."""
    of_text = board.task == PERPLEXITY
    compared = ("CHANGE",) if of_text else ("DIFFERENCE", "N")
    width = len(str(len(board.places)))
    head = f"{'#':>{width}}  ARTIFACT"
    right = tuple(range(2, 4 + len(compared)))
    table = terminal.table(head, "REPORTED BY", "BF16", "INT2", *compared, right=right)
    for place in board.places:
        score = place.score
        cells = (
            f"{place.rank:>{width}}  {place.id.reference}",
            score.who or score.reporter.replace("_", " "),
            value_text(score.baseline) or "-",
            (value_text(score) or "-") + ("ᶜ" if place.calibrated_on else ""),
            *(_change(place) if of_text else _difference(score)),
        )
        table.add_row(*map(terminal.clean, cells))
    terminal.out().print(table)
    _explain(board)


def _explain(board: Leaderboard) -> None:
    first = board.places[0].score
    unit = "" if first.unit == first.metric else f" in {first.unit}"
    what = "smallest change over BF16" if board.task == PERPLEXITY else "highest with INT2"
    terminal.prose(f"{board.task}: {first.metric}{unit}, the {what} first")
    if any(place.calibrated_on for place in board.places):
        terminal.prose("ᶜ the rotation was fitted on a text with questions of this benchmark")
    if board.task != PERPLEXITY and not all(place.score.paired for place in board.places):
        terminal.prose("- is not reported; a difference needs the answers of both caches")
    for error in board.unreachable:
        terminal.note(f"note: {error.message}")


def _change(place: Place) -> tuple[str]:
    change = place.change_percent
    return ("-" if change is None else f"{change:+.2f} %",)


def _difference(score: Score) -> tuple[str, str]:
    """With its confidence interval and the number of questions. Two single values say nothing about
    a difference."""
    questions, paired = "-" if score.n is None else str(score.n), score.paired
    if paired is None:
        return "-", questions
    ends = f"[{paired.lower95:+.2f}, {paired.upper95:+.2f}]"
    return f"{paired.difference:+.2f} {ends}", questions
