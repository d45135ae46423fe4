"""Verification outcomes as text and as JSON: one place that spells out the closed union."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, assert_never

from oscar_zoo.artifact.manifest import SUFFIX
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
from oscar_zoo.cli.render.headlines import rejection
from oscar_zoo.errors import ArtifactSignatureError
from oscar_zoo.registry.signatures import SignatureReport
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
            return rejection(outcome) if told else f"{rejection(outcome)}: {outcome.message}"
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
        case Unreadable(hint=str(hint)):
            return hint
        case Rejected(stage="signature", code=code, message=message):
            return ArtifactSignatureError.of(checked.label, code, message).hint
        case _ if checked.fetch_again is not None:
            return checked.fetch_again
        case Rejected(code="v-is-k" | "k-is-v"):
            return "the two files look swapped; swap them and verify again"
        case Rejected(code="incomplete_pair", path=str(path)):
            return (
                f"{path} is alone; put the other file of the pair beside it, or move it away if it"
                " is no rotation"
            )
        case Rejected(path=str(path)) if _of_another_kind(checked, path):
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
            return (
                "give a rotation file or a folder with a K/V pair, and check that you may read it"
            )
        case _:
            assert_never(checked.outcome)


def _of_another_kind(checked: Checked, path: str) -> bool:
    """Whether the file `path` of an artifact is all that was named, and has no field of a rotation
    file, or not even the name of one."""
    match checked.outcome:
        case Rejected(code="schema.foreign"):
            other = True
        case Rejected(stage="container"):
            other = not path.endswith(SUFFIX)
        case _:
            other = False
    return other and Path(checked.label).name == path


def signature_json(report: SignatureReport | None) -> dict[str, Any] | None:
    """What is known about a signature."""
    if report is None:
        return None
    return {
        "state": report.state.replace(" ", "_"),
        "fingerprint": report.fingerprint,
        "known_by": report.by,
        "code": report.code,
        "message": report.message,
    }


def emit_results(results: Sequence[Checked], warnings: Sequence[str]) -> None:
    """The JSON of `verify`."""
    rows = [
        outcome_json(checked.label, checked.outcome)
        | {"signature": signature_json(checked.signature)}
        for checked in results
    ]
    facts = {"ok": all(row["ok"] for row in rows), "results": rows, "warnings": list(warnings)}
    terminal.emit_json({"schema": "oscar-zoo.verify/1"} | facts)


def print_results(
    results: Sequence[Checked],
    warnings: Sequence[str],
    *,
    model: str | None,
    digest: str | None,
    quiet: bool,
) -> None:
    """The report of `verify`, and what to do about what failed; arguments as for `next_step`."""
    for warning in warnings:
        terminal.note(f"warning: {warning}", quiet=quiet)
    failed = [checked for checked in results if not isinstance(checked.outcome, Verified)]
    for checked in failed if quiet else results:
        print_outcome(checked.label, checked.outcome)
    if len(results) > 1 and not quiet:
        passed = len(results) - len(failed)
        terminal.out().print(f"{passed} of {len(results)} artifacts passed")
    for checked in failed:
        step = next_step(checked, model=model, digest=digest)
        terminal.note(f"Next: {step}" if len(results) == 1 else f"Next, {checked.label}: {step}")


def print_outcome(path: str, outcome: Outcome) -> None:
    """The report of one artifact: a headline, then one line per check."""
    word, mark = ("OK", "[green]OK[/]")
    if not isinstance(outcome, Verified):
        word, mark = "FAILED", "[red]FAILED[/]"
    label = f"[bold]{terminal.clean(path)}[/]  {mark}  "
    plain = f"{terminal.printable(path)}  {word}  "
    terminal.labelled(label, headline(outcome), plain_label=plain)
    for check in outcome.checks:
        if check.detail != NOT_REACHED:
            _print_check(check)
    if isinstance(outcome, Verified):
        terminal.labelled("  digest         ", outcome.digest)
        for code in outcome.warnings:
            terminal.labelled(
                "  [yellow]warning[/]        ",
                f"{warning_text(code)} ({code})",
                plain_label="  warning        ",
            )


def _print_check(check: Check) -> None:
    """One check, aligned: name, state, what was found."""
    word = {"failed": "FAILED"}.get(check.state, check.state)
    name, room = f"  {check.name:<14} ", " " * max(12 - len(word), 1)
    terminal.labelled(
        name + terminal.MARKS[check.state] + room,
        check.detail.removeprefix("not checked: "),
        plain_label=name + word + room,
    )
