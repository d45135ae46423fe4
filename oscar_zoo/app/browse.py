"""Everything that is known about a model, or about one of its artifacts."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from oscar_zoo.app.compute_wish import computing
from oscar_zoo.artifact.manifest import FILE_NAME, SIGNATURE_NAME, Manifest
from oscar_zoo.artifact.names import ArtifactId, Reference
from oscar_zoo.artifact.outcome import Outcome, SignatureReport
from oscar_zoo.artifact.specs import Score
from oscar_zoo.errors import ArtifactNotFound, IntegrityError, OscarZooError
from oscar_zoo.models.config_file import ConfigFile
from oscar_zoo.registry import known_names
from oscar_zoo.registry.architectures import Architecture, architecture
from oscar_zoo.registry.catalog import Catalog
from oscar_zoo.registry.entries import known_scores
from oscar_zoo.registry.hubs.address import Sources
from oscar_zoo.registry.known_names import status_warnings
from oscar_zoo.registry.lookup import look, unknown_name
from oscar_zoo.registry.measured import Measured
from oscar_zoo.registry.recipe import ModelRecipe
from oscar_zoo.registry.signatures import NOT_SIGNED, signature_of
from oscar_zoo.registry.store import Record, Store
from oscar_zoo.registry.targets import ModelChoice, ModelTarget, NameTarget
from oscar_zoo.registry.view import HubView
from oscar_zoo.serving.memory import estimate_memory


@dataclass(frozen=True)
class Copy:
    """A copy in the store, whether hashing it just now gave its digest, and its signature."""

    record: Record
    intact: bool
    signature: SignatureReport

    @classmethod
    def of(cls, record: Record) -> Copy:
        """The copy of `record`, read now."""
        try:
            stored = Store().open(record.digest, record.id)
        except IntegrityError:
            return cls(record, False, NOT_SIGNED)
        return cls(record, True, signature_of(stored))


@dataclass(frozen=True)
class Offer:
    """A version that a hub offers; `state` is `active`, `deprecated` or `yanked`, and `signed` says
    whether there is a signature file, which nobody has read."""

    id: ArtifactId
    hub: str
    digest: str | None
    state: str
    reason: str | None
    signed: bool


@dataclass(frozen=True)
class KnownModel:
    """A model by its hub id or folder, and what `config.json` calls its kind."""

    source: str
    model_type: str

    @classmethod
    def of(cls, choice: ModelChoice | None, recipe: ModelRecipe | None) -> KnownModel | None:
        """From the zoo, or from a `config.json` on this machine; `None` where neither has it."""
        if recipe is not None:
            return cls(choice.source if choice else recipe.hf_id, recipe.model_type)
        config = ConfigFile.kept(choice.source) if choice else None
        kind = getattr(config, "model_type", None)
        return cls(choice.source, kind) if choice and isinstance(kind, str) else None


@dataclass(frozen=True)
class Description:
    """What is known about a model, or about one of its artifacts.

    Attributes:
        name: of the model.
        model: where it is and what kind it is, as far as that is known.
        recipe: what the zoo knows about the model, or `None`.
        manifests: of its artifacts, by id.
        installed: copies in the store.
        offered: what hubs offer, hub by hub.
        unreachable: what hubs said that did not answer.
        warnings: sentences about copies that were yanked or deprecated, or are poor or damaged.
        scores: of each artifact, by id: what was measured first, what upstream says last.
        memory: what fits on GPUs, or `None` where no shapes are known.
        verified: what verifying the folder that was named found; `None` where a name was given.
    """

    name: str
    model: KnownModel | None
    recipe: ModelRecipe | None
    manifests: tuple[Manifest, ...]
    installed: tuple[Copy, ...]
    offered: tuple[Offer, ...]
    unreachable: tuple[OscarZooError, ...]
    warnings: tuple[str, ...]
    scores: Mapping[str, tuple[Score, ...]]
    memory: Mapping[str, Any] | None
    verified: Outcome | None = None

    @property
    def architecture(self) -> Architecture | None:
        """What works for models of this kind, or `None` where the zoo does not know it."""
        return architecture(self.model.model_type) if self.model else None

    @property
    def measured(self) -> dict[str, Measured | None]:
        """Perplexity and recall of each artifact, by id: as `eval` measured them last, or when it
        was made."""
        kept = {str(copy.record.id): copy.record.measured for copy in self.installed}
        return {
            manifest.id: Measured.best(
                self.scores.get(manifest.id, ()),
                Measured.of(manifest) or kept.get(manifest.id),
            )
            for manifest in self.manifests
        }


def describe(
    target: ModelTarget | NameTarget,
    sources: Sources,
    *,
    gpu_memory: int | None = None,
    any_model: bool = False,
) -> Description:
    """The recipe of a model and the manifests of its artifacts, or of the one that is named.

    Args:
        gpu_memory: bytes of one GPU to answer for, instead of the GPUs that are visible.
    """
    catalog = Catalog.packaged()
    views, unreachable = look(sources.hubs)
    reference = known_names.expand(target.reference, views)
    recipe = catalog.recipe(reference.name)
    model = recipe.name if recipe else reference.name.rsplit("/", 1)[-1]
    known = {m.artifact_id.key: m for m in catalog.manifests(model)}
    known |= _manifests(model, views)
    manifests = [known[key] for key in sorted(known)]
    copies, offered = _installed(model), _offered(model, views)
    every = {m.artifact_id.reference for m in manifests}
    every |= {record.id.reference for record in copies} | {row.id.reference for row in offered}
    manifests = [m for m in manifests if _means(reference, m.artifact_id, m.digest)]
    copies = [record for record in copies if _means(reference, record.id, record.digest)]
    offered = [row for row in offered if _means(reference, row.id, row.digest)]
    ids = {str(row.id) for row in offered} | {str(record.id) for record in copies}
    narrowed = reference.tag is not None or reference.digest is not None
    about = KnownModel.of(target.choice if any_model else None, recipe)
    if not manifests and not copies and not offered and (about is None or narrowed):
        raise _unknown(target, recipe, sorted(every), views, unreachable, sources)
    return Description(
        name=model,
        model=about,
        recipe=recipe,
        manifests=tuple(manifests),
        installed=tuple(map(Copy.of, copies)),
        offered=tuple(offered),
        unreachable=tuple(unreachable),
        warnings=tuple(text for record in copies for text in status_warnings(record)),
        scores={
            name: known_scores(ArtifactId.parse(name), views, catalog)
            for name in sorted(ids | {manifest.id for manifest in manifests})
        },
        memory=estimate_memory(recipe, manifests, gpu_memory),
    )


def _unknown(
    target: ModelTarget | NameTarget,
    recipe: ModelRecipe | None,
    known: Sequence[str],
    views: Sequence[HubView],
    unreachable: Sequence[OscarZooError],
    sources: Sources,
) -> OscarZooError:
    if known:
        return ArtifactNotFound.among(target.text, known)
    models = {artifact.model for view in views for artifact in view.hub.artifacts()}
    close = () if recipe else Catalog.packaged().close_matches(target.text, models)
    error = unknown_name(target.text, unreachable, close)
    if recipe is None and target.choice is not None:
        error.next_step = computing(target.choice, sources)
    return error


def _offered(model: str, views: Sequence[HubView]) -> list[Offer]:
    """Where the versions of `model` can be had, as the hubs say now: a row per hub and version."""
    found = []
    for view in views:
        for artifact in view.hub.artifacts():
            if artifact.model.casefold() == model.casefold():
                entry, status = view.index.entry(artifact), view.status(artifact)
                digest = entry.digest if entry else None
                signed = any(file.path == SIGNATURE_NAME for file in view.hub.files(artifact))
                told = (status.state, status.reason)
                found.append(Offer(artifact, view.hub.name, digest, *told, signed))
    return found


def _means(reference: Reference, artifact: ArtifactId, digest: str | None) -> bool:
    """Whether tag and digest of `reference`, where it has them, are those of `artifact`."""
    tagged = reference.tag is None or artifact.tag.casefold() == reference.tag.casefold()
    return tagged and (reference.digest is None or (digest or "").startswith(reference.digest))


def _manifests(model: str, views: Sequence[HubView]) -> dict[str, Manifest]:
    """Manifests of `model` on hubs and in the store, by id key; the packaged `registry` block is
    not repeated."""
    found: dict[str, Manifest] = {}
    store = Store()
    for hub in (view.hub for view in views):
        for artifact in hub.artifacts():
            listed = artifact.model.casefold() == model.casefold() and artifact.key not in found
            if listed and any(file.path == FILE_NAME for file in hub.files(artifact)):
                data = hub.fetch(artifact, FILE_NAME, limit=1 << 20)
                found[artifact.key] = Manifest.from_bytes(data)
    for record in _installed(model):
        with contextlib.suppress(IntegrityError):  # a damaged copy says nothing
            stored = store.open(record.digest, record.id)
            if stored.manifest is not None:
                found[record.id.key] = stored.manifest
    return found


def _installed(model: str) -> list[Record]:
    installed = Store().installed()
    return [record for record in installed if record.id.model.casefold() == model.casefold()]
