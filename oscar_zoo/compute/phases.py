"""The phases of a computation, in order, with their units and the options that ask for them."""

from __future__ import annotations

from collections.abc import Mapping

from oscar_zoo.compute.methods.table import TABLE
from oscar_zoo.compute.options import AUTO, ComputeOptions
from oscar_zoo.evaluate.shared import Phase

LOAD, CAPTURE, FIT, ROWS, TUNE, WRITE = "load", "capture", "fit", "rows", "tune", "write"
HELD_OUT, ERRORS, PERPLEXITY = "held-out rows", "errors", "perplexity"
RECALL, MORE_RECALL = "recall", "more recall"
GAINS, VERIFY = "bits by layer", "bits verified"
"""Names of phases."""
MEASURED_PASSES: Mapping[str, int] = {
    HELD_OUT: 1,
    ERRORS: 4,
    PERPLEXITY: 10,
    RECALL: 5,
    MORE_RECALL: 1,
}
"""How often `auto` reads as many tokens as are held out, in each of its phases."""
FAST_PASSES: Mapping[str, int] = {HELD_OUT: 1, ERRORS: 9}
"""As `MEASURED_PASSES`, with `fast`."""


USUAL_LAYERS = 36
"""Full-attention layers, where only shares of a usual computation are wanted."""
VERIFY_PASSES = 5
"""Reads of as many tokens as are held out, to verify bits once."""


def expected_phases(options: ComputeOptions) -> tuple[Phase, ...]:
    """The phases of `compute_artifact(options)`, in order.

    Their `seconds` are only the shares of a usual computation.
    """
    auto = options.method == AUTO
    phases = [Phase(LOAD, "", 5), Phase(CAPTURE, "tokens", 20), Phase(FIT, "", 5)]
    phases += [Phase(ROWS, "sequences", 10), Phase(TUNE, "steps", 20)] if tunes(options) else []
    if auto:
        passes = FAST_PASSES if options.fast else MEASURED_PASSES
        phases += [
            Phase(name, "layers" if name == ERRORS else "sequences", times)
            for name, times in passes.items()
        ]
    return (*phases, *_of_bits(options), Phase(WRITE, "", 2))


def refit_phases(options: ComputeOptions | None) -> tuple[Phase, ...]:
    """The phases of `refit.refit`, which has `options` where bits are chosen with the model."""
    load = () if options is None else (Phase(LOAD, "", 5),)
    bits = () if options is None else _of_bits(options)
    return (*load, Phase(FIT, "", 6), *bits, Phase(WRITE, "", 2))


def _of_bits(options: ComputeOptions) -> tuple[Phase, ...]:
    if options.widths is None and not may_raise(options):
        return ()
    gains = 3 if options.widths is not None and not options.widths.measures else 2 * USUAL_LAYERS
    return Phase(GAINS, "sequences", gains), Phase(VERIFY, "sequences", VERIFY_PASSES)


def may_raise(options: ComputeOptions) -> bool:
    """Whether 4 bits are measured where 2 fail their gates: layers get them, or the error names the
    budget that passes. It measures as much as if that had been asked for."""
    return options.method == AUTO and not (options.fast or options.allow_poor)


def tunes(options: ComputeOptions) -> bool:
    """Whether the options ask for a method that is tuned."""
    if options.method == AUTO:
        return options.tune and not options.fast
    return TABLE[options.method].tuned
