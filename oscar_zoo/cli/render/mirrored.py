"""What `mirror` shows."""

from __future__ import annotations

from typing import Any

from oscar_zoo.artifact.outcome import warning_text
from oscar_zoo.cli.render import terminal
from oscar_zoo.registry.mirror import MirrorResult

_VERBS = {
    "copied": "Copied",
    "already there": "Already there",
    "would be copied": "Would copy",
    "proposed": "Proposed",
}


def mirror_row(result: MirrorResult) -> dict[str, Any]:
    """The facts of one artifact."""
    return {
        "id": str(result.id),
        "digest": result.digest,
        "outcome": result.outcome.replace(" ", "_"),
        "bytes": result.size,
        "proposal": result.proposal,
        "warnings": list(result.warnings),
    }


def print_mirrored(result: MirrorResult) -> None:
    """One artifact for people."""
    reference, size = terminal.clean(result.id.reference), terminal.megabytes(result.size)
    terminal.out().print(f"{_VERBS[result.outcome]}: {reference}  {size}  {result.digest}")
    for warning in result.warnings:
        terminal.note(f"warning: {warning_text(warning)}")
    if result.proposal is not None:
        terminal.note(f"Next: ask its owner to merge {result.proposal}")
