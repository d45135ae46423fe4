"""What the outputs of several verbs say in the same words: their JSON and its schema.

A model that stands in them as it stands in files has its definition in `docs/schemas/write.py`,
which takes the place of `x-ref`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, InstanceOf, PlainSerializer, WithJsonSchema
from typing_extensions import TypedDict

from oscar_zoo.artifact import manifest, specs
from oscar_zoo.artifact.names import ArtifactId
from oscar_zoo.artifact.outcome import Digest, says
from oscar_zoo.errors import OscarZooError
from oscar_zoo.registry import measured
from oscar_zoo.registry.entries import Entry
from oscar_zoo.registry.store import Record

if TYPE_CHECKING:  # most verbs of the zoo do not ask for shapes
    from oscar_zoo.serving.memory import Needs


Unreachable = Annotated[
    tuple[InstanceOf[OscarZooError], ...],
    PlainSerializer(lambda errors: [one.message for one in errors], return_type=list[str]),
    Field(serialization_alias="notes", description="What hubs said that did not answer."),
]
Warnings = Annotated[tuple[str, ...], says("Sentences for people.")]
Name = Annotated[
    ArtifactId,
    PlainSerializer(str, return_type=str),
    Field(description="Name of one version of an artifact: MODEL/TAG."),
]
Size = Annotated[int, Field(ge=0)]
State = Annotated[
    Literal["active", "deprecated", "yanked"],
    says("Of a version: deprecated is advised against, yanked is no longer found by name."),
]
# Inside of `InstanceOf`, since an annotation would change the schema of the model itself.
Manifest = Annotated[
    InstanceOf[manifest.Manifest],
    PlainSerializer(manifest.Manifest.to_json),
    WithJsonSchema({"x-ref": "Manifest"}),
]
Status = Annotated[InstanceOf[manifest.Status], WithJsonSchema({"x-ref": "Status"})]
Score = Annotated[InstanceOf[specs.Score], WithJsonSchema({"x-ref": "Score"})]
Measured = Annotated[InstanceOf[measured.Measured], WithJsonSchema({"x-ref": "Measured"})]
MeasuredFacts = Annotated[Mapping[str, Any], WithJsonSchema({"x-ref": "Measured"})]
"""The same as plain JSON values."""


class ScoreSummary(TypedDict):
    """The main facts of one score."""

    task: Annotated[str, says("What was measured, such as gpqa_diamond.")]
    metric: Annotated[str, says("Such as accuracy.")]
    value: Annotated[
        float | None,
        says("Of the metric, in the unit; null where a source names the task without a number."),
    ]
    unit: Annotated[str, says("Such as percent.")]
    kv_dtype: Annotated[Literal["bf16", "int2", "fp8"], says("Type of the cache.")]
    stderr: Annotated[float | None, says("Standard error of the value, in its unit.")]
    baseline: Annotated[float | None, says("The same with a BF16 cache, from the same run.")]
    reporter: Annotated[
        Literal["upstream", "third_party", "measured"],
        says("Who says so; measured means with this tool."),
    ]
    recipe_changes: Annotated[
        Mapping[str, str], says("Settings that were not those of the recipe.")
    ]


class StoredArtifact(TypedDict):
    """An artifact in the local store."""

    id: Name
    reference: Annotated[str, says("The name as it is typed: MODEL:TAG.")]
    digest: Digest
    bytes: Annotated[Size, says("Of all files.")]
    source: Annotated[str, says("The hub that it came from.")]
    revision: Annotated[str | None, says("Commit of the hub; null where the hub has none.")]
    fetched: Annotated[str, says("When, in UTC.", json_schema_extra={"format": "date-time"})]
    path: Annotated[Path, says("Its folder.")]


def stored_artifact(record: Record) -> StoredArtifact:
    return {
        "id": record.id,
        "reference": record.id.reference,
        "digest": record.digest,
        "bytes": sum(file.size for file in record.files),
        "source": record.source,
        "revision": record.revision,
        "fetched": record.fetched,
        "path": record.path,
    }


def needs_of_entry(entry: Entry) -> Needs | None:
    """What a model needs as far as recipe and manifest say it, the same on every machine."""
    from oscar_zoo.serving.memory import needs_of_manifest, needs_of_recipe

    if entry.recipe is not None:
        return needs_of_recipe(entry.recipe)
    return needs_of_manifest(entry.manifest) if entry.manifest else None
