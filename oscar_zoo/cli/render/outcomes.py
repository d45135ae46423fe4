"""Verification outcomes as text and as JSON: one place that spells out the closed union."""

from __future__ import annotations

from typing import Any, assert_never

from rich.console import Console

from oscar_zoo.artifact.outcome import (
    Check,
    DigestMismatch,
    Outcome,
    Rejected,
    Unreadable,
    Unsupported,
    Verified,
    warning_text,
)
from oscar_zoo.cli.render import terminal
from oscar_zoo.registry.verification import Checked

NOT_REACHED = "not reached"
"""Detail of the checks that a failed one made pointless; people are not shown them."""


def outcome_json(path: str, outcome: Outcome) -> dict[str, Any]:
    """The facts of one outcome; `outcome` names which of the five it is."""
    facts: dict[str, Any] = {"path": path, "ok": isinstance(outcome, Verified)}
    facts["checks"] = [
        {"name": c.name, "state": c.state, "detail": c.detail} for c in outcome.checks
    ]
    match outcome:
        case Verified():
            files = [{"path": f.path, "sha256": f.sha256, "size": f.size} for f in outcome.files]
            return facts | {
                "outcome": "verified",
                "level": outcome.level,
                "grade": outcome.grade,
                "digest": outcome.digest,
                "files": files,
                "warnings": list(outcome.warnings),
            }
        case DigestMismatch():
            return facts | {
                "outcome": "digest_mismatch",
                "file": outcome.path,
                "want": outcome.want,
                "got": outcome.got,
            }
        case Rejected():
            where = {
                "layer": outcome.layer,
                "head": outcome.head,
                "measured": outcome.measured,
                "limit": outcome.limit,
            }
            return facts | {
                "outcome": "rejected",
                "stage": outcome.stage,
                "code": outcome.code,
                "message": outcome.message,
                "file": outcome.path,
                **where,
            }
        case Unsupported():
            return facts | {
                "outcome": "unsupported",
                "kind": outcome.kind,
                "reason": outcome.reason,
            }
        case Unreadable():
            return facts | {"outcome": "unreadable", "cause": outcome.cause, "file": outcome.path}
        case _:
            assert_never(outcome)


def headline(outcome: Outcome) -> str:
    """One line for people; never "verified" without the level that was reached, nor what a failed
    check says below."""
    told = any(check.state == "failed" for check in outcome.checks)
    match outcome:
        case Verified():
            what = {"fp64": "to float64 rounding", "fp32": "to float32 rounding only"}[
                outcome.grade
            ]
            return f"verified to level {outcome.level}, {what}"
        case DigestMismatch():
            if told:
                return "these are not the bytes that were promised"
            return f"{outcome.path}: sha256 is {outcome.got}, expected {outcome.want}"
        case Rejected():
            return outcome.code if told else f"{outcome.code}: {outcome.message}"
        case Unsupported():
            return f"unsupported ({outcome.kind}): {outcome.reason}"
        case Unreadable():
            return f"unreadable: {outcome.cause}"
        case _:
            assert_never(outcome)


def next_step(
    checked: Checked, *, model: str | None = None, digest: str | None = None
) -> str | None:
    """What a person can do about a failed outcome.

    Args:
        checked: what was verified.
        model, digest: what `verify` was told to compare with.
    """
    match checked.outcome:
        case Verified():
            return None
        case Rejected(code="layers.gaps"):
            return (
                "name the model so that its attention layers are known: oscar-zoo verify PATH"
                " --model NAME"
            )
        case Rejected(code="layers.missing" | "layers.extra") | Rejected(stage="model"):
            if model is not None:
                return (
                    f"it does not fit {model}; name the model that it was made for, or see:"
                    " oscar-zoo list"
                )
            return (
                "it fits another model; name the one it is for with --model, or see: oscar-zoo list"
            )
        case DigestMismatch(want=want) if want == digest:
            return "do not use this copy, or compare with the digest of the version that it is"
        case _ if checked.stored:
            return f"oscar-zoo pull {checked.label}"
        case DigestMismatch():
            return "fetch the artifact again; do not use this copy"
        case Rejected(code="v-is-k" | "k-is-v"):
            return "the two files look swapped; swap them and verify again"
        case Rejected():
            return (
                "do not serve it; get it again from its author or compute a new one: oscar-zoo"
                " compute --help"
            )
        case Unsupported() | Unreadable():
            return (
                "give a rotation file or a folder with a K/V pair, and check that you may read it"
            )
        case _:
            assert_never(checked.outcome)


def print_outcome(console: Console, path: str, outcome: Outcome) -> None:
    """The report of one artifact: a headline, then one line per check."""
    mark = "[green]OK[/]" if isinstance(outcome, Verified) else "[red]FAILED[/]"
    console.print(f"[bold]{terminal.clean(path)}[/]  {mark}  {terminal.clean(headline(outcome))}")
    for check in outcome.checks:
        if check.detail != NOT_REACHED:
            console.print(check_line(check))
    if isinstance(outcome, Verified):
        console.print(f"  digest         {outcome.digest}")
        for code in outcome.warnings:
            console.print(f"  [yellow]warning[/]        {warning_text(code)} ({code})")


def check_line(check: Check) -> str:
    """One check, aligned: name, state, what was found."""
    detail = check.detail.removeprefix("not checked: ")
    return (
        f"  {check.name:<14} {terminal.MARKS[check.state]:<{11 + _markup(check.state)}}"
        f" {terminal.clean(detail)}"
    )


def _markup(state: str) -> int:
    """Characters of colour markup in the mark of `state`, which take no room on the screen."""
    return len(terminal.MARKS[state]) - len({"failed": "FAILED"}.get(state, state))
