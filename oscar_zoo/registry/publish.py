"""Publish a verified artifact as one new version on a hub: one commit, read back and tagged.

A version never changes. Publishing the same content again succeeds, and other content under the
same id is refused. The commit counts: if the index entry, the card or the tag is missing,
publishing the same folder again repairs it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from shlex import quote
from typing import Annotated, Any, Literal

from pydantic import Field, InstanceOf, PlainSerializer, computed_field

from oscar_zoo.artifact.artifact_folder import read_folder, read_signature
from oscar_zoo.artifact.files import FileDigest, file_digest, read_file
from oscar_zoo.artifact.manifest import FILE_NAME, REPORT_NAME, SIGNATURE_NAME, Manifest
from oscar_zoo.artifact.names import ArtifactId, Reference, path_text
from oscar_zoo.artifact.outcome import HIDDEN, Digest, Verified, refuse, says
from oscar_zoo.artifact.specs import Geometry, Score
from oscar_zoo.artifact.verify import verify_files
from oscar_zoo.errors import PathNotFound, UsageError
from oscar_zoo.observer import SILENT, Note, Observer
from oscar_zoo.registry import changes, score_file, signatures
from oscar_zoo.registry.card import BEGIN, END, is_damaged
from oscar_zoo.registry.catalog import can_be_found, recipe_for
from oscar_zoo.registry.hubs.base import CARD_NAME, INDEX_NAME, Change, Hub
from oscar_zoo.registry.index import Accepted, Index
from oscar_zoo.registry.measured import Measured
from oscar_zoo.registry.params import PublishParams
from oscar_zoo.registry.score_file import ScoreFile, merged
from oscar_zoo.registry.signatures import KnownKey, KnownKeys, SigningKey, check_signature, sign
from oscar_zoo.verb import checked, shows

_LEAST_PARAMETERS = 100_000_000
"""Smaller models are not asked whole questions: perplexity and recall say more about them."""
REPORT_HEAD = b"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
  content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
"""
"""How a report begins that can run nothing and makes no request."""


@dataclass(frozen=True)
class PublishPlan:
    """What a dry run would send."""

    files: Annotated[tuple[FileDigest, ...], says("That would be sent.")]
    message: Annotated[str | None, says("Of the commit.")]
    parent: Annotated[str | None, says("The revision that the commit is made for.")]
    tag: Annotated[str | None, says("What would be tagged.")]
    serial: Annotated[int, Field(ge=0, description="Of the index afterwards.")]


@dataclass(frozen=True)
class PublishResult:
    """One version on one hub."""

    hub: str
    id: Annotated[InstanceOf[ArtifactId], PlainSerializer(str, return_type=str)]
    digest: Digest
    already_published: Annotated[bool, says("Whether the same content was there before.")]
    verified: Annotated[Verified, *HIDDEN]
    revision: Annotated[
        str | None, says("Where the hub stands with it; null for a dry run or a proposal.")
    ] = None
    proposal: Annotated[str | None, says("Address of the pull request that has to be merged.")] = (
        None
    )
    tag: Annotated[str | None, says("The tag that now names the version.")] = None
    warnings: Annotated[tuple[str, ...], *HIDDEN] = ()
    plan: Annotated[PublishPlan | None, says("With --dry-run: what would be sent.")] = None
    scores_updated: Annotated[
        bool, says("Whether it was there before, and scores were added to the index.")
    ] = False

    @computed_field(
        alias="warnings",
        description="Codes of verification, and sentences about what did not work out.",
    )
    def told(self) -> tuple[str, ...]:
        return (*self.verified.warnings, *self.warnings)


@dataclass(frozen=True)
class PublishReport:
    """What oscar-zoo publish prints."""

    hubs: Annotated[
        tuple[PublishResult, ...],
        says(
            "One entry per hub, in the order in which they were written; those after a failure are"
            " missing."
        ),
    ]
    error: changes.Failure = None
    schema: Literal["oscar-zoo.publish/1"] = "oscar-zoo.publish/1"


