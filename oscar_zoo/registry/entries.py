"""Every artifact that the package and some hubs know: as one value with all its facts, for the
zoo's page and comparisons, and as rows of plain JSON for `list` and `info`.

The local store takes no part in `collect`: the same hubs give the same entries everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from oscar_zoo.artifact import strict_json
from oscar_zoo.artifact.files import FileDigest, artifact_digest, read_file
from oscar_zoo.artifact.manifest import FILE_NAME, Manifest, Status, is_payload
from oscar_zoo.artifact.names import ArtifactId
from oscar_zoo.artifact.specs import Score
from oscar_zoo.errors import MalformedFile, NetworkError, NotFoundError, StorageError
from oscar_zoo.registry.catalog import Catalog
from oscar_zoo.registry.hubs.threads import in_parallel
from oscar_zoo.registry.index import Accepted, IndexEntry, Summary
from oscar_zoo.registry.measured import Measured
from oscar_zoo.registry.recipe import ModelRecipe
from oscar_zoo.registry.score_file import in_order, is_of_recipe, joined
from oscar_zoo.registry.store import Record
from oscar_zoo.registry.view import HubView


@dataclass(frozen=True)
class Entry:
    """One artifact.

    Attributes:
        summary: facts of an index where there is no manifest.
        status: as the hub says, else the package.
        scores: of the hubs and of the package, what was measured first.
        hubs: names of the hubs that have it, in the order in which they were asked.
    """

    id: ArtifactId
    manifest: Manifest | None
    recipe: ModelRecipe | None
    summary: Summary
    digest: str | None
    status: Status
    scores: tuple[Score, ...]
    hubs: tuple[str, ...]
    payload_bytes: int | None
    accepted: tuple[Accepted, ...] = ()

    @property
    def measured(self) -> Measured | None:
        """Perplexity and recall: of its scores, or as measured when it was made."""
        return Measured.best(self.scores, self.summary.measured)

    @property
    def family(self) -> str | None:
        """What people call the kind of model, or `None`."""
        return self.recipe.family if self.recipe else None

    @property
    def model_id(self) -> str | None:
        """Hub id of the base model, or `None`."""
        if self.recipe is not None:
            return self.recipe.hf_id
        return self.manifest.model.id if self.manifest else None

    def score(self, task: str) -> Score | None:
        """The score of INT2 under the recipe in `task`, or in a task whose name begins so: what was
        measured first, then what others say. `None` where nobody reports a value."""
        found = (
            score
            for score in in_order(self.scores)
            if score.task.casefold().startswith(task) and is_of_recipe(score)
        )
        return next(found, None)

    @property
    def gpqa(self) -> Score | None:
        """The score of GPQA."""
        return self.score("gpqa")

    @property
    def perplexity_change(self) -> float | None:
        """Change of perplexity over BF16 in percent."""
        return self.measured.change_percent if self.measured else None

    @property
    def recall(self) -> float | None:
        """Share of facts beyond the windows that are answered right, 0 to 1."""
        return self.measured.recall if self.measured else None


def collect(
    catalog: Catalog, views: Sequence[HubView], model: str | None = None
) -> tuple[Entry, ...]:
    """All artifacts of the package and of the hubs, by id without case.

    The first hub that has an artifact says its facts. An artifact whose manifest cannot be read is
    listed with what is known without it.

    Args:
        views: hubs that answered, in the order in which they were asked.
    """
    packaged = catalog.manifests(model)
    found = {one.artifact_id.key: entry_of(one, catalog=catalog) for one in packaged}
    for view in views:
        ids = [
            one
            for one in view.hub.artifacts()
            if model is None or one.model.casefold() == model.casefold()
        ]
        calls = [partial(_offered, catalog, view, artifact) for artifact in ids]
        for artifact, offered in zip(ids, in_parallel(calls) if calls else (), strict=True):
            found[artifact.key] = _joined(found.get(artifact.key), offered)
    return tuple(found[key] for key in sorted(found))


def entry_of(
    manifest: Manifest, scores: Sequence[Score] = (), *, catalog: Catalog | None = None
) -> Entry:
    """The entry of one manifest, with its own scores and those beside it."""
    registry = manifest.registry
    return Entry(
        id=manifest.artifact_id,
        manifest=manifest,
        recipe=(catalog or Catalog.packaged()).recipe(manifest.artifact_id.model),
        summary=Summary.of(manifest),
        digest=manifest.digest,
        status=registry.status if registry else Status(),
        scores=joined(registry.scores if registry else (), scores),
        hubs=(),
        payload_bytes=_total(file.size for file in manifest.files),
    )


def _manifest(view: HubView, artifact: ArtifactId) -> Manifest | None:
    try:
        data = view.hub.fetch(artifact, FILE_NAME, limit=strict_json.MAX_BYTES)
        manifest = Manifest.from_bytes(data, what=f"{FILE_NAME} of {artifact}")
    except (NotFoundError, MalformedFile, NetworkError):
        return None
    return manifest if manifest.artifact_id == artifact else None


def _offered(catalog: Catalog, view: HubView, artifact: ArtifactId) -> Entry:
    listed: IndexEntry | None = view.index.entry(artifact)
    manifest = _manifest(view, artifact)
    known = listed.file_digests if listed else manifest.file_digests if manifest else None
    known = known or _listed_files(view, artifact)
    summary = listed.summary if listed else None
    return Entry(
        id=artifact,
        manifest=manifest,
        recipe=catalog.recipe(artifact.model),
        summary=Summary.of(manifest) if manifest else summary or Summary(),
        digest=artifact_digest(known) if known else None,
        status=view.status(artifact),
        scores=listed.scores if listed else (),
        hubs=(view.hub.name,),
        payload_bytes=sum(file.size for file in known) if known else None,
        accepted=listed.accepted if listed else (),
    )


def _listed_files(view: HubView, artifact: ArtifactId) -> tuple[FileDigest, ...]:
    """The payload as the hub lists it; empty where it does not tell every sha256."""
    try:
        files = [file for file in view.hub.files(artifact) if is_payload(file.path)]
    except (NotFoundError, MalformedFile, NetworkError):
        return ()
    found = [FileDigest(f.path, f.sha256, f.size) for f in files if f.sha256 is not None]
    return tuple(sorted(found)) if len(found) == len(files) else ()


def _joined(known: Entry | None, offered: Entry) -> Entry:
    """`offered` with what was known before; a hub after the first one adds only its name."""
    if known is None:
        return offered
    hubs = (*known.hubs, *offered.hubs)
    first = known if known.hubs else offered
    return Entry(
        id=known.id,
        manifest=first.manifest or known.manifest or offered.manifest,
        recipe=known.recipe,
        summary=first.summary if first.summary != Summary() else known.summary,
        digest=first.digest or known.digest,
        status=first.status,
        scores=joined(known.scores, offered.scores)
        if known.hubs
        else joined(offered.scores, known.scores),
        hubs=hubs,
        payload_bytes=first.payload_bytes or known.payload_bytes,
        accepted=first.accepted,
    )


def _total(sizes: Iterable[int | None]) -> int | None:
    listed = list(sizes)
    return None if any(size is None for size in listed) else sum(size or 0 for size in listed)


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
    `bytes` is the size of all files."""
    views = tuple(views)
    rows = {
        m.artifact_id.key: _listed(m) | {"status": "public", "hubs": []}
        for m in catalog.manifests()
    }
    for view in views:
        for artifact in view.hub.artifacts():
            row = rows.setdefault(artifact.key, _offered_summary(view, artifact) | {"hubs": []})
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


def _offered_summary(view: HubView, artifact: ArtifactId) -> dict[str, Any]:
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
