"""Is enough text held out to choose with? This is known before anything runs.

A method and bits are chosen at positions beyond both windows of the cache, so held-out sequences
must be longer than these. An option is advised only after the text was packed with it and was
enough.
"""

from __future__ import annotations

from collections.abc import Callable

from oscar_zoo.artifact.manifest import ModelBlock
from oscar_zoo.compute.data import CalibrationData
from oscar_zoo.compute.data.packing import HELDOUT_SEQUENCES
from oscar_zoo.compute.options import AUTO, ComputeOptions, sequence_length
from oscar_zoo.compute.select.choose import shortest_measured
from oscar_zoo.errors import UsageError
from oscar_zoo.next_step import AddOption, DropOption, NextStep

Pack = Callable[[int, int], CalibrationData]
"""(tokens to calibrate on, tokens of a sequence) -> the same text, packed so."""
_ROUND = 100
"""Numbers of tokens that are advised are multiples of it."""


def check_heldout(
    data: CalibrationData, options: ComputeOptions, block: ModelBlock, pack: Pack
) -> None:
    """Refuse text of which too little is held out to choose a method or bits with.

    Args:
        options: of the computation; all is well where they leave nothing to choose.
    """
    shortest = shortest_measured(options.recipe.windows)
    if not (options.method == AUTO or options.widths) or _longest(data) >= shortest:
        return
    length = sequence_length(options, block)
    most = block.rope.max_position if block.rope else None
    if most is not None and most < shortest:
        raise UsageError(
            f"{_reason(options, shortest)}, and {block.id} takes {most:,} tokens at most.",
            hint="name a method, without bits to choose",
            next_step=_without_choice(options),
        )
    if length < shortest:
        power = 1 << shortest.bit_length()
        longer = power if most is None else min(power, most)
        if _longest(pack(options.calib_tokens, longer)) >= shortest:
            raise UsageError(
                f"{_reason(options, shortest)}, and yours have {length:,}.",
                next_step=AddOption("--seq-len", str(longer)),
            )
    raise _too_short(data, options, shortest, max(length, shortest), block.head_dim, pack)


def _too_short(
    data: CalibrationData,
    options: ComputeOptions,
    shortest: int,
    length: int,
    fewest: int,
    pack: Pack,
) -> UsageError:
    """The error for a text with too few tokens for held-out sequences of `shortest` tokens.

    Args:
        length: tokens of a sequence, enough for that.
        fewest: tokens that a fit needs.
    """
    total = data.tokens_used + (data.heldout.tokens if data.heldout else 0)
    held_out = HELDOUT_SEQUENCES * shortest
    needed = -(-min(4 * held_out, options.calib_tokens + held_out) // _ROUND) * _ROUND
    step = _without_choice(options)
    fewer = (total - held_out) // _ROUND * _ROUND
    if fewer >= fewest and _longest(pack(fewer, length)) >= shortest:
        step = AddOption("--calib-tokens", str(fewer))
    return UsageError(
        f"{_reason(options, shortest)}, and {data.source} is too short for that: it has"
        f" {total:,} tokens.",
        hint=f"give a text of {needed:,} tokens or more",
        next_step=step,
    )


def _reason(options: ComputeOptions, shortest: int) -> str:
    chosen = "the method is" if options.method == AUTO else "bits are"
    return f"{chosen} chosen with held-out sequences of {shortest:,} tokens or more"


def _without_choice(options: ComputeOptions) -> NextStep | None:
    """The one option that leaves nothing to choose; `None` where method and bits are chosen."""
    if options.widths is None:
        return AddOption("--method", "wush")
    return None if options.method == AUTO else DropOption(options.widths.option.split()[0])


def _longest(data: CalibrationData) -> int:
    """Tokens of the longest held-out sequence; 0 where none is held out."""
    return max(map(len, data.heldout.sequences), default=0) if data.heldout else 0
