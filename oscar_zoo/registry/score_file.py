"""A score file `oscar-zoo.scores/1`: scores of one artifact, measured or reported, on their way to
the index of a hub.

`eval` writes it, `scores add` and `publish --scores` read it. It names the digest of the artifact,
so that a score never gets to other bytes.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal, Self

from pydantic import Field, model_validator

from oscar_zoo.artifact import strict_json
from oscar_zoo.artifact.names import ArtifactId
from oscar_zoo.artifact.specs import Digest, Score, Spec, Text, validated
from oscar_zoo.errors import InvalidName, MalformedFile, malformed_hint
from oscar_zoo.registry import score_rules

SCHEMA: Final = "oscar-zoo.scores/1"
FILE_NAME: Final = "scores.json"
"""Name of the file beside the `oscar.json` of an artifact folder."""


class ScoreFile(Spec):
    """Scores of one artifact.

    Attributes:
        artifact: `<Model>/<tag>`.
        digest: of its payload.
        scores: at most one about the same thing by the same reporter; those of an INT2 cache carry
            their BF16 baseline.
    """

    schema_: Literal["oscar-zoo.scores/1"] = Field(alias="schema")
    artifact: Text
    digest: Digest
    scores: Annotated[tuple[Score, ...], Field(min_length=1, max_length=1000)]

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        try:
            ArtifactId.parse(self.artifact)
        except InvalidName as error:
            raise ValueError(error.message) from None
        seen = set()
        for score in self.scores:
            if score_rules.key(score) in seen:
                raise ValueError(f"{score.task} ({score.kv_dtype}) is there twice")
            seen.add(score_rules.key(score))
            for fault in score_rules.faults(score, self.digest):
                raise ValueError(fault)
        return self

    @classmethod
    def of(cls, artifact: ArtifactId, digest: str, scores: tuple[Score, ...]) -> Self:
        """The file that attaches `scores` to the artifact."""
        return cls(schema=SCHEMA, artifact=str(artifact), digest=digest, scores=scores)

    @property
    def artifact_id(self) -> ArtifactId:
        """`artifact`, parsed."""
        return ArtifactId.parse(self.artifact)

    def to_bytes(self) -> bytes:
        """The file form: sorted keys, one space of indent, final newline."""
        return strict_json.pretty_bytes(self.model_dump(mode="json", by_alias=True))

    @classmethod
    @malformed_hint("measure again with `oscar-zoo eval`, or fetch it again")
    def from_bytes(cls, data: bytes, *, what: str = FILE_NAME) -> Self:
        """Parse an untrusted score file.

        Args:
            data: the whole file.
        """
        value = strict_json.loads(data, what=what)
        if type(value) is not dict:
            raise MalformedFile("scores.schema", f"{what} is not a JSON object.")
        if value.get("schema") != SCHEMA:
            raise MalformedFile(
                "scores.version",
                f"{what} has schema {str(value.get('schema'))[:60]!r}, not {SCHEMA}.",
                hint="a score file is what oscar-zoo eval writes",
            )
        return validated(cls, value, code="scores.schema", what=what)
