"""Every artifact that the package and some hubs know, as one value with all its facts.

The local store takes no part: the same hubs give the same entries everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

from oscar_zoo.artifact import strict_json
from oscar_zoo.artifact.files import FileDigest, artifact_digest
from oscar_zoo.artifact.manifest import FILE_NAME, Calibration, Manifest, Status, is_payload
from oscar_zoo.artifact.names import ArtifactId
from oscar_zoo.artifact.specs import Score
from oscar_zoo.errors import MalformedFile, NetworkError, NotFoundError
from oscar_zoo.registry.catalog import Catalog
from oscar_zoo.registry.hubs.base import in_parallel
from oscar_zoo.registry.index import Accepted, IndexEntry, Summary
from oscar_zoo.registry.measured import Measured
from oscar_zoo.registry.recipe import ModelRecipe
from oscar_zoo.registry.score_file import in_order, is_of_recipe, joined
from oscar_zoo.registry.view import HubView

Where = Literal["installed", "local", "public", "elsewhere"]


@dataclass(frozen=True)
class Entry:
    """One artifact.

    `summary` has facts of an index where there is no manifest; `scores` begin with what was
    measured; `hubs` are the names of those that have it, in the order in which they were asked;
    `base` is the hub id of the model where no recipe has it. `where` it can be had is what `list`
    finds out."""

    id: ArtifactId
    manifest: Manifest | None = None
    recipe: ModelRecipe | None = None
    summary: Summary = field(default_factory=Summary)
    digest: str | None = None
    status: Status = field(default_factory=Status)
    scores: tuple[Score, ...] = ()
    hubs: tuple[str, ...] = ()
    payload_bytes: int | None = None
    accepted: tuple[Accepted, ...] = ()
    base: str | None = None
    where: Where = "public"

    @property
    def measured(self) -> Measured | None:
        return Measured.best(self.scores, self.summary.measured)

    @property
    def family(self) -> str | None:
        return self.recipe.family if self.recipe else None

    @property
    def model_id(self) -> str | None:
        return self.recipe.hf_id if self.recipe else self.base

    @property
    def calibration(self) -> Calibration | None:
        return self.manifest.fit.calibration if self.manifest else None

    @property
    def claims(self) -> dict[str, Score]:
        """The score of INT2 under the recipe of every task: what was measured before what others
        say. Perplexity and recall of the manifest are among them."""
        found: dict[str, Score] = {}
        made = self.measured.as_scores() if self.measured else ()
        for score in filter(is_of_recipe, in_order((*self.scores, *made))):
            found.setdefault(score.task, score)
        return found

    def score(self, task: str) -> Score | None:
        """The claim for `task`, or for one whose name begins so; `None` where nobody has one."""
        begun = (score for name, score in self.claims.items() if name.casefold().startswith(task))
        return next(begun, None)

    @property
    def gpqa(self) -> Score | None:
        return self.score("gpqa")

    @property
    def perplexity_change(self) -> float | None:
        return self.measured.change_percent if self.measured else None

    @property
    def recall(self) -> float | None:
        """Share of facts beyond the windows that are answered right, 0 to 1."""
        return self.measured.recall if self.measured else None

    @property
    def facts(self) -> dict[str, Any]:
        """The main facts as JSON has them; unknown values are `None`."""
        measured = self.measured
        return {
            "id": str(self.id),
            "family": self.family,
            "method": self.summary.method,
            "format_version": self.summary.format_version,
            "bits_per_element": self.summary.bits_per_element,
            "scores": [score_summary(score) for score in in_order(self.scores)],
            "measured": measured.model_dump(mode="json") if measured else None,
            "bytes": self.payload_bytes,
            "state": self.status.state,
            "digest": self.digest,
        }


def score_summary(score: Score) -> dict[str, Any]:
    """Value, baseline and who says so; a difference is never given without both errors."""
    names = ("task", "metric", "value", "unit", "kv_dtype", "stderr", "reporter")
    return {name: getattr(score, name) for name in names} | {
        "baseline": score.baseline.value if score.baseline else None,
        "recipe_changes": dict(score.recipe_changes),
    }


def collect(
    catalog: Catalog, views: Sequence[HubView], model: str | None = None, *, quick: bool = False
) -> tuple[Entry, ...]:
    """All artifacts of the package and of the hubs, or those of `model`, by id without case. The
    first hub that has an artifact says its facts. With `quick` the indexes of remote hubs have to
    do, and no file is hashed."""
    packaged = catalog.manifests(model)
    found = {one.artifact_id.key: entry_of(one, catalog=catalog) for one in packaged}
    for view in views:
        ids = [
            one
            for one in view.hub.artifacts()
            if model is None or one.model.casefold() == model.casefold()
        ]
        calls = [partial(_offered, catalog, view, artifact, quick=quick) for artifact in ids]
        for artifact, offered in zip(ids, in_parallel(calls) if calls else (), strict=True):
            found[artifact.key] = _joined(found.get(artifact.key), offered)
    return tuple(found[key] for key in sorted(found))


def entry_of(
    manifest: Manifest, scores: Sequence[Score] = (), *, catalog: Catalog | None = None
) -> Entry:
    registry, sizes = manifest.registry, [file.size for file in manifest.files]
    return Entry(
        id=manifest.artifact_id,
        manifest=manifest,
        recipe=(catalog or Catalog.packaged()).recipe(manifest.artifact_id.model),
        summary=Summary.of(manifest),
        digest=manifest.digest,
        status=registry.status if registry else Status(),
        scores=joined(registry.scores if registry else (), scores),
        payload_bytes=None if None in sizes else sum(size or 0 for size in sizes),
        base=manifest.model.id,
    )


def entry_of_index(listed: IndexEntry) -> Entry:
    return Entry(
        id=listed.artifact_id,
        summary=listed.summary or Summary(),
        digest=listed.digest,
        status=listed.status,
        scores=listed.scores,
        payload_bytes=sum(file.size for file in listed.files),
        accepted=listed.accepted,
        base=listed.model,
    )


def _offered(catalog: Catalog, view: HubView, artifact: ArtifactId, *, quick: bool) -> Entry:
    listed = view.index.entry(artifact)
    entry = entry_of_index(listed) if listed else Entry(artifact)
    manifest = None if quick and view.is_remote else _manifest(view, artifact)
    if manifest is not None:
        summary, base = Summary.of(manifest), manifest.model.id
        entry = replace(entry, manifest=manifest, summary=summary, base=base)
    files = (manifest.file_digests if manifest else None) or ()
    if listed is None and (files := files or (() if quick else _listed_files(view, artifact))):
        size = sum(file.size for file in files)
        entry = replace(entry, digest=artifact_digest(files), payload_bytes=size)
    recipe, status = catalog.recipe(artifact.model), view.status(artifact)
    return replace(entry, id=artifact, recipe=recipe, status=status, hubs=(view.hub.name,))


def _manifest(view: HubView, artifact: ArtifactId) -> Manifest | None:
    try:
        data = view.hub.fetch(artifact, FILE_NAME, limit=strict_json.MAX_BYTES)
        manifest = Manifest.from_bytes(data, what=f"{FILE_NAME} of {artifact}")
    except (NotFoundError, MalformedFile, NetworkError):
        return None
    return manifest if manifest.artifact_id == artifact else None


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
    first, second = (known, offered) if known.hubs else (offered, known)
    return replace(
        first,
        id=known.id,
        manifest=first.manifest or second.manifest,
        recipe=known.recipe,
        summary=first.summary if first.summary != Summary() else known.summary,
        digest=first.digest or known.digest,
        scores=joined(first.scores, second.scores),
        hubs=(*known.hubs, *offered.hubs),
        payload_bytes=first.payload_bytes or known.payload_bytes,
        base=first.base or second.base,
    )
