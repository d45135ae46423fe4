"""What `eval` and `ruler` measured, as people see it, and lines of a CSV file for servers."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from oscar_zoo.artifact.names import path_text
from oscar_zoo.artifact.specs import Score
from oscar_zoo.cli.render import terminal
from oscar_zoo.evaluate.against_table import LONG
from oscar_zoo.evaluate.shared import cache_title, length_text

if TYPE_CHECKING:
    from rich.table import Table

    from oscar_zoo.evaluate import outcome

_VALUES = {"sink": "SINK", "recent": "RECENT", "clip": "CLIP", "group_size": "GROUP"}
"""Columns of what may differ between rows of one cache."""
_SHORT = {"bf16": "BF16", "artifact": "INT2"}
"""Names of the caches where these columns need the room."""
_WINDOWS: Mapping[str | None, str] = {"lent": "†", "none": "‡"}


def print_report(report: outcome.EvalReport, data: str) -> None:
    """One line per cache, with the change against BF16, and what an element costs in long
    sequences; `data` is the text that was measured on."""
    terminal.out().print(_measured(report.rows, report.length))
    print_bits(report.rows)
    if "perplexity" in report.tasks:
        cut = report.tasks["perplexity"]
        terminal.prose(
            f"Perplexity of {cut['windows']} window(s) of {cut['length']:,} tokens of {data}, all"
            " positions; other text or windows give other numbers"
        )
    if report.record is not None:
        terminal.out().print(f"Scores: {terminal.clean(path_text(report.record))}")


def _measured(rows: Sequence[outcome.EvalRow], length: int) -> Table:
    """Bits and results of every row; `length` is that of the sequences in tokens."""
    base, changed = rows[0].perplexity, _changed(rows)
    columns = [*changed.values(), "BITS", f"BITS AT {length_text(length)}"]
    columns += ["PERPLEXITY", "vs BF16"] if base is not None else []
    columns += ["RECALL"] if rows[0].recall is not None else []
    table = terminal.table("CACHE", *columns, right=tuple(range(1, len(columns) + 1)))
    for row in rows:
        cells = [str(row.changes.get(name, "")) for name in changed]
        cells += [f"{row.bits_per_element:.2f}", f"{row.bits_per_element_with_windows:.2f}"]
        if base is not None and row.perplexity is not None:
            change = "" if row is rows[0] else f"{100 * (row.perplexity / base - 1):+,.1f} %"
            cells += [f"{row.perplexity:,.3f}", change]
        if row.recall is not None:
            cells.append(f"{row.recall:.1%}")
        table.add_row(_SHORT[row.cache] if changed else cache_title(row.cache), *cells)
    return table


def print_bits(rows: Sequence[outcome.EvalRow]) -> None:
    """Bits of an element in long sequences: a line where all rows have the same, else a table."""
    changed = {name: head for name, head in _changed(rows).items() if name != "clip"}
    heads = [length_text(int(tokens)) for tokens in rows[-1].bits_per_element_at]
    several: dict[tuple[object, ...], outcome.EvalRow] = {}
    for row in rows[1:]:
        several.setdefault(tuple(row.changes.get(name) for name in changed), row)
    first, last = next(iter(several.values())), rows[-1]
    if len(several) == 1:
        bits = last.bits_per_element_at.values()  # of the artifact, where there is one
        each = ", ".join(f"{count:.2f} at {head}" for head, count in zip(heads, bits, strict=True))
        whose = "" if first.bits_per_element == last.bits_per_element else " of it"
        terminal.prose(f"Bits of an element{whose} by tokens of a sequence, with windows: {each}")
        return
    columns = [*list(changed.values())[1:], *(f"BITS AT {head}" for head in heads)]
    table = terminal.table(
        next(iter(changed.values())), *columns, right=tuple(range(len(columns) + 1))
    )
    for values, row in several.items():
        bits = row.bits_per_element_at.values()
        table.add_row(*map(str, values), *(f"{count:.2f}" for count in bits))
    terminal.out().print(table)


def _changed(rows: Sequence[outcome.EvalRow]) -> dict[str, str]:
    """The columns of `_VALUES` that these rows need."""
    return {name: head for name, head in _VALUES.items() if name in rows[-1].changes}


def print_sessions(report: outcome.SessionsReport) -> None:
    """One line per cache: the divergence by position, and what becomes of calls and names."""
    heads = [f"TO {length_text(int(end))}" for end in report.rows[0].divergence_to]
    columns = ["BITS", "KL, nats", *heads, "CALLS PARSE", "SAME", "TOKENS", "RECALL"]
    table = terminal.table("CACHE", *columns, right=tuple(range(1, len(columns) + 1)))
    for row in report.rows:
        shares = (row.calls_valid, row.calls_same, row.call_tokens_same, row.recall)
        table.add_row(
            cache_title(row.cache),
            f"{row.bits_per_element_with_windows:.2f}",
            *(f"{value:.4f}" for value in (row.divergence, *row.divergence_to.values())),
            *(f"{share:.1%}" for share in shares),
        )
    terminal.out().print(table)
    asked = report.tasks["sessions"]
    terminal.prose(
        f"{asked['sessions']} session(s) of {report.length:,} tokens with {asked['calls']} calls"
        f" and {asked['recalls']} questions; KL at {asked['positions']:,} positions, by stretch;"
        " SAME and TOKENS are calls and their tokens as with BF16"
    )


def print_against(report: outcome.AgainstReport) -> None:
    """One line per cache, by bits, with the Pareto-optimal ones marked."""
    short, long = length_text(report.length), length_text(int(LONG))
    table = terminal.table(
        "CACHE", "BITS", f"AT {short}", f"AT {long}", "TOKENS/GB", "KL, nats", "PERPLEXITY",
        "DIGITS", "ANSWERS", right=tuple(range(1, 9)),
    )  # fmt: skip
    for row in report.rows:
        table.add_row(
            terminal.clean(row.title if row.own else row.cache) + _WINDOWS.get(row.windows, ""),
            f"{row.bits_per_element:.2f}",
            f"{row.bits_per_element_with_windows:.2f}{'*' if row.pareto else ' '}",
            f"{row.bits_per_element_at[LONG]:.2f}{'*' if row.pareto_at[LONG] else ' '}",
            f"{row.tokens_per_gb:,}",
            *_losses(row),
            f"{row.digits:.1%}",
            f"{row.answers:.1%}",
        )
    terminal.out().print(table)
    divergence, recall = report.tasks["divergence"], report.tasks["recall"]
    terminal.prose(
        f"* no cache has fewer bits and less KL, for sequences of so many tokens. KL is measured at"
        f" {divergence['positions']:,} positions of {divergence['windows']} window(s) of"
        f" {report.length:,} tokens, recall on {recall['answers']} answers. 1 GB is 10^9 bytes, of"
        f" sequences of {length_text(report.context)} tokens with their windows. † published"
        " without exact first and last tokens, and lent ours here; ‡ without any, here too"
    )


def _losses(row: outcome.AgainstRow) -> tuple[str, str]:
    """Divergence, and the change of perplexity in percent, with their standard errors."""
    if row.cache == "bf16":
        return "0", f"{row.perplexity:,.3f}"
    kl, change = f"{row.divergence:.2g}", f"{row.perplexity_change:+,.2f}"
    if row.divergence_error is not None:
        kl += f" ± {row.divergence_error:.1g}"
    if row.perplexity_change_error is not None:
        change += f" ± {row.perplexity_change_error:,.2f}"
    return kl, f"{change} %"


def print_servers(found: outcome.ServerReport) -> None:
    """A line per server, then every violation."""
    console, rows = terminal.out(), found.servers
    table = terminal.table(
        "CHUNK", "PAGE", "RADIX", "TP", "PERPLEXITY", "REFERENCE", "DIFF", "AFTER A HIT", "DIFF",
        "RECALL", "ALONE", "REFERENCE", "", right=(0, 1, 3, 4, 5, 6, 7, 8, 9, 10, 11),
    )  # fmt: skip
    for row in rows:
        head = [str(row.chunk), str(row.page_size), "on" if row.radix else "off"]
        warm, _, difference = _perplexity(row.perplexity_after_hit)
        cells = [*_perplexity(row.perplexity), warm, difference, *_recall(row)]
        mark = terminal.MARKS["failed" if row.violations else "ok"]
        table.add_row(*head, str(row.tensor_parallel), *cells, mark)
    console.print(terminal.clean(found.model))
    caches = [row.perplexity for row in rows if row.engine is None and row.perplexity is not None]
    if caches:  # in this process
        table = terminal.table("CACHE", "PERPLEXITY", "vs BF16", right=(1, 2))
    for told in caches:
        base, own = told.exact, {"OscarCache": told.server, "simulated": told.reference}
        for name, value in {"BF16": base, **own}.items():
            table.add_row(name, f"{value:,.4f}", f"{100 * (value / base - 1):+.2f} %")
    console.print(table)
    served = [row.perplexity.exact for row in rows if row.engine and row.perplexity is not None]
    for exact in served[:1]:
        console.print(f"Without quantization the perplexity is {exact:,.4f}.")
        apart = max(row.largest_difference or 0 for row in rows)
        console.print(f"Log-probabilities are {apart:.2g} from the reference's at most.")
    for row in rows:
        for violation in row.violations:
            console.print(f"chunk {row.chunk}, page {row.page_size}: {terminal.clean(violation)}")


def print_failures(failures: Sequence[outcome.FailedServer]) -> None:
    """A line on stderr for every server that gave no answers."""
    for one in failures:
        message = f"{one.server}: {one.error.message}"
        terminal.print_error(one.error.code, message, one.error.hint, as_json=False)


def to_csv(servers: Sequence[Mapping[str, Any]]) -> str:
    """One line per server of the JSON; numbers in full, empty where there is none."""
    flat = [_flat(row) for row in servers]
    stream = io.StringIO()
    writer = csv.DictWriter(stream, list(flat[0]) if flat else ["chunk"], lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    return stream.getvalue()


def _flat(row: Mapping[str, Any]) -> dict[str, Any]:
    parts = {
        "perplexity": ("server", "reference", "deviation", "exact"),
        "perplexity_after_hit": ("server", "reference", "deviation", "exact"),
        "recall": ("answers", "talking", "alone", "reference"),
    }
    found: dict[str, Any] = {}
    for name, value in row.items():
        if name in parts:
            found |= {f"{name}_{part}": (value or {}).get(part) for part in parts[name]}
        else:
            found[name] = "; ".join(map(str, value)) if isinstance(value, list) else value
    return found


def _perplexity(found: outcome.Perplexities | None) -> tuple[str, str, str]:
    """That of the server and of the reference, and how far they are apart."""
    if found is None:
        return "-", "-", "-"
    return f"{found.server:,.4f}", f"{found.reference:,.4f}", f"{100 * found.deviation:+.3f} %"


def _recall(row: outcome.ServerRow) -> list[str]:
    if (recall := row.recall) is None:
        return ["-", "-", "-"]
    return [
        "-" if share is None else f"{round(share * recall.answers)} of {recall.answers}"
        for share in (recall.talking, recall.alone, recall.reference)
    ]


_CACHES = {"int2": "INT2", "fp8": "FP8"}


def print_benchmarks(found: outcome.BenchmarkReport) -> None:
    """The table, a sentence per comparison, and where the scores are."""
    table = terminal.table(
        "TASK", "N", "BF16", "CACHE", "SCORE", "DIFFERENCE", "95 % INTERVAL", "CUT",
        right=(1, 2, 4, 5, 6, 7),
    )  # fmt: skip
    scores = [score for task in found.tasks for score in task.scores]
    for score in scores:
        table.add_row(*_row(score))
    terminal.out().print(terminal.clean(found.model))
    terminal.out().print(table)
    for score in scores:
        if score.paired is not None:
            terminal.prose(_sentence(score))
    if found.file is not None:
        terminal.prose(f"Scores: {found.file}")
    for task in found.tasks:
        terminal.prose(f"Answers: {task.answers}")


def _row(score: Score) -> list[str]:
    paired, base = score.paired, score.baseline
    return [
        terminal.clean(score.task),
        f"{score.n} x {score.repeats}",
        "-" if base is None else _value(base),
        _CACHES[score.kv_dtype],
        _value(score),
        "-" if paired is None else f"{paired.difference:+.1f}",
        "-" if paired is None else f"{paired.lower95:+.1f} .. {paired.upper95:+.1f}",
        f"{100 * (score.exhausted_rate or 0):.0f} %",
    ]


def _value(score: Score) -> str:
    return f"{score.value:.1f} ± {score.stderr:.1f}"


def _sentence(score: Score) -> str:
    paired = score.paired
    assert paired is not None
    chance = "" if paired.p_value is None else f" (McNemar p = {paired.p_value:.2g})"
    return (
        f"{score.task}: {_CACHES[score.kv_dtype]} is at most {paired.no_worse_than:.1f} points"
        f" worse than BF16, with 95 % confidence{chance}."
    )


def print_ruler(report: outcome.RulerReport, params: object = None, *, quiet: bool = False) -> None:
    """A row per cache with the share of right answers at every length, then the depths of the
    longest prompts."""
    lengths = report.lengths
    with_bits = any(row.bits_per_element is not None for row in report.rows)
    heads = [length_text(n) for n in lengths]
    columns = [*heads, *(f"BITS AT {head}" for head in heads[-1:] if with_bits)]
    table = terminal.table("RIGHT ANSWERS", *columns, right=tuple(range(1, len(columns) + 1)))
    for cache in report.caches:
        rows = {row.length: row for row in report.rows if row.cache == cache}
        bits = rows[lengths[-1]].bits_per_element
        last = [f"{bits:.2f}"] if bits is not None else []
        table.add_row(cache_title(cache), *(f"{rows[n].share:.1%}" for n in lengths), *last)
    terminal.out().print(table)
    terminal.out().print(_families(report))
    if report.places:
        terminal.out().print(_depths(report, lengths[-1]))
    prompts = "1 prompt" if report.samples == 1 else f"{report.samples} prompts"
    text = f"{prompts} for each family, length and depth"
    terminal.out().print(f"Whole answers; {text}; the first table has the mean over families")


def _families(report: outcome.RulerReport) -> Table:
    """A row per family, with all lengths together."""
    from oscar_zoo.evaluate.ruler_prompts import FAMILIES

    names = [cache_title(cache) for cache in report.caches]
    table = terminal.table("FAMILY", *names, right=tuple(range(1, len(names) + 1)))
    for family in report.families:
        shares = (report.share(cache, family=family) for cache in report.caches)
        title = f"{family}: {FAMILIES[family].title}"  # type: ignore[index]
        table.add_row(title, *(f"{share:.1%}" for share in shares))
    return table


def _depths(report: outcome.RulerReport, length: int) -> Table:
    """A row per cache: how it does by depth at one length."""
    places = [f"{depth:.0%}" for depth in report.places]
    head = f"DEPTH, {length:,} TOKENS"
    table = terminal.table(head, *places, right=tuple(range(1, len(places) + 1)))
    for cache in report.caches:
        shares = (report.share(cache, length=length, depth=depth) for depth in report.places)
        table.add_row(cache_title(cache), *("" if x is None else f"{x:.0%}" for x in shares))
    return table
