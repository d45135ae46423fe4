"""Digests of rotation files that somebody has seen in a public place, shipped with the package.

The packaged manifests describe what the authors list; their checksums stay null until somebody has
seen those files. Other files lie on branches of the authors' repository without a manifest. What
was seen there is kept here with its source, so that a hub cannot offer other bytes under the same
name without an error.
"""

from __future__ import annotations

from functools import cache
from importlib import resources
from typing import Annotated, Final, Literal, Self

from pydantic import Field, model_validator

from oscar_zoo.artifact import strict_json
from oscar_zoo.artifact.files import FileDigest, artifact_digest
from oscar_zoo.artifact.names import ArtifactId
from oscar_zoo.artifact.specs import Digest, Hex40, Spec, Text, validated
from oscar_zoo.errors import malformed_hint
from oscar_zoo.registry.payload_file import PayloadFile

FILE_NAME: Final = "known_digests.json"
"""Name of the file in the package `oscar_zoo.manifests`."""


class Seen(Spec):
    """Where files were seen.

    Attributes:
        repository: `ORG/NAME` of a public git repository.
        branch: that has the files.
        commit: of it.
        path: folder of the files there.
        remark: what a person should know, such as a tag that is not the authors'.
    """

    repository: Text
    branch: Text
    commit: Hex40
    path: Text
    remark: Text | None = None


class KnownDigest(Spec):
    """The payload of one artifact as it was seen.

    Attributes:
        id: `<Model>/<tag>`, as a hub would list it.
        digest: of `files`.
        files: payload files.
        seen: the source.
    """

    id: Text
    digest: Digest
    files: Annotated[tuple[PayloadFile, ...], Field(min_length=1)]
    seen: Seen

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        ArtifactId.parse(self.id)
        if artifact_digest(self.file_digests) != self.digest:
            raise ValueError(f"the digest of {self.id} is {artifact_digest(self.file_digests)}")
        return self

    @property
    def file_digests(self) -> tuple[FileDigest, ...]:
        """The payload, sorted by path."""
        return tuple(sorted(FileDigest(file.path, file.sha256, file.size) for file in self.files))


class KnownDigests(Spec):
    """All of them, sorted by id without case, which is unique."""

    schema_: Literal["oscar-zoo.known-digests/1"] = Field(alias="schema")
    artifacts: tuple[KnownDigest, ...]

    @model_validator(mode="after")
    def _sorted(self) -> Self:
        keys = [ArtifactId.parse(known.id).key for known in self.artifacts]
        if keys != sorted(set(keys)):
            raise ValueError("artifacts must be sorted by id and unique without case")
        return self

    @classmethod
    @malformed_hint("install oscar-zoo again")
    def from_bytes(cls, data: bytes, *, what: str = FILE_NAME) -> Self:
        """Parse the file; raises `MalformedFile`."""
        value = strict_json.loads(data, what=what)
        return validated(cls, value, code="known_digests.schema", what=what)

    def to_bytes(self) -> bytes:
        """The file form: sorted keys, one space of indent, final newline."""
        return strict_json.pretty_bytes(self.model_dump(mode="json", by_alias=True))

    def of(self, artifact: ArtifactId) -> KnownDigest | None:
        """What was seen of `artifact` (any case), or `None`."""
        found = (one for one in self.artifacts if ArtifactId.parse(one.id).key == artifact.key)
        return next(found, None)


@cache
def packaged_digests() -> KnownDigests:
    """Those of the installed package, read once per process."""
    data = (resources.files("oscar_zoo.manifests") / FILE_NAME).read_bytes()
    return KnownDigests.from_bytes(data)
