"""What `scores` shows: every record of an artifact with its baseline, its error and its history."""

from __future__ import annotations

from shlex import quote

from oscar_zoo.artifact.specs import Score
from oscar_zoo.cli.render import terminal
from oscar_zoo.next_step import Compute, capitalized
from oscar_zoo.registry.catalog import can_be_found
from oscar_zoo.registry.measured import Measured
from oscar_zoo.registry.score_file import is_lower_better, value_text
from oscar_zoo.site.info import ScoresReport
from oscar_zoo.site.params import AddScoresParams, ScoresParams
from oscar_zoo.site.status import AddedScores

_REPORTERS = {
    "measured": "measured",
    "third_party": "reported by a third party",
    "upstream": "reported by upstream",
}


def score_line(score: Score) -> str:
    """One score in a line: baseline, value, difference, who says so, how often it ran, and
    other values."""
    cache = score.kv_dtype.upper()
    before = "" if score.kv_dtype == "bf16" else f"BF16 {_value(score.baseline)}, "
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
        *(_other(entry.value, entry.source, entry.date) for entry in score.history),
    ]
    first, *rest = (part for part in parts if part)
    return f"{first}; {', '.join(rest)}"


def print_scores(report: ScoresReport, params: ScoresParams, *, quiet: bool) -> None:
    """The records of every artifact that was asked for, and what can be done about them."""
    for artifact in report.artifacts:
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
    if not report.artifacts:
        name = str(params.name)
        step = Compute(name, f"oscar-zoo pull {quote(name)} --compute")
        terminal.note(f"No artifacts for {name}. {capitalized(str(step))}", quiet=quiet)
    for text in (text for artifact in report.artifacts for text in artifact.warnings):
        terminal.note(f"warning: {text}", quiet=quiet)
    for artifact in report.artifacts:
        place, figures = quote(artifact.place), artifact.made or artifact.at_pull
        if artifact.own:
            add = f"oscar-zoo scores add {place} {artifact.own_path}"
            terminal.note(f"Next: {add}", quiet=quiet)
        elif figures is None and not any(s.reporter == "measured" for s in artifact.scores):
            model = "" if can_be_found(artifact.id.partition("/")[0]) else " --model FOLDER"
            terminal.note(f"Next: oscar-zoo eval {place}{model}", quiet=quiet)


def _print_figures(measured: Measured | None, when: str) -> None:
    """Perplexity and recall, who measured them, and when."""
    if measured is not None:
        lines = (measured.perplexity_line, measured.recall_line)
        for label, line in zip(("perplexity", "recall"), lines, strict=True):
            if line is not None:
                terminal.fact(label, f"{line}; {measured.by}, {when}")


def print_added(report: AddedScores, params: AddScoresParams, *, quiet: bool) -> None:
    """Scores on each hub that took them, and why a later one did not."""
    for one in report.hubs:
        reference, place = terminal.clean(one.id.reference), terminal.clean(one.hub)
        verb = "Proposed" if one.proposal else "Added" if one.changed else "Already there"
        tasks = terminal.clean(", ".join(dict.fromkeys(score.task for score in one.scores)))
        terminal.out().print(f"{verb}: scores of {reference} on {place}, now {tasks}")
        if one.proposal is not None:
            terminal.note(f"Next: ask its owner to merge {one.proposal}", quiet=quiet)
        elif one.changed:
            terminal.note(f"Next: oscar-zoo scores {one.id.reference}", quiet=quiet)
    terminal.print_failure(report.error)


def _value(score: Score | None) -> str:
    text = value_text(score)
    if score is None or text is None:
        return terminal.NOT_REPORTED
    return text + {"percent": "", score.task: ""}.get(score.unit, f" {score.unit}")


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
        f" 95 % confidence{chance}), one-sided at most {max(paired.no_worse_than, 0):.2f} {worse}"
    )


def _cut(score: Score) -> str | None:
    if score.exhausted_rate is None:
        return None
    return f"{100 * score.exhausted_rate:.1f} % of the answers cut by the budget"


def _changes(score: Score) -> str:
    return ", ".join(f"{name} {value}" for name, value in sorted(score.recipe_changes.items()))


def _other(value: float, source: str, date: str | None) -> str:
    return f"also {value:.2f} ({source}{f', {date}' if date else ''})"


def _runs(score: Score) -> str:
    if score.repeats is None:
        return "runs not reported"
    return "1 run" if score.repeats == 1 else f"{score.repeats} runs"
