"""`oscar-zoo compute`: fit a rotation for a model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from oscar_zoo.cli import build
from oscar_zoo.compute.params import ComputeCommand

if TYPE_CHECKING:
    from oscar_zoo.compute.outcome import ComputeResult
    from oscar_zoo.observer import Observer


def run(params: ComputeCommand, observer: Observer) -> ComputeResult:
    """Compute, and say how to go on after an interrupt."""
    from oscar_zoo.cli.pasting import typed_again
    from oscar_zoo.compute import compute

    try:
        return compute.run(params.given(), observer)
    except (KeyboardInterrupt, SystemExit) as error:
        if hasattr(error, "__notes__"):  # something is kept
            error.add_note(f"to go on from there: {typed_again('--resume')}")
        raise


command = build.command(
    "compute", ComputeCommand, run=f"{__name__}:run", view="oscar_zoo.cli.render.computing:show"
)
