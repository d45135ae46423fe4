"""What `leaderboard` shows."""

from __future__ import annotations

from oscar_zoo.app.leaderboard import Leaderboard, Place
from oscar_zoo.artifact.specs import Score
from oscar_zoo.cli.render import terminal
from oscar_zoo.registry.entries import score_summary
from oscar_zoo.registry.score_file import PERPLEXITY


def emit_board(board: Leaderboard) -> None:
    """The JSON of `leaderboard`."""
    facts = {
        "task": board.task,
        "places": [_facts(rank, place) for rank, place in enumerate(board.places, 1)],
        "tasks": list(board.tasks),
        "notes": [error.message for error in board.unreachable],
    }
    terminal.emit_json({"schema": "oscar-zoo.leaderboard/1"} | facts)


def _facts(rank: int, place: Place) -> dict[str, object]:
    score, paired = place.score, place.score.paired
    return {
        "rank": rank,
        "id": str(place.entry.id),
        "digest": place.entry.digest,
        "score": score_summary(score),
        "n": score.n,
        "repeats": score.repeats,
        "difference": paired.difference if paired else None,
        "lower95": paired.lower95 if paired else None,
        "upper95": paired.upper95 if paired else None,
        "change_percent": place.change_percent,
        "calibrated_on": place.is_calibrated_on,
    }


def print_board(board: Leaderboard) -> None:
    """A line for each artifact, and what is ranked."""
    of_text = board.task == PERPLEXITY
    compared = ("CHANGE",) if of_text else ("DIFFERENCE", "N")
    width = len(str(len(board.places)))
    head = f"{'#':>{width}}  ARTIFACT"
    right = tuple(range(2, 4 + len(compared)))
    table = terminal.table(head, "REPORTED BY", "BF16", "INT2", *compared, right=right)
    for rank, place in enumerate(board.places, 1):
        score = place.score
        cells = (
            f"{rank:>{width}}  {place.entry.id.reference}",
            score.who or score.reporter.replace("_", " "),
            _value(score.baseline),
            _value(score) + ("ᶜ" if place.is_calibrated_on else ""),
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
    if any(place.is_calibrated_on for place in board.places):
        terminal.prose("ᶜ the rotation was fitted on a text with questions of this benchmark")
    for error in board.unreachable:
        terminal.note(f"note: {error.message}")


def _value(score: Score | None) -> str:
    if score is None or score.value is None:
        return "-"
    return f"{score.value:.2f}" + ("" if score.stderr is None else f" ± {score.stderr:.2f}")


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
