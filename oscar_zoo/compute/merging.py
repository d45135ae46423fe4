"""Several moments files become one: the sums of their tokens add.

The parts must have no sequence in common, or tokens would count twice. Weighted sums (`sst`) know
only the queries of their own sequences, so a sum loses them; every other method can still be fitted
from the result.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from oscar_zoo.artifact.manifest import Calibration, LengthStats, ModelBlock, MomentsFile, Numerics
from oscar_zoo.compute import coverage
from oscar_zoo.compute.coverage import needs_met, observed
from oscar_zoo.compute.layer_moments import WEIGHTED_SUMS
from oscar_zoo.compute.methods.table import METHODS
from oscar_zoo.compute.moments import Moments
from oscar_zoo.compute.moments_file import MomentsInfo, load_moments, save_moments
from oscar_zoo.errors import ComputeFailed, UsageError

LOST_WEIGHTS = (
    "the weighted value sums were left out: "
    f"{' and '.join(name for name, method in METHODS.items() if 'weighted' in method.needs)}"
    " need one capture of all sequences."
)


@dataclass(frozen=True)
class Part:
    """A moments file and its name for messages."""

    name: str
    moments: Moments
    info: MomentsInfo


@dataclass(frozen=True)
class MergeResult:
    """The result of a merge.

    Attributes:
        file: digest and size.
        info: of the merged moments.
        notes: remarks for the user, in sentences.
    """

    file: MomentsFile
    info: MomentsInfo
    notes: tuple[str, ...]


def merge_files(paths: Sequence[Path], out: Path) -> MergeResult:
    """Merge moments files, two or more, into the file `out`, which is replaced."""
    if len(paths) < 2:
        raise UsageError("there is nothing to merge.", hint="name two moments files or more")
    merged, notes = merge_parts([Part(str(path), *load_moments(path)) for path in paths])
    return MergeResult(save_moments(out, merged.moments, merged.info), merged.info, notes)


def merge_parts(parts: Sequence[Part]) -> tuple[Part, tuple[str, ...]]:
    """One part made of all, and remarks for the user; see `merge_files`.

    The moments of `parts` are used up: their memory is reused.
    """
    for part in parts[1:]:
        _check_same_source(parts[0], part)
    captures = sorted(parts, key=lambda part: sorted(_hashes(part)))
    whole, notes = _add(captures)
    first = parts[0].info
    tp, pp, dp = (
        max(getattr(p.info.coverage, axis, 1) for p in parts) for axis in ("tp", "pp", "dp")
    )
    partial, missing = _missing(whole)
    info = MomentsInfo(
        model=first.model,
        calibration=_calibration(captures),
        coverage=observed(
            whole,
            tp=tp,
            pp=pp,
            dp=max(dp, len(captures)),
        ),
        numerics=_numerics([part.info.numerics for part in parts]),
        sequences=tuple(sequence for capture in captures for sequence in capture.info.sequences),
        partial=partial,
    )
    return Part("the result", whole, info), (*notes, *missing)


def _check_same_source(one: Part, other: Part) -> None:
    """Refuse to mix models or numerics."""
    if one.info.model != other.info.model:
        what = one.info.model.geometry.difference(other.info.model.geometry) or _field(
            one.info.model, other.info.model
        )
        raise UsageError(
            f"{one.name} and {other.name} are of different models: {what}.",
            hint="merge parts of one",
        )
    mine, theirs = one.info.numerics, other.info.numerics
    for name in ("forward_dtype", "accumulate", "engine"):
        if getattr(mine, name) != getattr(theirs, name):
            raise UsageError(
                f"{one.name} and {other.name} were computed differently: {name} is "
                f"{_word(getattr(mine, name))} here and {_word(getattr(theirs, name))} there.",
                hint="capture both with one engine, version and dtype",
            )


def _field(one: ModelBlock, other: ModelBlock) -> str:
    name = next(
        name for name in ModelBlock.model_fields if getattr(one, name) != getattr(other, name)
    )
    return f"{name} is {_word(getattr(one, name))} here and {_word(getattr(other, name))} there"


def _word(value: object) -> str:
    name, version = getattr(value, "name", None), getattr(value, "version", None)
    return f"{name} {version}" if name else str(value)[:100]


def _hashes(part: Part) -> list[str]:
    if not part.info.sequences:
        raise UsageError(
            f"{part.name} does not say which sequences it holds.", hint="capture again"
        )
    return [sequence.sha256 for sequence in part.info.sequences]


def _add(captures: Sequence[Part]) -> tuple[Moments, tuple[str, ...]]:
    """The sum over captures of disjoint sequences, without weighted sums."""
    whole = captures[0].moments
    seen: dict[str, str] = {}
    for capture in captures:
        for sha256 in dict.fromkeys(_hashes(capture)):
            if sha256 in seen:
                raise UsageError(
                    f"{seen[sha256]} and {capture.name} have sequences in common, which would count"
                    " twice.",
                    hint="capture parts of the data that do not overlap",
                )
            seen[sha256] = capture.name
    weighted = any("weighted" in needs_met(capture.moments) for capture in captures)
    for capture in captures:
        for layer in capture.moments.layers.values():
            for name in WEIGHTED_SUMS:
                setattr(layer, name, torch.zeros_like(getattr(layer, name)))
            layer.weighted_tokens = 0
    for capture in captures[1:]:
        whole.merge(capture.moments)
    return whole, (LOST_WEIGHTS,) if weighted else ()


def _missing(whole: Moments) -> tuple[bool, tuple[str, ...]]:
    try:
        coverage.check(whole, needs_met(whole) | {"rows"})
    except ComputeFailed as error:
        return True, (f"parts are missing: {error.message.partition(': ')[2] or error.message}",)
    return False, ()


def _numerics(blocks: Sequence[Numerics]) -> Numerics:
    devices = " + ".join(dict.fromkeys(block.device for block in blocks))
    return blocks[0].model_copy(update={"device": devices})


def _calibration(captures: Sequence[Part]) -> Calibration | None:
    """One calibration block for all captures.

    A value that they do not share becomes null, and no hash is invented.
    """
    blocks = [
        capture.info.calibration for capture in captures if capture.info.calibration is not None
    ]
    if len(blocks) != len(captures):
        return None
    if len(blocks) == 1:
        return blocks[0]
    first = blocks[0]
    common = {
        name: getattr(first, name)
        for name in Calibration.model_fields
        if all(getattr(block, name) == getattr(first, name) for block in blocks)
    }
    lengths = [sequence.tokens for capture in captures for sequence in capture.info.sequences]
    requested = [block.tokens_requested for block in blocks]
    proven = [{*(block.disjoint_from or ())} for block in blocks]
    return Calibration(
        dataset=" + ".join(dict.fromkeys(block.dataset or "?" for block in blocks)),
        revision=common.get("revision"),
        split=common.get("split"),
        license=common.get("license"),
        prompts_sha256=None,
        sequences=len(lengths),
        tokens_requested=sum(n for n in requested if n) if all(requested) else None,
        tokens_used=sum(lengths),
        length=LengthStats(
            min=min(lengths), median=statistics.median_low(lengths), max=max(lengths)
        ),
        content=common.get("content", "mixed"),
        chat_template=common.get("chat_template"),
        seed=common.get("seed"),
        disjoint_from=(
            tuple(d for d in first.disjoint_from or () if all(d in sets for sets in proven))
            if all(block.disjoint_from is not None for block in blocks)
            else None
        ),
        overlaps_with=tuple(
            dict.fromkeys(name for block in blocks for name in block.overlaps_with)
        ),
    )
