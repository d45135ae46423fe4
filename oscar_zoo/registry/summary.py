"""What `list` and `info` know about artifacts, as plain JSON values: one shape for people and
programs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from oscar_zoo.artifact import strict_json
from oscar_zoo.artifact.files import read_file
from oscar_zoo.artifact.manifest import FILE_NAME, Manifest
from oscar_zoo.artifact.names import ArtifactId
from oscar_zoo.artifact.specs import Score
from oscar_zoo.errors import MalformedFile, NotFoundError, StorageError
from oscar_zoo.registry.catalog import Catalog
from oscar_zoo.registry.measured import Measured
from oscar_zoo.registry.record import Record
from oscar_zoo.registry.score_history import in_order, joined
from oscar_zoo.registry.view import HubView


def artifact_summary(manifest: Manifest) -> dict[str, Any]:
    """The main facts of one manifest; unknown values are `None`."""
    name = manifest.artifact_id
    registry = manifest.registry
    scores = in_order(registry.scores) if registry else ()
    measured = Measured.best(scores, Measured.of(manifest))
    return {
        "id": str(name),
        "model": name.model,
        "tag": name.tag,
        "format_version": manifest.format_version,
        "method": manifest.fit.method,
        "bits_per_element": manifest.recipe.bits_per_element,
        "digest": manifest.digest,
        "state": registry.status.state if registry else "active",
        "scores": [score_summary(score) for score in scores],
        "measured": measured.model_dump(mode="json") if measured else None,
    }


def score_summary(score: Score) -> dict[str, Any]:
    """Value, baseline and who says so; a difference is never given without both errors."""
    return {
        "task": score.task,
        "metric": score.metric,
        "value": score.value,
        "unit": score.unit,
        "kv_dtype": score.kv_dtype,
        "stderr": score.stderr,
        "baseline": score.baseline.value if score.baseline else None,
        "reporter": score.reporter,
        "recipe_changes": dict(score.recipe_changes),
    }


def known_scores(
    artifact: ArtifactId, views: Iterable[HubView], catalog: Catalog
) -> tuple[Score, ...]:
    """What the indexes of hubs say about `artifact`, the first hub first, and what the packaged
    manifest says beside it."""
    found: tuple[Score, ...] = ()
    for view in views:
        entry = view.index.entry(artifact)
        found = joined(found, entry.scores if entry else ())
    packaged = catalog.manifest(artifact)
    return joined(found, packaged.registry.scores if packaged and packaged.registry else ())


def summaries(
    catalog: Catalog,
    installed: Iterable[Record],
    views: Iterable[HubView],
    *,
    only_hubs: bool = False,
) -> list[dict[str, Any]]:
    """One row per known artifact: packaged manifests, what hubs have, what the store holds; by id.

    With `only_hubs` just what the hubs in `views` have; a stored copy of other bytes does not count
    as installed then.

    `status` is `installed` (in the store), `local` (on a hub in a folder), `public` (on a remote
    hub, or known from the packaged manifests and not asked for) or `elsewhere` (known, and on none
    of the remote hubs in `views`); `hubs` names the hubs in `views` that have it, in order.
    `bytes` is the size of all files.
    """
    views = tuple(views)
    rows = {
        m.artifact_id.key: _listed(m) | {"status": "public", "hubs": []}
        for m in catalog.manifests()
    }
    for view in views:
        for artifact in view.hub.artifacts():
            row = rows.setdefault(artifact.key, _offered(view, artifact) | {"hubs": []})
            row["hubs"].append(view.hub.name)
            row.setdefault("status", "public" if view.is_remote else "local")
            entry = view.index.entry(artifact)
            if entry is not None:
                row |= {"state": entry.status.state, "digest": entry.digest}
                row["bytes"] = sum(file.size for file in entry.files)
            elif not view.is_remote:
                row["status"] = "local"
    for scored in {e.artifact_id for view in views for e in view.index.artifacts if e.scores}:
        if scored.key in rows:
            _score(rows[scored.key], scored, views, catalog)
    if any(view.is_remote for view in views):
        for row in rows.values():
            row["status"] = row["status"] if row["hubs"] else "elsewhere"
    if only_hubs:
        rows = {key: row for key, row in rows.items() if row["hubs"]}
    for record in installed:
        if only_hubs and not _is_offered(record, rows.get(record.id.key), views):
            continue
        if record.id.key not in rows:
            rows[record.id.key] = _row(record.id, partial(read_file, record.path / FILE_NAME)) | {
                "hubs": []
            }
        row = rows[record.id.key]
        row |= {"status": "installed", "digest": record.digest}
        if row["measured"] is None and record.measured is not None:
            row["measured"] = record.measured.model_dump(mode="json")
        rows[record.id.key]["bytes"] = sum(file.size for file in record.files)
    return [rows[key] | {"family": _family(catalog, rows[key])} for key in sorted(rows)]


def _family(catalog: Catalog, row: dict[str, Any]) -> str | None:
    """What people call the kind of model, where the zoo knows it."""
    recipe = catalog.recipe(row["model"])
    return recipe.family if recipe else None


def _score(
    row: dict[str, Any], artifact: ArtifactId, views: Iterable[HubView], catalog: Catalog
) -> None:
    """Put the scores of hubs into a row that the manifest made."""
    scores = known_scores(artifact, views, catalog)
    made = Measured.model_validate(row["measured"]) if row["measured"] else None
    measured = Measured.best(scores, made)
    row["scores"] = [score_summary(score) for score in scores]
    row["measured"] = measured.model_dump(mode="json") if measured else None


def _is_offered(record: Record, row: dict[str, Any] | None, views: Iterable[HubView]) -> bool:
    """Whether one of the hubs of `row` has the bytes of `record`, as far as is known without
    fetching them."""
    if row is None:
        return False
    return row["digest"] == record.digest or record.source in {view.hub.name for view in views}


def _offered(view: HubView, artifact: ArtifactId) -> dict[str, Any]:
    """What the hub's manifest says; a remote hub is not asked for one manifest after the other, its
    index has to do."""
    if view.is_remote:
        entry = view.index.entry(artifact)
        known = entry.summary if entry is not None else None
        if known is None:
            return _bare(artifact)
        facts = ("method", "format_version", "bits_per_element")
        measured = known.measured.model_dump(mode="json") if known.measured else None
        return (
            _bare(artifact)
            | {name: getattr(known, name) for name in facts}
            | {"measured": measured}
        )
    return _row(artifact, partial(view.hub.fetch, artifact, FILE_NAME, limit=strict_json.MAX_BYTES))


def _row(artifact: ArtifactId, read: Callable[[], bytes]) -> dict[str, Any]:
    """What the manifest that `read` returns says; the name alone when there is none, or none of
    this artifact."""
    try:
        manifest = Manifest.from_bytes(read())
    except (NotFoundError, MalformedFile, StorageError):
        return _bare(artifact)
    return _listed(manifest) if manifest.artifact_id == artifact else _bare(artifact)


def _listed(manifest: Manifest) -> dict[str, Any]:
    """`artifact_summary` with the size of all files, where somebody has seen them."""
    sizes = [file.size for file in manifest.files]
    known = None if None in sizes else sum(size or 0 for size in sizes)
    return artifact_summary(manifest) | {"bytes": known}


def _bare(artifact: ArtifactId) -> dict[str, Any]:
    """A row for an artifact of which only the name is known."""
    facts = ("format_version", "method", "bits_per_element", "digest", "bytes", "measured")
    unknown = dict.fromkeys(facts)
    return {
        "id": str(artifact),
        "model": artifact.model,
        "tag": artifact.tag,
        "state": "active",
        "scores": [],
    } | unknown