@dataclass(frozen=True)
class Publishable:
    """An artifact as it goes to every hub, whatever happens to its folder later: payload and
    `oscar.json` by their names, and what it is published in spite of."""

    id: ArtifactId
    files: Mapping[str, bytes]
    verified: Verified
    aliases: tuple[str, ...] = ()
    scores: tuple[Score, ...] = ()
    accepted: tuple[Accepted, ...] = ()
    signature: bytes | None = None
    report: bytes | None = None

    @classmethod
    def read(
        cls, folder: Path, *, allow_warnings: bool = False, aliases: Sequence[str] = ()
    ) -> Publishable:
        name = path_text(folder)
        if folder.is_file():
            raise UsageError(
                f"{name} is a file, not an artifact folder.", hint="give the folder that holds it"
            )
        if not folder.is_dir():
            raise PathNotFound.for_path(name, "artifact folder")
        if not (folder / FILE_NAME).exists():
            raise PathNotFound(
                f"{name} has no {FILE_NAME}, so nobody could tell what it is.",
                hint="publish a folder that oscar-zoo compute wrote",
            )
        files = read_folder(folder.resolve())
        assert isinstance(files, dict), "names alone judge only a folder without a manifest"
        manifest = Manifest.from_bytes(files[FILE_NAME], what=str(folder / FILE_NAME))
        listed = {FILE_NAME, *(entry.path for entry in manifest.files)}
        if extra := sorted(files.keys() - listed):
            raise UsageError(
                f"{name} has {', '.join(extra)}, which its {FILE_NAME} does not list.",
                hint="one folder is one artifact: move other rotation files away",
            )
        if missing := sorted(listed - files.keys()):
            raise PathNotFound.for_path(folder / missing[0], "file")
        _check_aliases(aliases, manifest.artifact_id)
        verified = _verify(name, files, manifest, allow_warnings=allow_warnings)
        signature = read_signature(folder.resolve())
        signed = check_signature(signature, files, KnownKeys())
        if signed.state == "invalid":
            remove = f"rm {quote(f'{name}/{SIGNATURE_NAME}')}"
            raise UsageError(f"{name} {signed.message}.", hint=f"remove it: {remove}")
        return cls(manifest.artifact_id, files, verified, tuple(aliases), signature=signature)

    @property
    def manifest(self) -> Manifest:
        assert self.verified.manifest is not None  # a folder without one is refused
        return self.verified.manifest

    @property
    def beside(self) -> dict[str, bytes]:
        files = {SIGNATURE_NAME: self.signature, REPORT_NAME: self.report}
        return {name: data for name, data in files.items() if data is not None}

    def with_scores(self, file: ScoreFile, *, what: str) -> Publishable:
        file.check_same(self.id, self.verified.digest, what=what, where="the folder")
        return replace(self, scores=merged(self.scores, file.scores))

    def signed(self, key: SigningKey) -> Publishable:
        """The same, signed with `key`; a signature by this key stays as it is."""
        known = KnownKeys((KnownKey(signatures.fingerprint(key.public), "", key.public),))
        if check_signature(self.signature, self.files, known).state == "valid":
            return self
        return replace(self, signature=sign(str(self.id), self.files, key))

    def with_report(self, folder: Path, observer: Observer) -> Publishable:
        """The same, with the page that `compute` left beside the folder, if that is about these
        bytes and can run nothing."""
        place = folder.resolve()
        path = place.with_name(f"{place.name}.report.html")
        if not path.is_file():
            return self
        page = read_file(path)
        if page.startswith(REPORT_HEAD) and self.verified.digest.encode() in page:
            return replace(self, report=page)
        again = f"oscar-zoo plot {quote(path_text(folder))}.report.json --output {quote(str(path))}"
        text = f"{path.name} is left out: it is no report of this artifact. Draw it again: {again}"
        observer.note(Note("publish.report", text))
        return self


