"""Every artifact that the package and some hubs know, each as one value with all its facts.

`list` shows rows of plain JSON; the zoo's page and what compares artifacts need the manifest and
the whole scores too. The local store takes no part: the same hubs give the same entries everywhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from oscar_zoo.artifact import strict_json
from oscar_zoo.artifact.files import FileDigest, artifact_digest
from oscar_zoo.artifact.manifest import FILE_NAME, Manifest, Status, is_payload
from oscar_zoo.artifact.names import ArtifactId
from oscar_zoo.artifact.specs import Score
from oscar_zoo.errors import MalformedFile, NetworkError, NotFoundError
from oscar_zoo.hubs.deadline import in_parallel
from oscar_zoo.registry.catalog import Catalog
from oscar_zoo.registry.index import Accepted, IndexEntry, Summary
from oscar_zoo.registry.measured import Measured
from oscar_zoo.registry.recipe import ModelRecipe
from oscar_zoo.registry.score_history import in_order, joined
from oscar_zoo.registry.score_rules import is_of_recipe
from oscar_zoo.registry.view import HubView


@dataclass(frozen=True)
class Entry:
    """One artifact.

    Attributes:
        id: as the first source spells it.
        manifest: of the package or of a hub, or `None` where nobody has one.
        recipe: of its model, or `None` where the zoo does not know the model.
        summary: facts of an index where there is no manifest.
        digest: of the payload, or `None` where nobody has seen it.
        status: as the hub says, else the package.
        scores: of the hubs and of the package, what was measured first.
        hubs: names of the hubs that have it, in the order in which they were asked.
        payload_bytes: size of all files, or `None` where nobody knows.
        accepted: what it was published in spite of; see `quality_gate`.
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
        model: only artifacts whose folder has this name, in any case.
    """
    packaged = catalog.manifests(model)
    found = {one.artifact_id.key: entry_of(one, catalog=catalog) for one in packaged}
    for view in views:
        ids = [one for one in view.hub.artifacts() if _is_of(one, model)]
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


def _is_of(artifact: ArtifactId, model: str | None) -> bool:
    return model is None or artifact.model.casefold() == model.casefold()


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
