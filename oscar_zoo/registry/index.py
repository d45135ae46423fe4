"""The index `oscar-zoo.index/1`: what a hub says about its artifacts, one `index.json` in its root.

The index is the mutable part of the registry: status, scores, aliases and places beside the digest
they belong to. Its `serial` only grows, so that a reader notices when a hub goes back. The bytes of
an artifact are named by its digest alone; nothing in the index can change what a digest means.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, Literal, Self

from pydantic import Field, model_validator

from oscar_zoo.artifact.manifest import FormatVersion, HubLocation, HubScheme, Manifest, Status
from oscar_zoo.artifact.names import ArtifactId, Reference
from oscar_zoo.artifact.specs import Document, Hex64, ModelId, Score, Spec, Text
from oscar_zoo.errors import UsageError
from oscar_zoo.registry.catalog import Payload
from oscar_zoo.registry.hubs.base import INDEX_NAME, MAX_ROOT_BYTES
from oscar_zoo.registry.measured import Measured

SCHEMA: Final = "oscar-zoo.index/1"


Accepted = Literal["poor", "unmeasured"]
"""What was published in spite of the quality gate: poor beside BF16, or not measured."""
ACCEPTED: Final[Mapping[Accepted, str]] = {
    "poor": "was published although its perplexity or recall is poor beside BF16",
    "unmeasured": "was published without measurements of perplexity and recall",
}
"""What to say of such an artifact, behind its name."""


class Summary(Spec):
    """What listings show without fetching `oscar.json`, copied from it; the manifest stays the
    truth."""

    method: Text | None = None
    format_version: FormatVersion | None = None
    bits_per_element: Annotated[float, Field(gt=0, le=32)] | None = None
    license: Text | None = None
    measured: Measured | None = None

    @classmethod
    def of(cls, manifest: Manifest) -> Self:
        return cls(
            method=manifest.fit.method,
            format_version=manifest.format_version,
            bits_per_element=manifest.bits_per_element,
            license=manifest.license.artifact,
            measured=Measured.of(manifest),
        )


class Listed(Payload):
    manifest_sha256: Hex64 | None


class IndexEntry(Listed):
    """An artifact of a hub: the hub id of its base model where somebody says it, facts for listings
    where it has a manifest, and pinned places of copies on other hubs."""

    model: ModelId | None
    summary: Summary | None = None
    aliases: tuple[Text, ...] = ()
    status: Status = Status()
    scores: tuple[Score, ...] = ()
    accepted: tuple[Accepted, ...] = ()
    hubs: dict[HubScheme, HubLocation] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        paths = [file.path.casefold() for file in self.files]
        if len(set(paths)) != len(paths):
            raise ValueError("file paths must be unique")
        for alias in map(Reference.parse, self.aliases):
            if alias.tag is not None or alias.digest is not None:
                raise ValueError(f"the alias {alias} is not a plain name")
        return self


class Index(Document):
    """All artifacts of a hub, sorted by id without case, which is unique."""

    NAME, CODE, MAX_BYTES = INDEX_NAME, "index", MAX_ROOT_BYTES
    REMEDY = "restore it from a backup or a mirror, or ask the owner of the hub to"
    schema_: Literal["oscar-zoo.index/1"] = Field(alias="schema")
    serial: Annotated[int, Field(ge=0, lt=1 << 53)]
    artifacts: tuple[IndexEntry, ...]

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        keys = [entry.artifact_id.key for entry in self.artifacts]
        if keys != sorted(set(keys)):
            raise ValueError("artifacts must be sorted by id and unique without case")
        _check_aliases(self.artifacts)
        return self

    @classmethod
    def empty(cls) -> Self:
        return cls(schema=SCHEMA, serial=0, artifacts=())

    def entry(self, artifact: ArtifactId) -> IndexEntry | None:
        found = (entry for entry in self.artifacts if entry.artifact_id.key == artifact.key)
        return next(found, None)

    def aliased(self, name: str) -> tuple[IndexEntry, ...]:
        key = name.casefold()
        return tuple(e for e in self.artifacts if key in {alias.casefold() for alias in e.aliases})

    def with_entry(self, entry: IndexEntry) -> Self:
        """The next index, `serial` + 1, in which `entry` is new or replaces its id."""
        key = entry.artifact_id.key
        others = [other for other in self.artifacts if other.artifact_id.key != key]
        artifacts = tuple(sorted([*others, entry], key=lambda e: e.artifact_id.key))
        try:
            _check_aliases(artifacts)
        except ValueError as error:
            raise UsageError(f"{error}.", hint="choose another alias") from None
        return type(self)(schema=SCHEMA, serial=self.serial + 1, artifacts=artifacts)

    def to_json(self) -> dict[str, Any]:
        value = super().to_json()
        for entry in value["artifacts"]:  # readers of before these keys refuse them
            if entry["summary"] is not None and entry["summary"]["measured"] is None:
                del entry["summary"]["measured"]
            if not entry["accepted"]:
                del entry["accepted"]
        return value


def _check_aliases(entries: Sequence[IndexEntry]) -> None:
    models: dict[str, set[str]] = {}
    for entry in entries:
        for name in (entry.artifact_id.model, entry.model):
            if name is not None:
                models.setdefault(name.casefold(), set()).add(entry.artifact_id.model.casefold())
    owners: dict[str, str] = {}
    for entry in entries:
        for alias in entry.aliases:
            key = alias.casefold()
            if owners.setdefault(key, entry.id) != entry.id:
                raise ValueError(f"the alias {alias!r} names both {owners[key]} and {entry.id}")
            if models.get(key, set()) - {entry.artifact_id.model.casefold()}:
                raise ValueError(f"the alias {alias!r} of {entry.id} is the name of another model")
