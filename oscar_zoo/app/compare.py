"""Put two artifacts side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oscar_zoo.engines.sglang.capacity import caches
from oscar_zoo.engines.sglang.concurrency import Layout
from oscar_zoo.errors import OscarZooError, UsageError
from oscar_zoo.registry.entries import Entry, score_summary
from oscar_zoo.registry.hubs.address import Sources
from oscar_zoo.registry.lookup import known_entries
from oscar_zoo.registry.score_file import in_order
from oscar_zoo.registry.targets import Target, parse
from oscar_zoo.serving.memory import needs_of_manifest, needs_of_recipe

_OWN = ("id", "digest")
"""Facts that differ between any two artifacts."""


@dataclass(frozen=True)
class Comparison:
    """Two artifacts.

    Attributes:
        names: what to call each: its name, or what was asked for where both have one name.
        facts: of each, plain JSON values with the same keys.
        unreachable: what hubs said that did not answer.
    """

    names: tuple[str, str]
    facts: tuple[dict[str, Any], dict[str, Any]]
    unreachable: tuple[OscarZooError, ...]

    @property
    def differences(self) -> tuple[str, ...]:
        """Keys of facts that differ, without those that always do."""
        one, two = self.facts
        return tuple(key for key in one if key not in _OWN and one[key] != two[key])


def compare(
    first: str | Path,
    second: str | Path,
    *,
    hubs: str | Sequence[str] | None = None,
    offline: bool = False,
) -> Comparison:
    """Put two artifacts side by side.

    Args:
        first, second: a name or the folder of an artifact.
        hubs: hubs as people write them; default the configured ones.
        offline: ask no hub over the network.

    Raises:
        NotFoundError: nothing known has this name, or there is no such folder.
        AmbiguousName: a name means several versions.
        UsageError: both are the same artifact.
    """
    targets = [parse(first), parse(second)]
    (one, two), unreachable = known_entries(targets, Sources(hubs, offline=offline))
    if one.id.key == two.id.key and one.digest == two.digest:
        raise UsageError(
            f"{targets[0]} and {targets[1]} are the same artifact, {one.id.reference}.",
            hint=f"others for this model: oscar-zoo list --for {one.id.model}",
        )
    facts = (facts_of(one), facts_of(two))
    return Comparison(_names((one, two), targets), facts, tuple(unreachable))


def _names(entries: tuple[Entry, Entry], targets: Sequence[Target]) -> tuple[str, str]:
    one, two = entries
    if one.id.key == two.id.key:
        return str(targets[0]), str(targets[1])
    return one.id.reference, two.id.reference


def facts_of(entry: Entry) -> dict[str, Any]:
    """Everything that is compared; what is not known is `None`."""
    manifest, measured = entry.manifest, entry.measured
    recipe = manifest.recipe if manifest else None
    used = manifest.fit.calibration if manifest else None
    return {
        "id": str(entry.id),
        "model": entry.model_id,
        "family": entry.family,
        "method": entry.summary.method,
        "format_version": entry.summary.format_version,
        "bits_per_element": entry.summary.bits_per_element,
        "group_size": recipe.group_size if recipe else None,
        "clip_k": recipe.clip.k if recipe else None,
        "clip_v": recipe.clip.v if recipe else None,
        "sink": recipe.windows.sink if recipe else None,
        "recent": recipe.windows.recent if recipe else None,
        "token_bytes": _token_bytes(entry),
        "calibration": used.dataset if used else None,
        "calibration_tokens": (used.tokens_used or used.tokens_requested) if used else None,
        "calibrated_on": list(used.overlaps_with) if used else [],
        "scores": [score_summary(score) for score in in_order(entry.scores)],
        "measured": measured.model_dump(mode="json") if measured else None,
        "bytes": entry.payload_bytes,
        "license": entry.summary.license,
        "state": entry.status.state,
        "accepted": list(entry.accepted),
        "digest": entry.digest,
    }


def _token_bytes(entry: Entry) -> int | None:
    """Bytes of a token in an INT2 cache; `None` where no shapes are known."""
    manifest = entry.manifest
    if entry.recipe is not None:
        needs = needs_of_recipe(entry.recipe)
    elif manifest is not None:
        needs = needs_of_manifest(manifest)
    else:
        return None
    serving = manifest.recipe if manifest else needs.serving
    try:
        *_, int2 = caches(needs.geometry, serving, Layout())
    except ValueError:
        return None
    return int2.token
