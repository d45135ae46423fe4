"""An artifact folder that may be published: read once, verified strictly, with its aliases."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from shlex import quote

from oscar_zoo.artifact.artifact_folder import read_folder, read_signature
from oscar_zoo.artifact.manifest import FILE_NAME, REPORT_NAME, SIGNATURE_NAME, Manifest
from oscar_zoo.artifact.names import ArtifactId, Reference, path_text
from oscar_zoo.artifact.outcome import Verified, refuse
from oscar_zoo.artifact.specs import Score
from oscar_zoo.artifact.verify import verify_files
from oscar_zoo.errors import PathNotFound, UsageError
from oscar_zoo.registry import signing_key
from oscar_zoo.registry.attach_scores import check_same
from oscar_zoo.registry.catalog import Catalog
from oscar_zoo.registry.index import Accepted
from oscar_zoo.registry.score_file import ScoreFile
from oscar_zoo.registry.score_history import merged
from oscar_zoo.registry.signatures import KnownKey, KnownKeys, check_signature, sign
from oscar_zoo.registry.signing_key import SigningKey


@dataclass(frozen=True)
class Publishable:
    """An artifact as it goes to every hub, whatever happens to its folder later.

    Attributes:
        id: of the artifact.
        files: payload files and `oscar.json`, by their names.
        verified: the outcome of verification.
        aliases: other names of exactly this artifact.
        scores: claims about it that go to the index with it.
        accepted: what it is published in spite of; see `quality_gate`.
        signature: its signature file, or `None`.
        report: the page about its fit, or `None`.
    """

    id: ArtifactId
    files: Mapping[str, bytes]
    verified: Verified
    aliases: tuple[str, ...] = ()
    scores: tuple[Score, ...] = ()
    accepted: tuple[Accepted, ...] = ()
    signature: bytes | None = None
    report: bytes | None = None

    @property
    def beside(self) -> dict[str, bytes]:
        """Files that go along and are neither payload nor manifest."""
        files = {SIGNATURE_NAME: self.signature, REPORT_NAME: self.report}
        return {name: data for name, data in files.items() if data is not None}

    @classmethod
    def read(
        cls,
        folder: Path,
        *,
        artifact_id: ArtifactId | None = None,
        catalog: Catalog | None = None,
        allow_warnings: bool = False,
        aliases: Sequence[str] = (),
    ) -> Publishable:
        """Read the artifact in `folder` and verify it strictly.

        Args:
            artifact_id: the id the caller expects; it must be the manifest's.
            catalog: recipes that know the geometry of models; default the packaged ones.
        """
        name = path_text(folder)
        if not folder.is_dir():
            raise PathNotFound.for_path(name, "folder")
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
        catalog = catalog or Catalog.packaged()
        names = _aliases(aliases, manifest.artifact_id, catalog)
        verified = _verify(name, files, manifest, artifact_id, catalog, allow_warnings)
        signature = _own_signature(name, read_signature(folder.resolve()), files)
        return cls(manifest.artifact_id, files, verified, names, signature=signature)

    @property
    def manifest(self) -> Manifest:
        """`oscar.json`, parsed."""
        assert self.verified.manifest is not None  # a folder without one is refused
        return self.verified.manifest

    def with_scores(self, file: ScoreFile, *, what: str) -> Publishable:
        """The same, with the scores of `file` added to those it has.

        Args:
            file: scores of exactly these bytes.
        """
        check_same(file, self.id, self.verified.digest, what=what, where="the folder")
        return replace(self, scores=merged(self.scores, file.scores))

    def signed(self, key: SigningKey) -> Publishable:
        """The same, signed with `key`; a signature by this key stays as it is."""
        mark = signing_key.fingerprint(key.public)
        known = KnownKeys((KnownKey(mark, "", key.public),))
        if check_signature(self.signature, self.files, known).state == "valid":
            return self
        return replace(self, signature=sign(str(self.id), self.files, key))


def _own_signature(name: str, data: bytes | None, files: Mapping[str, bytes]) -> bytes | None:
    """The signature file of a folder, which goes along; raises `UsageError` where it is of other
    files."""
    report = check_signature(data, files, KnownKeys())
    if report.state == "invalid":
        raise UsageError(
            f"{name} {report.message}.", hint=f"remove it: rm {quote(f'{name}/{SIGNATURE_NAME}')}"
        )
    return data


def _verify(
    name: str,
    files: Mapping[str, bytes],
    manifest: Manifest,
    artifact_id: ArtifactId | None,
    catalog: Catalog,
    allow_warnings: bool,
) -> Verified:
    identity = manifest.artifact_id
    if artifact_id is not None and artifact_id != identity:
        raise UsageError(
            f"{name} is {identity}, not {artifact_id}.",
            hint=f"the id is part of {FILE_NAME}, which never changes",
        )
    recipe = catalog.recipe(identity.model)
    outcome = verify_files(
        {file: data for file, data in files.items() if file != FILE_NAME},
        manifest=manifest,
        geometry=recipe.geometry if recipe else None,
        name_hint=str(identity),
        strict=True,
    )
    if not isinstance(outcome, Verified):
        refuse(name, outcome)
    if outcome.warnings and not allow_warnings:
        raise UsageError(
            f"{name} passes every check, with warnings: {', '.join(outcome.warnings)}.",
            hint=(
                f"oscar-zoo verify --strict {quote(name)} explains them; "
                "to publish it anyway: --allow-warnings"
            ),
        )
    return outcome


def _aliases(aliases: Sequence[str], artifact: ArtifactId, catalog: Catalog) -> tuple[str, ...]:
    for alias in aliases:
        reference, recipe = Reference.parse(alias), catalog.recipe(alias)
        if reference.tag is not None or reference.digest is not None:
            raise UsageError(
                f"{alias!r} is not a plain name.", hint="an alias has no tag and no digest"
            )
        if recipe is not None and recipe.name.casefold() != artifact.model.casefold():
            raise UsageError(
                f"the alias {alias!r} is a name of {recipe.name}.", hint="choose another alias"
            )
    return tuple(aliases)
