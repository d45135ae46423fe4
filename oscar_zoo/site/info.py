"""Everything that is known about a model, or about one of its artifacts."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, cast

from pydantic import Field
from typing_extensions import TypedDict

from oscar_zoo.artifact import manifest, outcome
from oscar_zoo.artifact.manifest import FILE_NAME, SIGNATURE_NAME
from oscar_zoo.artifact.names import ArtifactId, Reference
from oscar_zoo.artifact.outcome import HIDDEN, Digest, SignatureReport, Verified, says
from oscar_zoo.errors import ArtifactNotFound, IntegrityError, OscarZooError
from oscar_zoo.models.config_file import ConfigFile
from oscar_zoo.observer import SILENT, Observer
from oscar_zoo.registry import known_names, measured
from oscar_zoo.registry.architectures import Answer, architecture
from oscar_zoo.registry.catalog import Catalog
from oscar_zoo.registry.entries import known_scores
from oscar_zoo.registry.hubs.address import Sources
from oscar_zoo.registry.known_names import status_warnings
from oscar_zoo.registry.lookup import known_entries, look, unknown_name
from oscar_zoo.registry.recipe import ModelRecipe
from oscar_zoo.registry.signatures import NOT_SIGNED, signature_of
from oscar_zoo.registry.store import Record, Store
from oscar_zoo.registry.targets import (
    ModelChoice,
    ModelTarget,
    NameTarget,
    PathTarget,
    computing,
    looking_up,
    parse,
)
from oscar_zoo.registry.verify import check_one, existing_path
from oscar_zoo.registry.view import HubView
from oscar_zoo.serving.memory import estimate_memory
from oscar_zoo.serving.prepared import check_served
from oscar_zoo.site.facts import Manifest, Measured, Name, Score, Size, State, Unreachable
from oscar_zoo.site.params import InfoParams


@dataclass(frozen=True)
class KnownModel:
    """A model and its kind."""

    source: Annotated[str, says("Id on a hub, or folder.")]
    model_type: Annotated[str, says("As config.json has it.")]

    @classmethod
    def of(cls, choice: ModelChoice | None, recipe: ModelRecipe | None) -> KnownModel | None:
        """From the zoo, or from a `config.json` on this machine; `None` where neither has it."""
        if recipe is not None:
            return cls(choice.source if choice else recipe.hf_id, recipe.model_type)
        config = ConfigFile.kept(choice.source) if choice else None
        kind = getattr(config, "model_type", None)
        return cls(choice.source, kind) if choice and isinstance(kind, str) else None


@dataclass(frozen=True)
class Tried:
    """Whether something works for models of a kind."""

    state: Literal["works", "does not work", "not tried"]
    how: Annotated[str | None, says("What it was tried with, or why it does not work.")]

    @classmethod
    def of(cls, answer: Answer) -> Tried:
        """What a row of the architectures says."""
        return cls(answer.state, answer.tested or answer.reason)


class Works(TypedDict):
    """What works for models of a kind."""

    compute: Annotated[Tried, says("Making a rotation.")]
    eval: Annotated[Tried, says("Measuring perplexity and recall.")]
    serve_cpu: Annotated[Tried, says("Serving on a CPU.")]
    serve_gpu: Annotated[Tried, says("Serving on an NVIDIA GPU.")]


@dataclass(frozen=True)
class Copy:
    """A copy in the store."""

    id: Name
    digest: Digest
    path: Annotated[Path, says("Its folder in the store.")]
    intact: Annotated[bool, says("Whether hashing it just now gave its digest.")]
    fetch_again: Annotated[str, says("The command that fetches it again.")]
    signature: SignatureReport

    @classmethod
    def of(cls, record: Record) -> Copy:
        """The copy of `record`, read now."""
        signature, intact = NOT_SIGNED, False
        with contextlib.suppress(IntegrityError):
            signature, intact = signature_of(Store().open(record.digest, record.id)), True
        named = (record.id, record.digest, record.path)
        return cls(*named, intact, record.fetch_again, signature)


@dataclass(frozen=True)
class Offer:
    """A version that a hub offers."""

    id: Name
    hub: str
    digest: Annotated[Digest | None, says("Null where the hub does not say.")]
    state: State
    reason: Annotated[str | None, says("Why it was deprecated or yanked.")]
    signed: Annotated[bool, says("Whether it has a signature file, which nobody has read.")]


@dataclass(frozen=True)
class Files:
    """The files of a folder."""

    intact: Annotated[bool, says("Whether they passed verification.")]
    outcome: Annotated[str, says("What was found, in a few words.")]


class Card(TypedDict):
    """What fits on GPUs of one kind. Tokens and requests are null where the size of the weights, or
    what layers without full attention keep, is not known."""

    name: str
    memory_bytes: Annotated[Size, says("Of one GPU.")]
    gpus: Annotated[int, Field(ge=1, description="Number of GPUs that share the model.")]
    requests: Annotated[
        Size,
        says(
            "Running requests that the numbers below allow for, where there are states for so many."
        ),
    ]
    int2_tokens: Annotated[Size | None, says("Tokens that fit.")]
    int2_requests: Annotated[Size | None, says("Requests that run at a time then.")]
    bf16_tokens: Annotated[Size | None, says("The same with a BF16 cache.")]
    bf16_requests: Annotated[Size | None, says("The same with a BF16 cache.")]


class Memory(TypedDict):
    """What a model takes on GPUs."""

    estimate: Annotated[Literal[True], says("The numbers are estimates.")]
    weights_bytes: Annotated[Size | None, says("Null where nobody knows the size of the weights.")]
    weights_source: Annotated[
        str | None, says("What says the size of the weights, in a few words.")
    ]
    int2_token_bytes: Annotated[Size, says("Of one token on all GPUs.")]
    bf16_token_bytes: Annotated[Size, says("Of one token on all GPUs.")]
    window_bytes_per_request: Annotated[
        Size, says("What a running request takes beside its tokens, with INT2.")
    ]
    state_bytes_per_request: Annotated[
        Size, says("Of these, the states of layers without keys and values.")
    ]
    other_layers_unknown: Annotated[
        str | None, says("What nobody knows of the layers without full attention, in words.")
    ]
    gpus: Annotated[
        Sequence[Card], says("One entry for each kind of GPU that was named or is here.")
    ]


@dataclass(frozen=True, kw_only=True)
class Description:
    """What oscar-zoo info prints: everything known about a model or one of its artifacts."""

    name: Annotated[str, says("Of the model.")]
    model: Annotated[
        KnownModel | None, says("The model; null where only artifacts of this name are known.")
    ]
    recipe: Annotated[
        ModelRecipe | None,
        says("What the zoo knows about the model; null where it does not know it."),
    ]
    artifacts: Annotated[tuple[Manifest, ...], says("Manifests of its artifacts, by id.")]
    measured: Annotated[
        Mapping[str, Measured | None],
        says("By the id of an artifact: perplexity and recall beside BF16."),
    ]
    scores: Annotated[
        Mapping[str, tuple[Score, ...]],
        says("By the id of an artifact; what was measured comes first."),
    ]
    works: Annotated[
        Works | None,
        says("What works for models of this kind; null where the zoo does not know the kind."),
    ]
    memory: Annotated[Memory | None, says("What fits on GPUs; null where no shapes are known.")]
    warnings: Annotated[
        tuple[str, ...],
        says("Sentences about copies that were deprecated or yanked, or that are damaged."),
    ]
    installed: tuple[Copy, ...] = ()
    offered: Annotated[tuple[Offer, ...], says("What the hubs have, hub by hub.")] = ()
    unreachable: Unreachable = ()
    files: Annotated[
        Files | None, says("Files of the folder that was named; null where a name was given.")
    ] = None
    records: Annotated[tuple[Record, ...], *HIDDEN] = ()
    verified: Annotated[outcome.Outcome | None, *HIDDEN] = None
    schema: Literal["oscar-zoo.info/1"] = "oscar-zoo.info/1"


def run(params: InfoParams, observer: Observer = SILENT) -> Description:
    """What is known about a model, an artifact, or what lies in a folder."""
    target = parse(params.name)
    if isinstance(target, ModelTarget):
        check_served(target.choice)
    if isinstance(target, PathTarget):
        return describe_folder(target, gpu_memory=params.gpu_memory)
    sources = Sources(params.hubs, offline=params.offline)
    with looking_up(target, SILENT):
        return describe(target, sources, gpu_memory=params.gpu_memory, any_model=True)


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
    records, offered = _installed(model), _offered(model, views)
    every = {m.artifact_id.reference for m in manifests}
    every |= {record.id.reference for record in records} | {row.id.reference for row in offered}
    manifests = [m for m in manifests if _means(reference, m.artifact_id, m.digest)]
    records = [record for record in records if _means(reference, record.id, record.digest)]
    offered = [row for row in offered if _means(reference, row.id, row.digest)]
    ids = {str(row.id) for row in offered} | {str(record.id) for record in records}
    narrowed = reference.tag is not None or reference.digest is not None
    about = KnownModel.of(target.choice if any_model else None, recipe)
    if not manifests and not records and not offered and (about is None or narrowed):
        raise _unknown(target, recipe, sorted(every), views, unreachable, sources)
    scores = {
        name: known_scores(ArtifactId.parse(name), views, catalog)
        for name in sorted(ids | {one.id for one in manifests})
    }
    return Description(
        name=model,
        model=about,
        recipe=recipe,
        works=_works(about),
        artifacts=tuple(manifests),
        measured=_measured(manifests, scores, records),
        scores=scores,
        installed=tuple(map(Copy.of, records)),
        offered=tuple(offered),
        unreachable=tuple(unreachable),
        warnings=tuple(text for record in records for text in status_warnings(record)),
        memory=cast("Memory | None", estimate_memory(recipe, manifests, gpu_memory)),
        records=tuple(records),
    )


def _works(model: KnownModel | None) -> Works | None:
    row = architecture(model.model_type) if model else None
    if row is None:
        return None
    return {
        "compute": Tried.of(row.compute),
        "eval": Tried.of(row.evaluate),
        "serve_cpu": Tried.of(row.serve_cpu),
        "serve_gpu": Tried.of(row.serve_gpu),
    }


def _measured(
    manifests: Sequence[manifest.Manifest],
    scores: Mapping[str, tuple[Score, ...]],
    records: Sequence[Record],
) -> dict[str, Measured | None]:
    """Perplexity and recall of each artifact, by id: as `eval` measured them last, or when it was
    made."""
    kept = {str(record.id): record.measured for record in records}
    return {
        one.id: measured.Measured.best(
            scores.get(one.id, ()), measured.Measured.of(one) or kept.get(one.id)
        )
        for one in manifests
    }


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


def _manifests(model: str, views: Sequence[HubView]) -> dict[str, manifest.Manifest]:
    """Manifests of `model` on hubs and in the store, by id key; the packaged `registry` block is
    not repeated."""
    found: dict[str, manifest.Manifest] = {}
    store = Store()
    for hub in (view.hub for view in views):
        for artifact in hub.artifacts():
            listed = artifact.model.casefold() == model.casefold() and artifact.key not in found
            if listed and any(file.path == FILE_NAME for file in hub.files(artifact)):
                data = hub.fetch(artifact, FILE_NAME, limit=1 << 20)
                found[artifact.key] = manifest.Manifest.from_bytes(data)
    for record in _installed(model):
        with contextlib.suppress(IntegrityError):  # a damaged copy says nothing
            stored = store.open(record.digest, record.id)
            if stored.manifest is not None:
                found[record.id.key] = stored.manifest
    return found


def _installed(model: str) -> list[Record]:
    installed = Store().installed()
    return [record for record in installed if record.id.model.casefold() == model.casefold()]


def describe_folder(target: PathTarget, *, gpu_memory: int | None = None) -> Description:
    """What the `oscar.json` of a folder says of the artifact in it, its model, and the scores
    beside it. The files are verified; no hub is asked.
    """
    (entry,), _ = known_entries([target], Sources(offline=True))
    found, warnings = check_one(existing_path(target.path)), list[str]()
    if not isinstance(found, Verified):
        warnings.append(outcome.failed_verification(str(target), found))
    manifests = () if entry.manifest is None else (entry.manifest,)
    scores = {str(entry.id): entry.scores}
    about = KnownModel.of(None, entry.recipe)
    return Description(
        name=entry.id.model,
        model=about,
        recipe=entry.recipe,
        works=_works(about),
        artifacts=manifests,
        measured=_measured(manifests, scores, ()),
        scores=scores,
        warnings=tuple(warnings),
        memory=cast("Memory | None", estimate_memory(entry.recipe, manifests, gpu_memory)),
        verified=found,
    )
