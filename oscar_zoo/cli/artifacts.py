"""`NAME|DIR` -> a verified artifact, for the commands that use one: from a folder, the local store,
or a hub."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from oscar_zoo.artifact.manifest import FILE_NAME, Manifest
from oscar_zoo.artifact.names import Reference, is_path, path_text
from oscar_zoo.artifact.outcome import Verified
from oscar_zoo.artifact.specs import ServingRecipe
from oscar_zoo.cli.render import terminal
from oscar_zoo.cli.render.outcomes import warning_text
from oscar_zoo.cli.targets import (
    looking_up,
    model_folder,
    wanted_reference,
)
from oscar_zoo.errors import UsageError
from oscar_zoo.registry.catalog import recipe_for
from oscar_zoo.registry.pull import refuse
from oscar_zoo.registry.store import StoredArtifact
from oscar_zoo.registry.verification import existing_path, geometry_from_path, one_artifact


@dataclass(frozen=True)
class OpenArtifact:
    """A verified artifact ready to use.

    Attributes:
        label: how to call it: reference or folder.
        verified: the outcome, with both rotation sets.
        manifest: its `oscar.json`, or `None`.
        recipe: serving recipe of the manifest, or of the model's entry in the zoo, or `None`.
        base_model: folder that was asked for, else hub id of its base model, or `None`.
        place: folder with its files.
        installed: whether that folder is of the local store.
    """

    label: str
    verified: Verified
    manifest: Manifest | None
    recipe: ServingRecipe | None
    base_model: str | None
    place: Path
    installed: bool


def open_artifact(text: str, *, hubs: tuple[str, ...] = (), quiet: bool) -> OpenArtifact:
    """Open `text`; a name that is not in the store is pulled from `hubs` first, or the configured
    ones.

    A folder with a model stands for the artifact of its name.

    Raises:
        PathNotFound, ArtifactNotFound, AmbiguousName: it means nothing, or too much.
        VerificationFailed, DigestMismatchError: it must not be used.
        UsageError: the artifact of a folder's name was made for another model.
    """
    folder = model_folder(text)
    if folder is None and is_path(text):
        return _from_folder(existing_path(text))
    with looking_up(text):
        return open_reference(wanted_reference(text), hubs=hubs, folder=folder, quiet=quiet)


def _from_folder(path: Path) -> OpenArtifact:
    from oscar_zoo.artifact.files import read_file
    from oscar_zoo.artifact.verify import verify_path

    if path.is_file():
        raise UsageError(
            f"{path} is one file; a cache needs K and V.", hint="give the folder that holds both"
        )
    path = one_artifact(path)
    verified = verify_path(path, geometry=geometry_from_path(path))
    if not isinstance(verified, Verified):
        refuse(path_text(path), verified)
    manifest = None
    if (path / FILE_NAME).exists():
        manifest = Manifest.from_bytes(read_file(path / FILE_NAME))
    names = () if manifest else tuple(part.name for part in (path, *path.absolute().parents[:3]))
    label = manifest.artifact_id.reference if manifest else str(path)
    return _open(label, verified, manifest, names, path, installed=False)


def open_reference(
    reference: Reference, *, hubs: tuple[str, ...] = (), folder: Path | None = None, quiet: bool
) -> OpenArtifact:
    """The same for a name; `folder` is the model it was asked for by, if any."""
    from oscar_zoo.cli.models import check_made_for
    from oscar_zoo.hubs import address, config
    from oscar_zoo.registry.installed import find_installed
    from oscar_zoo.registry.known_names import find_stored
    from oscar_zoo.registry.pins import PinFile
    from oscar_zoo.registry.pull import pull, verify_stored
    from oscar_zoo.registry.store import Store
    from oscar_zoo.registry.trust import Trust

    offline, store = config.load(hubs).offline, Store()
    if not hubs and find_installed(reference, store) is None:
        known = find_stored(reference, store)  # by an alias, which nothing in the store says
        reference = (
            Reference(known.id.model, known.id.tag, reference.digest) if known else reference
        )
    with terminal.progress("bytes", enabled=not quiet) as advance:
        result = pull(
            reference,
            address.open_hubs(hubs, offline=offline),
            store,
            trust=Trust(lock=PinFile.of_project(), write_lock=False),
            offline=offline,
            prefer_installed=not hubs,
            progress=lambda name, done, total: advance(done, total, name),
        )
    for note in (*result.notes, *result.warnings):
        terminal.note(f"note: {warning_text(note)}", quiet=quiet)
    outcome = result.verified or verify_stored(result.artifact)
    if not isinstance(outcome, Verified):
        refuse(str(reference), outcome)
    opened = _open_stored(result.artifact, outcome)
    if folder is None:
        return opened
    check_made_for(folder, opened.manifest)
    return replace(opened, base_model=path_text(folder))


def _open_stored(stored: StoredArtifact, verified: Verified) -> OpenArtifact:
    names = (stored.record.id.model,)
    return _open(
        stored.record.id.reference,
        verified,
        stored.manifest,
        names,
        stored.record.path,
        installed=True,
    )


def _open(
    label: str,
    verified: Verified,
    manifest: Manifest | None,
    names: tuple[str, ...],
    place: Path,
    *,
    installed: bool,
) -> OpenArtifact:
    if manifest is not None:
        recipe, base_model = manifest.recipe, manifest.model.id
        return OpenArtifact(label, verified, manifest, recipe, base_model, place, installed)
    known = next((r for r in map(recipe_for, names) if r is not None), None)
    serving, base = (known.serving, known.hf_id) if known else (None, None)
    return OpenArtifact(label, verified, None, serving, base, place, installed)