def run(params: PublishParams, observer: Observer = SILENT) -> PublishReport:
    """Read and verify the folder once, and publish it on one hub after the other."""
    folder, key = params.folder, SigningKey.configured()
    if params.sign and key is None:
        hint = f"export {signatures.VARIABLE}=zoo.pem"
        raise UsageError("no key to sign with is named.", hint=hint)
    hubs = changes.writable_hubs(params.hubs)
    made = Publishable.read(folder, allow_warnings=params.allow_warnings, aliases=params.aliases)
    own = score_file.in_folder(folder)
    for path in ([own] if own.exists() else []) + [*params.scores]:
        made = made.with_scores(score_file.load(path), what=path_text(path))
    model = "" if can_be_found(made.manifest.model.id) else " --model FOLDER"
    measure = f"oscar-zoo eval {quote(path_text(folder))}{model}"
    imported = made.manifest.provenance.kind == "imported"
    made = replace(made, accepted=_checked_quality(made, params, measure, imported=imported))
    made = (made if key is None else made.signed(key)).with_report(folder, observer)
    wanted = partial(publish_on, create=params.create, propose=params.create_pr)
    write = partial(wanted, made=made, dry_run=params.dry_run)
    done, error = changes.write_to_each(hubs, write, "Publishing to", observer)
    asked = any(one.task.startswith("gpqa") and one.reporter == "measured" for one in made.scores)
    could_answer = not (asked or imported or made.accepted)
    if error is None and could_answer and _is_large(made.manifest.model.geometry):
        text = f"no GPQA was measured, which is recommended: {measure} --task gpqa_diamond"
        observer.note(Note("publish.gpqa", text))
    return PublishReport(done, error)


@shows(PublishParams)
def publish(
    folder: str | Path, *, hub: str | None = None, propose: bool = False, **options: Any
) -> PublishResult:
    """Verify an artifact folder strictly and publish it as a version that never changes.

    Args:
        hub: where to; default the zoo of this user.
        propose: open a pull request instead.
        options: of `oscar-zoo publish`. With `dry_run`, `result.plan` says what would be sent.

    Raises:
        UsageError: perplexity or recall was not measured under the recipe, or is poor.
        VersionExists: the version exists with other content.
        VerificationFailed: the artifact must not be used.
        NetworkError: no answer; publishing the same again is safe.
    """
    given = {"folder": folder, "hubs": (hub,) if hub else (), "create_pr": propose}
    return run(checked(PublishParams, given | options)).hubs[0]


def _verify(
    name: str, files: Mapping[str, bytes], manifest: Manifest, *, allow_warnings: bool
) -> Verified:
    recipe = recipe_for(manifest.artifact_id.model)
    outcome = verify_files(
        {file: data for file, data in files.items() if file != FILE_NAME},
        manifest=manifest,
        geometry=recipe.geometry if recipe else None,
        name_hint=str(manifest.artifact_id),
        strict=True,
    )
    if not isinstance(outcome, Verified):
        refuse(name, outcome)
    if outcome.warnings and not allow_warnings:
        raise UsageError(
            f"{name} passes every check, with warnings: {', '.join(outcome.warnings)}.",
            hint=f"oscar-zoo verify --strict {quote(name)} explains them; to publish it anyway:"
            " --allow-warnings",
        )
    return outcome


def _check_aliases(aliases: Sequence[str], artifact: ArtifactId) -> None:
    for alias in aliases:
        reference, recipe = Reference.parse(alias), recipe_for(alias)
        if reference.tag is not None or reference.digest is not None:
            raise UsageError(
                f"{alias!r} is not a plain name.", hint="an alias has no tag and no digest"
            )
        if recipe is not None and recipe.name.casefold() != artifact.model.casefold():
            raise UsageError(
                f"the alias {alias!r} is a name of {recipe.name}.", hint="choose another alias"
            )


