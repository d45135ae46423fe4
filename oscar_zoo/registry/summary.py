"""What `list` and `info` know about artifacts, as plain JSON values: one shape for people and programs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from oscar_zoo.artifact.manifest import Manifest
from oscar_zoo.artifact.names import ArtifactId
from oscar_zoo.artifact.specs import Score
from oscar_zoo.hubs.base import Hub
from oscar_zoo.registry.catalog import Catalog
from oscar_zoo.registry.record import Record


def artifact_summary(manifest: Manifest) -> dict[str, Any]:
    """The main facts of one manifest; unknown values are `None`."""
    name = manifest.artifact_id
    registry = manifest.registry
    return {
        "id": str(name),
        "model": name.model,
        "tag": name.tag,
        "format_version": manifest.format_version,
        "method": manifest.fit.method,
        "bits_per_element": manifest.recipe.bits_per_element,
        "digest": manifest.digest,
        "state": registry.status.state if registry else "active",
        "scores": [score_summary(score) for score in registry.scores] if registry else [],
    }


def score_summary(score: Score) -> dict[str, Any]:
    """Value, baseline and who says so; a difference is never given without both errors."""
    return {
        "task": score.task,
        "value": score.value,
        "unit": score.unit,
        "kv_dtype": score.kv_dtype,
        "stderr": score.stderr,
        "baseline": score.baseline.value if score.baseline else None,
        "reporter": score.reporter,
    }


def list_artifacts(catalog: Catalog, installed: Iterable[Record], hub: Hub) -> list[dict[str, Any]]:
    """One row per known artifact: packaged manifests, what `hub` has, what the store holds; by id.

    `status` is `installed` (in the store), `local` (on `hub`) or `public` (known from the packaged manifests).
    """
    rows = {m.artifact_id.key: artifact_summary(m) | {"status": "public"} for m in catalog.manifests()}
    for artifact in hub.artifacts():
        rows.setdefault(artifact.key, _bare(artifact))["status"] = "local"
    for record in installed:
        row = rows.setdefault(record.id.key, _bare(record.id))
        row["status"], row["digest"] = "installed", record.digest
    return [rows[key] for key in sorted(rows)]


def _bare(artifact: ArtifactId) -> dict[str, Any]:
    """A row for an artifact of which only the name is known without opening it."""
    unknown = dict.fromkeys(("format_version", "method", "bits_per_element", "digest"))
    return {
        "id": str(artifact),
        "model": artifact.model,
        "tag": artifact.tag,
        "state": "active",
        "scores": [],
    } | unknown
