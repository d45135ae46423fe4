"""What `scores` shows: every record of an artifact with its baseline, its error and its history."""

from __future__ import annotations

from shlex import quote
from typing import Any

from oscar_zoo.app.scores import KnownScores
from oscar_zoo.artifact.specs import Score
from oscar_zoo.cli.render import terminal
from oscar_zoo.cli.render.listing import no_artifacts
from oscar_zoo.next_step import Compute, capitalized
from oscar_zoo.registry.measured import Measured
from oscar_zoo.registry.score_file import is_lower_better
from oscar_zoo.registry.status import AttachResult
from oscar_zoo.registry.writing import Written

_REPORTERS = {
    "measured": "measured",
    "third_party": "reported by a third party",
    "upstream": "reported by upstream",
}


def score_line(score: Score) -> str:
    """One score in a line: baseline, value, difference, who says so, how often it ran, and what was
    said before."""
    cache = score.kv_dtype.upper()
    before = (
        f"BF16 {_value(score.baseline) if score.baseline else terminal.NOT_REPORTED}, "
        if score.kv_dtype != "bf16"
        else ""
    )
    parts = [
        f"{score.task}{_metric(score)}: {before}{cache} {_value(score)}",
        _difference(score),
        f"{_REPORTERS[score.reporter]}{f' by {score.who}' if score.who else ''}",
        _runs(score),
        f"n {score.n}" if score.n else None,
        score.date,
        _cut(score),
        f"with {_changes(score)}" if score.recipe_changes else None,
        "calibrated on this set" if score.calibrated_on else None,
        *(_earlier(entry.value, entry.source, entry.date) for entry in score.history),
    ]
    first, *rest = (part for part in parts if part)
    return f"{first}; {', '.join(rest)}"


def print_scores(known: tuple[KnownScores, ...]) -> None:
    """The records of every artifact that was asked for."""
    for artifact in known:
        name = artifact.id.replace("/", ":", 1)
        terminal.out().print(f"[bold]{terminal.clean(name)}[/]")
        _print_figures(artifact.made, "when it was made")
        if artifact.at_pull != artifact.made and not artifact.scores:
            _print_figures(artifact.at_pull, "as its hub said when it was pulled")
        for score in artifact.scores:
            terminal.fact("score", score_line(score))
        for score in artifact.own:
            terminal.fact("not published", score_line(score))
        if not (artifact.made or artifact.at_pull or artifact.scores or artifact.own):
            terminal.fact("score", terminal.NOT_REPORTED)


def _print_figures(measured: Measured | None, when: str) -> None:
    """Perplexity and recall, who measured them, and when."""
    if measured is not None:
        lines = (measured.perplexity_line, measured.recall_line)
        for label, line in zip(("perplexity", "recall"), lines, strict=True):
            if line is not None:
                terminal.fact(label, f"{line}; {measured.by}, {when}")


def nothing_known(name: str) -> str:
    """What is said of a model without artifacts, and what can be done about it."""
    step = Compute(name, f"oscar-zoo pull {quote(name)} --compute")
    return f"{no_artifacts(name)} {capitalized(str(step))}"


def next_steps(known: tuple[KnownScores, ...]) -> tuple[str, ...]:
    """What can be done about records that are not published, and about artifacts without any."""
    steps = []
    for artifact in known:
        place, figures = quote(artifact.place), artifact.made or artifact.at_pull
        if artifact.own:
            steps.append(f"Next: oscar-zoo scores add {place} {artifact.own_path}")
        elif figures is None and not any(s.reporter == "measured" for s in artifact.scores):
            steps.append(f"Next: oscar-zoo eval {place}")
    return tuple(steps)


def scores_json(known: tuple[KnownScores, ...]) -> dict[str, Any]:
    """The JSON of `scores`."""
    return {
        "schema": "oscar-zoo.scores-of/1",
        "artifacts": [
            {
                "id": artifact.id,
                "made": artifact.made.model_dump(mode="json") if artifact.made else None,
                "at_pull": artifact.at_pull.model_dump(mode="json") if artifact.at_pull else None,
                "scores": [score.model_dump(mode="json") for score in artifact.scores],
                "not_published": [score.model_dump(mode="json") for score in artifact.own],
                "warnings": list(artifact.warnings),
            }
            for artifact in known
        ],
    }


def added_row(written: Written[AttachResult]) -> dict[str, Any]:
    """The facts of scores that one hub took."""
    result = written.result
    return {
        "hub": written.hub,
        "id": str(result.id),
        "digest": result.digest,
        "scores": [score.model_dump(mode="json") for score in result.scores],
        "changed": result.changed,
        "serial": result.serial,
        "revision": result.revision,
        "proposal": result.proposal,
    }


def print_added(written: Written[AttachResult], *, quiet: bool) -> None:
    """Scores that one hub took, for people."""
    result, place = written.result, terminal.clean(written.hub)
    reference = terminal.clean(result.id.reference)
    verb = "Proposed" if result.proposal else "Added" if result.changed else "Already there"
    tasks = ", ".join(dict.fromkeys(score.task for score in result.scores))
    terminal.out().print(f"{verb}: scores of {reference} on {place}, now {terminal.clean(tasks)}")
    if result.proposal is not None:
        terminal.note(f"Next: ask its owner to merge {result.proposal}", quiet=quiet)
    elif result.changed:
        terminal.note(f"Next: oscar-zoo scores {result.id.reference}", quiet=quiet)


def _value(score: Score) -> str:
    if score.value is None:
        return terminal.NOT_REPORTED
    error = "" if score.stderr is None else f" ± {score.stderr:.2f}"
    unit = {"percent": "", score.task: ""}.get(score.unit, f" {score.unit}")
    return f"{score.value:.2f}{error}{unit}"


def _metric(score: Score) -> str:
    return "" if score.metric in ("accuracy", score.task) else f" ({score.metric})"


def _difference(score: Score) -> str | None:
    """The paired difference with its interval; a bare difference is never shown."""
    paired = score.paired
    if paired is None:
        return None
    chance = "" if paired.p_value is None else f", p {paired.p_value:.2g}"
    worse = "above BF16" if is_lower_better(score) else "below BF16"
    return (
        f"difference {paired.difference:+.2f} ({paired.lower95:+.2f} to {paired.upper95:+.2f} with"
        f" 95 % confidence{chance}), at most {max(paired.no_worse_than, 0):.2f} {worse}"
    )


def _cut(score: Score) -> str | None:
    if score.exhausted_rate is None:
        return None
    return f"{100 * score.exhausted_rate:.1f} % of the answers cut by the budget"


def _changes(score: Score) -> str:
    return ", ".join(f"{name} {value}" for name, value in sorted(score.recipe_changes.items()))


def _earlier(value: float, source: str, date: str | None) -> str:
    return f"earlier {value:.2f} ({source}{f', {date}' if date else ''})"


def _runs(score: Score) -> str:
    if score.repeats is None:
        return "runs not reported"
    return "1 run" if score.repeats == 1 else f"{score.repeats} runs"