def _checked_quality(
    made: Publishable, params: PublishParams, measure: str, *, imported: bool
) -> tuple[Accepted, ...]:
    """Refuse what was not measured under its recipe, or is poor; what was accepted of that. An
    artifact that is somebody else's cannot be asked for measurements."""
    said = (Measured.of(made.manifest), Measured.of_scores(made.scores))
    figures = [one for one in said if one is not None]
    has_rise = any(one.change_percent is not None for one in figures)
    has_recall = any(one.recall is not None for one in figures)
    tasks = (("perplexity", has_rise), ("recall", has_recall))
    missing = [task for task, measured in tasks if not measured]
    name, accepted = made.id.reference, list[Accepted]()
    if missing and not imported:
        if not params.unmeasured:
            only = "" if len(missing) > 1 else f" --task {missing[0]}"
            raise UsageError(
                f"nobody measured the {' and '.join(missing)} of {name} under its recipe.",
                hint=f"{measure}{only} measures it; to publish it anyway: --unmeasured",
            )
        accepted.append("unmeasured")
    if poor := [one.poor for one in figures if one.poor]:
        if not params.allow_poor:
            raise UsageError(
                f"{name} {poor[0]}.",
                hint="let oscar-zoo compute choose the method, with more text; to publish it"
                " anyway: --allow-poor, which the index will say",
            )
        accepted.append("poor")
    return tuple(accepted)


def _is_large(geometry: Geometry) -> bool:
    """Whether a benchmark's questions say something of such a model, which has about twelve numbers
    for every layer and pair of channels."""
    channels = geometry.num_q_heads * geometry.head_dim
    return 12 * geometry.num_layers * channels**2 >= _LEAST_PARAMETERS


def publish_on(
    hub: Hub,
    made: Publishable,
    *,
    propose: bool = False,
    dry_run: bool = False,
    create: bool = False,
) -> PublishResult:
    """Publish a verified artifact on `hub`; with `propose` in a pull request, without a tag."""
    version = changes.Version.of(made.id, made.files)
    change = partial(
        changes.placed,
        version=version,
        files={**made.files, **made.beside},
        aliases=made.aliases,
        scores=made.scores,
        accepted=made.accepted,
        propose=propose,
    )
    if dry_run:
        state = changes.read_state(hub, create=create, dry_run=True)
        made_change = change(state)
    else:
        made_change, commit, state = changes.apply_change(hub, change, create=create)
    already = made_change is None or made_change.artifact is None
    entry = state.index.entry(version.id)
    adds = entry is not None and merged(entry.scores, made.scores) != entry.scores
    about = hub.name, version.id, version.digest, already, made.verified
    result = PublishResult(*about, scores_updated=already and adds)
    if dry_run:
        tag = None if propose else changes.tag_name(hub, version.id)
        return replace(result, plan=_plan(made_change, tag, state))
    if propose:
        where = commit.revision if already else None
        return replace(result, revision=where, proposal=commit.proposal)
    if not already:
        changes.check_arrived(hub, version, made.beside)
    tag, failed = changes.put_tag(hub, version, commit.revision)
    told = [failed, _not_signed(hub, made) if already else None]
    if is_damaged(state.card):
        markers = f"{BEGIN.decode()} and {END.decode()}"
        told.append(f"{CARD_NAME} was left as it is: its lines {markers} do not match.")
    warnings = tuple(text for text in told if text)
    return replace(result, revision=commit.revision, tag=tag, warnings=warnings)


def _plan(change: Change | None, tag: str | None, state: changes.HubState) -> PublishPlan:
    serial = state.index.serial
    if change is None:
        return PublishPlan((), None, None, tag, serial)
    files = tuple(sorted(file_digest(path, data) for path, data in change.paths.items()))
    if (data := change.root.get(INDEX_NAME)) is not None:
        serial = Index.from_bytes(data).serial
    return PublishPlan(files, change.message, change.parent, tag, serial)


def _not_signed(hub: Hub, made: Publishable) -> str | None:
    if made.signature is None:
        return None
    listed = {file.path: file.size for file in hub.files(made.id)}.get(SIGNATURE_NAME)
    seen = "without a signature" if listed is None else "with another signature"
    same_size = listed == len(made.signature)
    if same_size and hub.fetch(made.id, SIGNATURE_NAME, limit=listed or 0) == made.signature:
        return None
    never = "and a published version never changes: publish it under another tag to sign it."
    return f"{made.id} was published {seen}, {never}"
