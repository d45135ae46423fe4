"""Put two artifacts side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Annotated, Any, Literal

from pydantic import Field, InstanceOf
from typing_extensions import TypedDict

from oscar_zoo.artifact.outcome import HIDDEN, Digest, says
from oscar_zoo.engines.sglang.capacity import caches
from oscar_zoo.engines.sglang.sizing import Layout
from oscar_zoo.errors import UsageError
from oscar_zoo.observer import SILENT, Observer
from oscar_zoo.registry.entries import Entry
from oscar_zoo.registry.hubs.address import Sources
from oscar_zoo.registry.lookup import known_entries
from oscar_zoo.registry.targets import parse
from oscar_zoo.site.facts import MeasuredFacts, ScoreSummary, State, Unreachable, needs_of_entry
from oscar_zoo.site.params import CompareParams
from oscar_zoo.verb import python_call

_OWN = ("id", "digest")
"""Facts that differ between any two artifacts."""


class ArtifactFacts(TypedDict):
    """Everything that is compared; what is not known is null."""

    id: Annotated[str, says("MODEL/TAG.")]
    model: Annotated[str | None, says("Hub id of the base model.")]
    family: Annotated[str | None, says("What people call the kind of model.")]
    method: Annotated[str | None, says("How the rotation was made.")]
    format_version: Annotated[int | None, says("Format of the rotation files.")]
    bits_per_element: Annotated[float | None, says("Stored bits per cached element.")]
    group_size: Annotated[int | None, says("Numbers that share a scale.")]
    clip_k: Annotated[float | None, says("Clip ratio of keys.")]
    clip_v: Annotated[float | None, says("Clip ratio of values.")]
    sink: Annotated[int | None, says("First tokens that stay in BF16.")]
    recent: Annotated[int | None, says("Last tokens that stay in BF16.")]
    token_bytes: Annotated[int | None, says("Bytes of a token in an INT2 cache, over all layers.")]
    calibration: Annotated[str | None, says("Text that the fit saw.")]
    calibration_tokens: Annotated[int | None, says("Its length.")]
    calibrated_on: Annotated[Sequence[str], says("Evaluation sets whose questions it has.")]
    scores: Annotated[Sequence[ScoreSummary], says("What was measured comes first.")]
    measured: Annotated[MeasuredFacts | None, says("Perplexity and recall beside BF16.")]
    bytes: Annotated[int | None, says("Of all files.")]
    license: Annotated[str | None, says("SPDX identifier of the rotations.")]
    state: State
    accepted: Annotated[
        Sequence[Literal["poor", "unmeasured"]], says("What it was published in spite of.")
    ]
    digest: Digest | None


@dataclass(frozen=True)
class Comparison:
    """What oscar-zoo compare prints: the same facts of two artifacts; null is not reported."""

    names: Annotated[tuple[str, str], *HIDDEN]
    """What to call each: its name, or what was asked for where both have one name."""
    entries: Annotated[tuple[InstanceOf[Entry], InstanceOf[Entry]], *HIDDEN]
    facts: Annotated[tuple[ArtifactFacts, ArtifactFacts], Field(serialization_alias="artifacts")]
    unreachable: Unreachable
    differences: Annotated[tuple[str, ...], says("Keys that differ, without those that always do.")]
    schema: Literal["oscar-zoo.compare/1"] = "oscar-zoo.compare/1"


def run(params: CompareParams, observer: Observer = SILENT) -> Comparison:
    """Put two artifacts side by side."""
    targets = [parse(params.first), parse(params.second)]
    sources = Sources(params.hubs, offline=params.offline)
    (first, second), unreachable = known_entries(targets, sources)
    if first.id.key == second.id.key and first.digest == second.digest:
        raise UsageError(
            f"{targets[0]} and {targets[1]} are the same artifact, {first.id.reference}.",
            hint=f"others for this model: oscar-zoo list --for {first.id.model}",
        )
    facts: Any = (_facts_of(first), _facts_of(second))
    keys = [key for key in ArtifactFacts.__annotations__ if key not in _OWN]
    differences = tuple(key for key in keys if facts[0][key] != facts[1][key])
    names = (first.id.reference, second.id.reference)
    if first.id.key == second.id.key:
        names = (str(targets[0]), str(targets[1]))
    return Comparison(names, (first, second), facts, tuple(unreachable), differences)


compare = python_call(CompareParams, run)


def _facts_of(entry: Entry) -> dict[str, Any]:
    recipe, used = entry.manifest.recipe if entry.manifest else None, entry.calibration
    settings = ("group_size", "clip.k", "clip.v", "windows.sink", "windows.recent")
    names = ("group_size", "clip_k", "clip_v", "sink", "recent")
    values = attrgetter(*settings)(recipe) if recipe else (None,) * len(names)
    return (
        entry.facts
        | dict(zip(names, values, strict=True))
        | {
            "model": entry.model_id,
            "token_bytes": _token_bytes(entry),
            "calibration": used.dataset if used else None,
            "calibration_tokens": (used.tokens_used or used.tokens_requested) if used else None,
            "calibrated_on": list(used.overlaps_with) if used else [],
            "license": entry.summary.license,
            "accepted": list(entry.accepted),
        }
    )


def _token_bytes(entry: Entry) -> int | None:
    """Bytes of a token in an INT2 cache; `None` where no shapes are known."""
    needs = needs_of_entry(entry)
    if needs is None:
        return None
    serving = entry.manifest.recipe if entry.manifest else needs.serving
    try:
        *_, int2 = caches(needs.geometry, serving, Layout())
    except ValueError:
        return None
    return int2.token
