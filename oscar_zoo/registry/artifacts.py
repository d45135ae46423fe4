"""An artifact that a use case works with, verified: of a folder, the local store or a hub."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from oscar_zoo.artifact.formats import RotationSet
from oscar_zoo.artifact.manifest import FILE_NAME, Manifest
from oscar_zoo.artifact.names import Reference, path_text
from oscar_zoo.artifact.outcome import Outcome, Verified, refuse, warning_text
from oscar_zoo.artifact.specs import ServingRecipe
from oscar_zoo.errors import ArtifactNotFound, OscarZooError, UsageError
from oscar_zoo.next_step import Pull
from oscar_zoo.observer import Note, Observer
from oscar_zoo.registry import targets
from oscar_zoo.registry.catalog import recipe_for
from oscar_zoo.registry.fetch import PullJob, PullResult
from oscar_zoo.registry.hubs.address import Sources
from oscar_zoo.registry.known_names import find_stored, stored_reference
from oscar_zoo.registry.pins import PinFile
from oscar_zoo.registry.store import Store, StoredArtifact
from oscar_zoo.registry.trust import Trust
from oscar_zoo.registry.verify import check_one, one_artifact, verify_stored


@dataclass(frozen=True)
class Artifact:
    """A verified artifact on this machine.

    Attributes:
        label: how to call it: `<Model>:<tag>`, or the folder of an artifact without a manifest.
        digest: `sha256:<64 hex>` over the payload files.
        path: folder with the files: the store's, whose files are read-only, a copy, or any other.
        files: file name -> path, `oscar.json` included where there is one.
        recipe: serving recipe of the manifest, or of the model's entry in the zoo, or `None`.
        base_model: folder of the model that it was asked for by, else hub id of its base model, or
            `None`.
        installed: whether it is in the local store.
        id: `<Model>/<tag>`, or `None` for a folder without a manifest.
        revision: commit of the hub, if it has any.
        first_use: whether nobody had promised its digest before: it is trusted from now on.
        warnings: codes of verification, and sentences about a deprecated or yanked version.
        outcome: what verification found when it was opened, if it ran then.
        asked_by: the model by whose folder it was asked for, if it was.
    """

    label: str
    digest: str
    path: Path
    files: Mapping[str, Path]
    manifest: Manifest | None
    recipe: ServingRecipe | None
    base_model: str | None
    installed: bool
    id: str | None = None
    hub: str | None = None
    revision: str | None = None
    already_present: bool = True
    first_use: bool = False
    warnings: tuple[str, ...] = ()
    outcome: Verified | None = field(default=None, compare=False)
    asked_by: targets.ModelChoice | None = field(default=None, compare=False)

    def __repr__(self) -> str:
        return f"Artifact({self.id or self.label!r}, {self.digest[:19]!r}, path={str(self.path)!r})"

    @property
    def model(self) -> str | None:
        return self.id.partition("/")[0] if self.id else None

    @property
    def tag(self) -> str | None:
        return self.id.partition("/")[2] if self.id else None

    @cached_property
    def verified(self) -> Verified:
        return self.outcome or self.verify()

    def verify(self) -> Verified:
        """Read, hash and verify the bytes now.

        Raises:
            ArtifactNotFound: it was removed from the store.
            DigestMismatchError: a file was changed.
            VerificationFailed: it must not be used.
        """
        if not self.installed or self.id is None:
            return _verified(check_one(self.path), path_text(self.path))
        reference, store = Reference(str(self.model), self.tag, self.digest), Store()
        record = find_stored(reference, store)
        if record is None:
            text = f"{reference} is not in the store."
            raise ArtifactNotFound(text, next_step=Pull(str(reference)))
        return _verified_copy(store.open(record.digest, record.id))

    def rotations(self) -> tuple[RotationSet, RotationSet]:
        """The transforms of keys and values, from bytes that are read, hashed and verified now.

        Returns:
            Two `RotationSet`s. `layers[i].forward` is float32 `[head_dim, head_dim]`, or
            `[num_kv_heads, head_dim, head_dim]` for transforms per head; `k' = k @ forward`.

        Raises:
            UsageError: it has only one of the two sides.
            OscarZooError: as `verify`.
        """
        verified = self.verify()
        if verified.k is None or verified.v is None:
            raise UsageError(
                f"{self.label} has only one side; a cache needs K and V.",
                hint="give the folder that holds both",
            )
        return verified.k, verified.v


def open_artifact(target: targets.Target, sources: Sources, observer: Observer) -> Artifact:
    """Open what `target` means; a name that is not in the store is pulled first. A copy in the
    store is taken without a request, unless `sources` names hubs."""
    if isinstance(target, targets.PathTarget):
        return open_folder(one_artifact(target.path), observer)
    try:
        return open_named(target, sources, observer)
    except OscarZooError as error:
        if isinstance(target, targets.ModelTarget) and (
            choice := targets.model_to_compute(target, error)
        ):
            targets.tell_of_folder(target, error)
            error.next_step = targets.computing(choice, sources, offline=sources.offline)
        raise


def open_named(
    target: targets.ModelTarget | targets.NameTarget, sources: Sources, observer: Observer
) -> Artifact:
    store, reference = Store(), target.reference
    prefer_installed = not sources.named
    with targets.looking_up(target, observer):
        if prefer_installed:
            reference = stored_reference(reference, store)
        job = PullJob(
            reference,
            sources.hubs,
            store,
            trust=Trust(lock=PinFile.of_project(), write_lock=False),
            offline=sources.offline,
            go_online=sources.go_online,
            prefer_installed=prefer_installed,
            progress=lambda name, done, total: observer.advance(name, done, total, "bytes"),
        )
        result = job.pull()
        choice = target.choice if isinstance(target, targets.ModelTarget) else None
        return open_pulled(result, choice, observer)


def open_pulled(
    result: PullResult, choice: targets.ModelChoice | None, observer: Observer
) -> Artifact:
    for text in result.notes:
        observer.note(Note("artifact.hub", text))
    for text in result.warnings:
        observer.note(warning_note(text))
    outcome = result.verified or _verified_copy(result.artifact)
    opened = replace(pulled_artifact(result), outcome=outcome)
    if choice is None:
        return opened
    targets.check_made_for(choice, opened.manifest)
    return replace(opened, base_model=choice.source, asked_by=choice)


def warning_note(text: str) -> Note:
    return Note("artifact.warning", warning_text(text), {"warning": text}, kind="warning")


def pulled_artifact(result: PullResult, copy: Path | None = None) -> Artifact:
    """What `registry.pull` gave, as an `Artifact`; `copy` is a folder that it was copied to."""
    return replace(
        stored_artifact(result.artifact, copy),
        hub=result.hub,
        already_present=result.already_present,
        first_use=result.first_use,
        warnings=result.warnings,
        outcome=result.verified,
    )


def stored_artifact(stored: StoredArtifact, copy: Path | None = None) -> Artifact:
    """An entry that `Store.open` returned, as an `Artifact`; `copy` as for `pulled_artifact`."""
    record, place = stored.record, copy or stored.record.path
    recipe, base_model = _recipe(stored.manifest, (record.id.model,))
    return Artifact(
        label=record.id.reference,
        digest=record.digest,
        path=place,
        files={name: place / name for name in stored.files},
        manifest=stored.manifest,
        recipe=recipe,
        base_model=base_model,
        installed=True,
        id=str(record.id),
        hub=record.source,
        revision=record.revision,
        warnings=record.warnings,
    )


def open_folder(path: Path, observer: Observer) -> Artifact:
    """Open the artifact in the folder `path`, and tell its warnings."""
    if path.is_file():
        message = f"{path} is one file; a cache needs K and V."
        raise targets.refusal(path, UsageError(message, hint="give the folder that holds both"))
    verified = _verified(check_one(path), path_text(path))
    for text in verified.warnings:
        observer.note(warning_note(text))
    manifest, names = verified.manifest, [file.path for file in verified.files]
    if manifest is not None:
        names.append(FILE_NAME)
    parents = tuple(part.name for part in (path, *path.absolute().parents[:3]))
    recipe, base_model = _recipe(manifest, parents)
    return Artifact(
        label=manifest.artifact_id.reference if manifest else str(path),
        digest=verified.digest,
        path=path,
        files={name: path / name for name in names},
        manifest=manifest,
        recipe=recipe,
        base_model=base_model,
        installed=False,
        id=manifest.id if manifest else None,
        warnings=verified.warnings,
        outcome=verified,
    )


def _verified_copy(stored: StoredArtifact) -> Verified:
    return _verified(verify_stored(stored), stored.record.id.reference)


def _verified(outcome: Outcome, name: str) -> Verified:
    if not isinstance(outcome, Verified):
        refuse(name, outcome)
    return outcome


def _recipe(
    manifest: Manifest | None, names: tuple[str, ...]
) -> tuple[ServingRecipe | None, str | None]:
    """Serving recipe and base model: of the manifest, else of the first of `names` that the zoo
    knows."""
    if manifest is not None:
        return manifest.recipe, manifest.model.id
    known = next((recipe for recipe in map(recipe_for, names) if recipe is not None), None)
    return (known.serving, known.hf_id) if known else (None, None)
