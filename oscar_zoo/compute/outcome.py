"""What the verbs compute, fit, merge-moments and plot give: names, order and words of their JSON
are those of the fields."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import Field, PlainSerializer, WithJsonSchema

from oscar_zoo.artifact.names import typed
from oscar_zoo.artifact.outcome import HIDDEN, Digest, Sha256, says
from oscar_zoo.registry.measured import Measured

if TYPE_CHECKING:  # most need torch, and a merge of files does not
    from oscar_zoo.artifact.manifest import Manifest
    from oscar_zoo.artifact.outcome import Verified
    from oscar_zoo.compute.report.data import ReportData
    from oscar_zoo.compute.select.decision import Choice, WidthChoice
else:
    Choice = Manifest = ReportData = Verified = WidthChoice = Any

Typed = Annotated[Path, PlainSerializer(typed, return_type=str), WithJsonSchema({"type": "string"})]
Notes = Annotated[tuple[str, ...], says("Remarks for people.")]
NotNegative = Annotated[float, Field(ge=0)]
Size = Annotated[int, Field(ge=0)]


@dataclass(frozen=True, kw_only=True)
class Made:
    """An artifact that was written, and the main facts of its manifest."""

    path: Annotated[Typed, says("The folder of the artifact, as it is typed.")]
    manifest: Annotated[Manifest, *HIDDEN]
    id: Annotated[
        str, says("Name of one version of an artifact: MODEL/TAG.", pattern="^[^/]+/[^/]+$")
    ]
    model: Annotated[str, says("The part of the name before the tag.")]
    tag: Annotated[str, says("The calibration tag.")]
    format_version: Annotated[int | None, says("Format of the rotation files.", ge=0)]
    method: Annotated[str, says("How the rotation was made, such as oscar.")]
    bits_per_element: Annotated[
        float | None, says("Stored bits per cached element; scales, offsets and rotary keys count.")
    ]
    digest: Digest | None
    measured: Annotated[
        Measured | None,
        says("Perplexity and recall beside BF16; null where they were not measured."),
    ]
    state: Literal["active"] = "active"
    scores: Annotated[tuple[Any, ...], says("Of hubs: none yet.", max_length=0)] = ()

    @classmethod
    def of(cls, path: Path, manifest: Manifest, **more: Any) -> Self:
        """The artifact in `path`."""
        name = manifest.artifact_id
        return cls(
            path=path,
            manifest=manifest,
            id=str(name),
            model=name.model,
            tag=name.tag,
            format_version=manifest.format_version,
            method=manifest.fit.method,
            bits_per_element=manifest.bits_per_element,
            digest=manifest.digest,
            measured=Measured.of(manifest),
            **more,
        )


@dataclass(frozen=True, kw_only=True)
class ComputeResult(Made):
    """A finished artifact, its moments and its report."""

    verified: Annotated[Verified, *HIDDEN]
    notes: Notes
    seconds: Annotated[
        dict[str, NotNegative],
        says("Duration by phase: load, capture, fit (with choice and verification), write."),
    ]
    moments: Annotated[Typed | None, says("The file for another fit without the model.")]
    report: Annotated[
        Typed | None, says("The report beside the artifact; null where it was not drawn.")
    ]
    selection: Annotated[
        dict[str, Any] | None,
        says("How auto chose, as in fit.selection of the manifest; null where it did not."),
    ]
    quality: Annotated[
        dict[str, Any] | None,
        says("Results of the gates, as in the manifest; keys depend on the method."),
    ]
    choice: Annotated[Choice | None, *HIDDEN] = None
    widths: Annotated[WidthChoice | None, *HIDDEN] = None
    schema: Literal["oscar-zoo.compute/1"] = "oscar-zoo.compute/1"


@dataclass(frozen=True, kw_only=True)
class FitResult(Made):
    """An artifact that was fitted to moments."""

    schema: Literal["oscar-zoo.fit/1"] = "oscar-zoo.fit/1"


@dataclass(frozen=True)
class MergeResult:
    """A moments file that was written."""

    path: Annotated[Typed, says("The file, as it is typed.")]
    size: Annotated[Size, says("Bytes of the file.")]
    sha256: Sha256
    tokens: Annotated[Size, says("Tokens of all sequences in it.")]
    notes: Notes
    schema: Literal["oscar-zoo.merge/1"] = "oscar-zoo.merge/1"


@dataclass(frozen=True)
class Drawn:
    """A report that was drawn."""

    source: Annotated[Typed, says("The file with the numbers.")]
    path: Annotated[Typed, says("The page or picture.")]
    data: Annotated[
        ReportData,
        Field(serialization_alias="report"),
        PlainSerializer(lambda one: one.to_json()),
        WithJsonSchema({"x-ref": "ReportData"}),
    ]
    schema: Literal["oscar-zoo.plot/1"] = "oscar-zoo.plot/1"
