"""Verification outcomes as text for people; their JSON is made of their fields."""

from __future__ import annotations

from pathlib import Path
from typing import assert_never

from oscar_zoo.artifact.manifest import SUFFIX
from oscar_zoo.artifact.outcome import (
    Check,
    DigestMismatch,
    Outcome,
    Rejected,
    Unreadable,
    Unsupported,
    Verified,
    VerifyReport,
    warning_text,
)
from oscar_zoo.cli.render import terminal
from oscar_zoo.cli.render.headlines import rejection
from oscar_zoo.errors import ArtifactSignatureError
from oscar_zoo.registry.params import VerifyParams

NOT_REACHED = "not reached"
"""Detail of the checks that a failed one made pointless; people are not shown them."""


def headline(outcome: Outcome) -> str:
    """One line for people; never "verified" without the level that was reached, nor what a failed
    check says below."""
    told = any(check.state == "failed" for check in outcome.checks)
    match outcome:
        case Verified():
            what = "to float64 rounding" if outcome.grade == "fp64" else "to float32 rounding only"
            return f"verified to level {outcome.level}, {what}"
        case DigestMismatch():
            if told:
                return "these are not the bytes that were promised"
            return f"{outcome.path}: sha256 is {outcome.got}, expected {outcome.want}"
        case Rejected():
            return rejection(outcome) if told else f"{rejection(outcome)}: {outcome.message}"
        case Unsupported():
            return f"unsupported ({outcome.kind}): {outcome.reason}"
        case Unreadable():
            return f"unreadable: {outcome.cause}"
        case _:
            assert_never(outcome)


def next_step(
    outcome: Outcome, *, model: str | Path | None = None, digest: str | None = None
) -> str | None:
    """What a person can do about a failed outcome."""
    match outcome:
        case Verified():
            return None
        case Rejected(code="layers.gaps"):
            known = "name the model so that its attention layers are known"
            return f"{known}: oscar-zoo verify PATH --model NAME"
        case Rejected(code="layers.missing" | "layers.extra") | Rejected(stage="model"):
            why = "it fits another model; name the one it is for with --model"
            if model is not None:
                why = f"it does not fit {model}; name the model that it was made for"
            return f"{why}, or see: oscar-zoo list"
        case DigestMismatch(want=want) if want == digest:
            return "do not use this copy, or compare with the digest of the version that it is"
        case Unreadable(hint=str(hint)):
            return hint
        case Rejected(stage="signature", code=code, message=message):
            return ArtifactSignatureError.of(outcome.label, code, message).hint
        case _ if outcome.fetch_again is not None:
            return outcome.fetch_again
        case Rejected(code="v-is-k" | "k-is-v"):
            return "the two files look swapped; swap them and verify again"
        case Rejected(code="incomplete_pair", path=str(path)):
            beside = "put the other file of the pair beside it"
            return f"{path} is alone; {beside}, or move it away if it is no rotation"
        case Rejected(path=str(path)) if _of_another_kind(outcome, path):
            return "this is no rotation; give a rotation file or a folder that holds a K/V pair"
        case Rejected(code="pickle.opcode" | "pickle.global"):
            return (
                "it is a file of another kind, or somebody changed it: never load it with"
                " torch.load. If it should be a rotation, fetch or compute it again"
            )
        case DigestMismatch() | Rejected():
            return (
                "do not use this copy. If you fetched it, fetch it again; if you computed it,"
                " compute it again: oscar-zoo compute MODEL --output-dir DIR --force"
            )
        case Unsupported() | Unreadable():
            file = "a rotation file or a folder with a K/V pair"
            return f"give {file}, and check that you may read it"
        case _:
            assert_never(outcome)


def _of_another_kind(outcome: Outcome, path: str) -> bool:
    """Whether the file `path` of an artifact is all that was named, and has no field of a rotation
    file, or not even the name of one."""
    if not isinstance(outcome, Rejected) or Path(outcome.label).name != path:
        return False
    other = outcome.stage == "container" and not path.endswith(SUFFIX)
    return other or outcome.code == "schema.foreign"


def print_report(report: VerifyReport, params: VerifyParams, *, quiet: bool) -> None:
    """The report of `verify`, and what to do about what failed."""
    for warning in report.warnings:
        terminal.note(f"warning: {warning}", quiet=quiet)
    failed = [found for found in report.results if not found.ok]
    for found in failed if quiet else report.results:
        print_outcome(found.label, found)
    count = len(report.results)
    if count > 1 and not quiet:
        terminal.out().print(f"{count - len(failed)} of {count} artifacts passed")
    for found in failed:
        step = next_step(found, model=params.model, digest=params.digest)
        terminal.note(f"Next: {step}" if count == 1 else f"Next, {found.label}: {step}")


def print_outcome(path: str, outcome: Outcome) -> None:
    """The report of one artifact: a headline, then one line per check."""
    word, mark = ("OK", "[green]OK[/]") if outcome.ok else ("FAILED", "[red]FAILED[/]")
    label = f"[bold]{terminal.clean(path)}[/]  {mark}  "
    plain = f"{terminal.printable(path)}  {word}  "
    terminal.labelled(label, headline(outcome), plain_label=plain)
    for check in outcome.checks:
        if check.detail != NOT_REACHED:
            _print_check(check)
    if isinstance(outcome, Verified):
        terminal.labelled("  digest         ", outcome.digest)
        for code in outcome.warnings:
            label, plain = (f"  {one}        " for one in ("[yellow]warning[/]", "warning"))
            terminal.labelled(label, f"{warning_text(code)} ({code})", plain_label=plain)


def _print_check(check: Check) -> None:
    """One check, aligned: name, state, what was found."""
    word = {"failed": "FAILED"}.get(check.state, check.state)
    name, room = f"  {check.name:<14} ", " " * max(12 - len(word), 1)
    terminal.labelled(
        name + terminal.MARKS[check.state] + room,
        check.detail.removeprefix("not checked: "),
        plain_label=name + word + room,
    )
