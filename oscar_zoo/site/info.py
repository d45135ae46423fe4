"""Everything that is known about a model, or about one of its artifacts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, cast

from pydantic import Field
from typing_extensions import TypedDict

from oscar_zoo.artifact import manifest, outcome
from oscar_zoo.artifact.manifest import SIGNATURE_NAME
from oscar_zoo.artifact.names import ArtifactId, Reference, path_text
from oscar_zoo.artifact.outcome import HIDDEN, Digest, SignatureReport, Verified, says
from oscar_zoo.errors import ArtifactNotFound, OscarZooError
from oscar_zoo.models.config_file import ConfigFile, unread_weights
from oscar_zoo.observer import SILENT, Note, Observer
from oscar_zoo.registry import known_names, measured, score_file, targets
from oscar_zoo.registry.architectures import architecture
from oscar_zoo.registry.catalog import Catalog
from oscar_zoo.registry.entries import Entry, collect
from oscar_zoo.registry.hubs.address import Sources
from oscar_zoo.registry.known_names import status_warnings
from oscar_zoo.registry.lookup import known_entries, look, unknown_name
from oscar_zoo.registry.recipe import ModelRecipe
from oscar_zoo.registry.score_file import key, values
from oscar_zoo.registry.signatures import NOT_SIGNED, signature_of
from oscar_zoo.registry.store import Record, Store, StoredArtifact
from oscar_zoo.registry.verify import check_one, existing_path
from oscar_zoo.registry.view import HubView
from oscar_zoo.serving.artifact_model import check_served
from oscar_zoo.serving.memory import estimate_memory
from oscar_zoo.site.facts import Manifest, Measured, Name, Score, Size, State, Unreachable
from oscar_zoo.site.params import InfoParams, ScoresParams


@dataclass(frozen=True)
class KnownModel:
    """A model and its kind."""

    source: Annotated[str, says("Id on a hub, or folder.")]
    model_type: Annotated[str, says("As config.json has it.")]


@dataclass(frozen=True)
class Tried:
    """Whether something works for models of a kind."""

    state: Literal["works", "does not work", "not tried"]
    how: Annotated[str | None, says("What it was tried with, or why it does not work.")]


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
    target = targets.parse(params.name)
    if isinstance(target, targets.ModelTarget):
        check_served(target.choice)
    if isinstance(target, targets.PathTarget):
        return describe_folder(target, gpu_memory=params.gpu_memory)
    sources = Sources(params.hubs, offline=params.offline)
    with targets.looking_up(target, SILENT):
        return describe(target, sources, gpu_memory=params.gpu_memory, any_model=True)


def describe(
    target: targets.ModelTarget | targets.NameTarget,
    sources: Sources,
    *,
    gpu_memory: int | None = None,
    any_model: bool = False,
) -> Description:
    """What is known about a model and its artifacts, or about the one that is named; `gpu_memory`
    takes the place of the GPUs that are visible."""
    catalog = Catalog.packaged()
    views, unreachable = look(sources.hubs)
    reference = known_names.expand(target.reference, views)
    recipe = catalog.recipe(reference.name)
    model = recipe.name if recipe else reference.name.rsplit("/", 1)[-1]
    entries = {entry.id: entry for entry in collect(catalog, views, model)}
    installed = Store().installed()
    records = {one.id: one for one in installed if one.id.model.casefold() == model.casefold()}
    every = sorted({*entries, *records})
    meant = [one for one in every if _means(reference, one, entries.get(one), records.get(one))]
    about = _known_model(target.choice if any_model else None, recipe)
    narrowed = reference.tag is not None or reference.digest is not None
    if not meant and (about is None or narrowed):
        names = [one.reference for one in every]
        raise _unknown(target, recipe, names, views, unreachable, sources)
    copies = {one: records[one] for one in meant if one in records}
    stored = {one: Store().intact(record) for one, record in copies.items()}
    manifests = []
    for one in meant:  # a damaged copy says nothing
        found, entry = stored.get(one), entries.get(one)
        said = (found.manifest if found else None) or (entry.manifest if entry else None)
        manifests += [said] if said else []
    scores = {str(one): entries[one].scores if one in entries else () for one in meant}
    return Description(
        name=model,
        model=about,
        recipe=recipe,
        works=_works(about),
        artifacts=tuple(manifests),
        measured=_measured(manifests, scores, [*copies.values()]),
        scores=scores,
        memory=cast("Memory | None", estimate_memory(recipe, manifests, gpu_memory, target.choice)),
        installed=tuple(_copy(record, stored[one]) for one, record in copies.items()),
        offered=tuple(row for view in views for row in _offered(view, meant)),
        unreachable=tuple(unreachable),
        warnings=tuple(text for record in copies.values() for text in status_warnings(record)),
        records=tuple(copies.values()),
    )


def _copy(record: Record, stored: StoredArtifact | None) -> Copy:
    signature = NOT_SIGNED if stored is None else signature_of(stored)
    named = (record.id, record.digest, record.path, stored is not None)
    return Copy(*named, record.fetch_again, signature)


def _means(
    reference: Reference, artifact: ArtifactId, entry: Entry | None, record: Record | None
) -> bool:
    """Whether tag and digest of `reference`, where it has them, are those of an artifact."""
    if reference.tag is not None and artifact.tag.casefold() != reference.tag.casefold():
        return False
    digests = [one.digest or "" for one in (entry, record) if one is not None]
    return reference.digest is None or any(one.startswith(reference.digest) for one in digests)


def _offered(view: HubView, artifacts: Sequence[ArtifactId]) -> Iterator[Offer]:
    keys = {artifact.key for artifact in artifacts}
    for artifact in view.hub.artifacts():
        if artifact.key in keys:
            entry, status = view.index.entry(artifact), view.status(artifact)
            signed = any(file.path == SIGNATURE_NAME for file in view.hub.files(artifact))
            told = (entry.digest if entry else None, status.state, status.reason, signed)
            yield Offer(artifact, view.hub.name, *told)


def _known_model(
    choice: targets.ModelChoice | None, recipe: ModelRecipe | None
) -> KnownModel | None:
    """From the zoo, or from a `config.json` on this machine; `None` where neither has it."""
    if recipe is not None:
        return KnownModel(choice.source if choice else recipe.hf_id, recipe.model_type)
    kind = getattr(ConfigFile.kept(choice.source), "model_type", None) if choice else None
    return KnownModel(choice.source, kind) if choice and isinstance(kind, str) else None


def _works(model: KnownModel | None) -> Works | None:
    row = architecture(model.model_type) if model else None
    if model is None or row is None:
        return None
    answers = (row.compute, row.evaluate, row.serve_cpu, row.serve_gpu)
    tried = [Tried(one.state, one.tested or one.reason) for one in answers]
    if refused := unread_weights(model.source):
        unread = Tried("does not work", refused.message)
        tried[:3] = unread, unread, Tried("not tried", None)
    return cast("Works", dict(zip(Works.__annotations__, tried, strict=True)))


def _measured(
    manifests: Sequence[manifest.Manifest],
    scores: Mapping[str, tuple[Score, ...]],
    records: Sequence[Record],
) -> dict[str, Measured | None]:
    """Perplexity and recall of each artifact, by id: of `eval`, or of when it was made."""
    known, best = {str(record.id): record.measured for record in records}, measured.Measured.best
    made = {one.id: measured.Measured.of(one) or known.get(one.id) for one in manifests}
    return {name: best(scores.get(name, ()), one) for name, one in made.items()}


def _unknown(
    target: targets.ModelTarget | targets.NameTarget,
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
        error.next_step = targets.computing(target.choice, sources)
    return error


def describe_folder(target: targets.PathTarget, *, gpu_memory: int | None = None) -> Description:
    """What the `oscar.json` of a folder says of the artifact in it, its model, and the scores
    beside it. The files are verified; no hub is asked.
    """
    (entry,), _ = known_entries([target], Sources(offline=True))
    found, warnings = check_one(existing_path(target.path)), list[str]()
    if not isinstance(found, Verified):
        warnings.append(outcome.failed_verification(str(target), found))
    manifests = () if entry.manifest is None else (entry.manifest,)
    about, scores = _known_model(None, entry.recipe), {str(entry.id): entry.scores}
    return Description(
        name=entry.id.model,
        model=about,
        recipe=entry.recipe,
        works=_works(about),
        artifacts=manifests,
        measured=_measured(manifests, scores, ()),
        scores=scores,
        memory=cast("Memory | None", estimate_memory(entry.recipe, manifests, gpu_memory)),
        warnings=tuple(warnings),
        verified=found,
    )


@dataclass(frozen=True)
class KnownScores:
    """What is known about the quality of one artifact."""

    id: Annotated[str, says("MODEL/TAG.")]
    place: Annotated[str, *HIDDEN]
    """What commands call it: its name, or its folder where that was named."""
    made: Annotated[Measured | None, says("As it was measured when the artifact was made.")]
    at_pull: Annotated[
        Measured | None, says("As its hub said when it was pulled, where a copy is in the store.")
    ]
    scores: Annotated[
        tuple[Score, ...],
        says("What was measured comes first, then what others and upstream report."),
    ]
    own: Annotated[
        tuple[Score, ...],
        says("Measured on this machine and on no hub.", serialization_alias="not_published"),
    ]
    own_path: Annotated[Path, *HIDDEN]
    """The score file of `own`."""
    warnings: Annotated[
        tuple[str, ...],
        says("Sentences about a copy that was yanked or deprecated, or is poor or damaged."),
    ]


@dataclass(frozen=True)
class ScoresReport:
    """What oscar-zoo scores NAME prints: all that is known about the quality of artifacts."""

    artifacts: tuple[KnownScores, ...]
    schema: Literal["oscar-zoo.scores-of/1"] = "oscar-zoo.scores-of/1"


def run_scores(params: ScoresParams, observer: Observer = SILENT) -> ScoresReport:
    """What is known about the quality of a model's artifacts, of the one that is named, or of the
    one in a folder, by id. No hub is asked about a folder.

    Where nothing is known, the observer is told which hubs did not answer.
    """
    target = targets.parse(params.name)
    if isinstance(target, targets.PathTarget):
        found = describe_folder(target)
    else:
        with targets.looking_up(target, SILENT):
            found = describe(target, Sources(params.hubs, offline=params.offline))
    for error in () if found.scores else found.unreachable:
        observer.note(Note("hub.unreachable", error.message))
    made = {one.id: measured.Measured.of(one) for one in found.artifacts}
    records = {str(record.id): record for record in found.records}
    artifacts = []
    for name, published in found.scores.items():
        artifact, record = ArtifactId.parse(name), records.get(name)
        place, path = artifact.reference, score_file.in_state(artifact)
        own: tuple[Score, ...] = ()
        warnings = status_warnings(record) if record else ()
        if isinstance(target, targets.PathTarget):
            place, path = path_text(target.path), score_file.in_folder(target.path)
            warnings = found.warnings
        elif (file := score_file.read(path)) is not None:
            said = {(key(score), value) for score in published for value in values(score)}
            own = tuple(s for s in file.scores if {(key(s), v) for v in values(s)} - said)
        known = made.get(name), record.measured if record else None
        artifacts.append(KnownScores(name, place, *known, published, own, path, warnings))
    return ScoresReport(tuple(artifacts))


def scores(name: str | Path, *, hub: str | None = None) -> tuple[KnownScores, ...]:
    """What is known about the quality of a model's artifacts, or of the one that is named.

    Args:
        name: `NAME`, `NAME:TAG`, `<Model>/<tag>`, `NAME@sha256:PREFIX`, or the folder of an
            artifact.
        hub: where to look; default the configured hubs.

    Raises:
        ArtifactNotFound: nothing known has this name.
        PathNotFound: there is no such folder, or it has no `oscar.json`.
    """
    return run_scores(ScoresParams(name, hubs=hub)).artifacts
