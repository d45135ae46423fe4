"""The manifest: what an artifact is, where it came from, how to serve it.

Its schema is `oscar-zoo.manifest/1`, or `oscar-zoo.manifest/2` where the recipe has widths, which
older releases cannot serve, or `oscar-zoo.manifest/3` for latents (MLA), which they do not know.
With widths the payload has a file `widths.json` that says the same, so that the digest covers the
widths, and a manifest that says something else is none.

A manifest has two parts. `oscar.json` beside the payload is immutable. The `registry` block
(status, scores, aliases, hubs) is mutable; it occurs only in packaged manifests and indexes, never
in `oscar.json`. A field that is not known is null and shown as "not reported". Checksums are never
invented, so `digest` and the files' `sha256` and `size` are null in packaged manifests of artifacts
that were never pulled.
"""

from __future__ import annotations

from dataclasses import astuple
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from oscar_zoo.artifact.files import FileDigest, artifact_digest, file_digest
from oscar_zoo.artifact.names import ArtifactId, check_part
from oscar_zoo.artifact.specs import (
    Count,
    Digest,
    Document,
    Geometry,
    Harness,
    Hex40,
    Hex64,
    ModelId,
    Rope,
    Score,
    ServingRecipe,
    Spec,
    StatisticName,
    Text,
)
from oscar_zoo.errors import MalformedFile

Schema = Literal["oscar-zoo.manifest/1", "oscar-zoo.manifest/2", "oscar-zoo.manifest/3"]
SCHEMA: Schema = "oscar-zoo.manifest/1"
WITH_WIDTHS: Schema = "oscar-zoo.manifest/2"
OF_LATENTS: Schema = "oscar-zoo.manifest/3"
FILE_NAME = "oscar.json"
SIGNATURE_NAME = "model.sig"
"""The signature beside the manifest; see `signature_file`."""
REPORT_NAME = "report.html"
"""The report of the fit beside the manifest on a hub: for people, in no digest and signature."""
STATISTICS_NAME = "statistics.safetensors"
WIDTHS_NAME = "widths.json"
"""Payload file with the widths of the recipe, where it has any."""
SUFFIX = ".pt"
"""Suffix of the names of rotation files."""
MAX_PARTS = 4
"""Most parts of a payload file's path: its folders and its name."""

FileRole = Literal[
    "k_rotation", "v_rotation", "statistics", "widths", "moments", "latent_rotation", "gguf"
]
Sha256OfFile = Hex64
FormatVersion = Annotated[int, Field(ge=1, le=3)]
"""Formats of rotation files that are read; `formats` says what each one holds."""
HubScheme = Literal["hf", "ms"]
"""Hubs whose copies manifests and indexes name; anything else in untrusted bytes is refused."""


class CompatibleModel(Spec):
    """Another checkpoint the artifact may be served with, and on what evidence."""

    id: ModelId
    revision: Hex40 | None = None
    evidence: Literal["measured", "claimed"]
    score_ref: Text | None = None


class WeightsInfo(Spec):
    """How the base model's weights are stored."""

    dtype: Text
    quantization: Text | None = None


class ModelBlock(Geometry):
    """The base model: identity, geometry, and what decides folding."""

    id: ModelId
    revision: Hex40 | None
    config_sha256: Hex64 | None
    kv_share: dict[str, int] | None = None
    rope: Rope | None
    qk_norm: bool | None
    output_gate: bool | None
    weights: WeightsInfo | None
    compatible_with: tuple[CompatibleModel, ...]

    @property
    def geometry(self) -> Geometry:
        return Geometry(**{name: getattr(self, name) for name in Geometry.model_fields})


class Estimator(Spec):
    """The matrix that a fit targets, by versioned id such as `qqt/1`, because the paper and its
    code differ."""

    id: Text
    revision: Text | None = None
    source_commit: Text | None = None
    params: dict[str, float | int | str | bool] = Field(default_factory=dict)


class Estimators(Spec):
    """Estimators of both sides."""

    k: Estimator
    v: Estimator


class Composition(Spec):
    """How the eigenvectors became a rotation."""

    id: Text
    hadamard: Text | None = None
    permutation: Text | None = None
    signs: Text | None = None


class LengthStats(Spec):
    """Sequence lengths in tokens."""

    min: Count
    median: Count
    max: Count


class Disjoint(Spec):
    """An evaluation set proven disjoint from the calibration data, and how."""

    dataset: Text
    method: Text


class Calibration(Spec):
    """The tokens that a fit saw; `prompts_sha256` covers the compact JSON list of token-id
    lists."""

    dataset: Text | None
    revision: Text | None
    split: Text | None
    license: Text | None
    prompts_sha256: Hex64 | None
    sequences: Count | None
    tokens_requested: Count | None
    tokens_used: Count | None
    length: LengthStats | None
    content: Literal["prefill", "generated", "mixed"] | None
    chat_template: bool | None
    seed: int | None
    disjoint_from: tuple[Disjoint, ...] | None
    overlaps_with: tuple[Text, ...]


class Coverage(Spec):
    """Layers and heads really observed."""

    layers: Count
    q_heads: Count
    kv_heads: Count
    tokens_min: Count
    tokens_max: Count
    tp: Count = 1
    pp: Count = 1
    dp: Count = 1


class Numerics(Spec):
    """Reproducibility class of the fit."""

    forward_dtype: Text
    accumulate: Text
    engine: Harness
    device: Text


class MomentsFile(Spec):
    """Where the refit source is."""

    sha256: Hex64
    size: Count
    location: Text


class Fit(Spec):
    """How the matrices were made. All except `method` may be unknown for imported artifacts."""

    method: Text
    fit_id: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")] | None
    estimator: Estimators | None
    composition: Composition | None
    calibration: Calibration | None
    coverage: Coverage | None
    numerics: Numerics | None
    moments: MomentsFile | None = None
    selection: dict[str, Any] | None = None


class SideTransform(Spec):
    """Transform of one side as the files declare it."""

    name: Text
    orthogonal: bool
    centered: bool = False


class Transform(Spec):
    """Transforms of both sides."""

    k: SideTransform
    v: SideTransform


class FileEntry(Spec):
    """One payload file; size and sum are null only where the artifact was never pulled."""

    path: Text
    role: FileRole
    size: Annotated[int, Field(ge=1, lt=1 << 40)] | None
    sha256: Sha256OfFile | None
    format: Text | None

    @model_validator(mode="after")
    def _safe(self) -> Self:
        if self.path.count("/") >= MAX_PARTS:
            raise ValueError(f"a file path has at most {MAX_PARTS} parts")
        for part in self.path.split("/"):
            check_part(part, "file name")  # raises a ValueError, as validators do
        if self.path.casefold() in (FILE_NAME, SIGNATURE_NAME):
            raise ValueError(f"{FILE_NAME} and {SIGNATURE_NAME} are never part of the file list")
        if (self.size is None) != (self.sha256 is None):
            raise ValueError("size and sha256 are known together or not at all")
        return self


class StatisticsBlock(Spec):
    """The statistics fingerprint `oscar-zoo.stats/1`."""

    file: Text
    version: Literal["oscar-zoo.stats/1"]
    matrices: tuple[StatisticName, ...]
    n_tokens: Count


class License(Spec):
    """SPDX identifiers, or null when the source does not say."""

    artifact: Text | None
    model: Text | None
    calibration_data: Text | None
    note: Text | None = None


class Provenance(Spec):
    """Where the bytes came from."""

    kind: Literal["imported", "computed", "converted"]
    hub: Text | None = None
    repo: Text | None = None
    revision: Text | None = None
    path: Text | None = None
    parents: tuple[Digest, ...] = ()


class Status(Spec):
    """`yanked` is skipped by name and served by exact digest with a warning."""

    state: Literal["active", "deprecated", "yanked"] = "active"
    reason: Text | None = None
    replaced_by: Text | None = None
    date: Text | None = None


class HubLocation(Spec):
    """A place in a hub; `revision` is a commit once it is pinned."""

    repo: Text
    revision: Text | None = None


class Registry(Spec):
    """The mutable block."""

    status: Status = Status()
    scores: tuple[Score, ...] = ()
    aliases: tuple[Text, ...] = ()
    hubs: dict[HubScheme, HubLocation] = Field(default_factory=dict)


class Manifest(Document):
    """One artifact. See the module docstring for the two parts."""

    NAME, CODE = FILE_NAME, "manifest"
    REMEDY = "fetch the artifact again, or compute it again"
    schema_: Schema = Field(alias="schema")
    id: Text
    created: Annotated[
        str, Field(pattern=r"^[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}Z$")
    ]
    digest: Digest | None
    tool: Harness
    kind: Literal["rotation_pair", "mla_latent", "gguf"]
    format_version: FormatVersion | None
    grouping: Literal["layer", "kv_head"]
    transform: Transform
    model: ModelBlock
    fit: Fit
    recipe: ServingRecipe
    files: tuple[FileEntry, ...]
    statistics: StatisticsBlock | None = None
    quality: dict[str, Any] | None = None
    license: License
    provenance: Provenance
    registry: Registry | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        ArtifactId.parse(self.id)
        widths = self.recipe.widths
        latent = self.model.rotary_key is not None
        if self.schema_ != schema_of(self.model, self.recipe):
            raise ValueError(
                f"{WITH_WIDTHS} is for recipes with widths, {OF_LATENTS} for latents, and only so"
            )
        if latent != (self.kind == "mla_latent") or latent != ("latent" in self.recipe.requires):
            raise ValueError("mla_latent, model.rotary_key and the capability latent go together")
        if widths is not None and len(widths.k.bits) != len(self.model.attention_layers):
            raise ValueError("widths have one entry for each layer of model.attention_layers")
        self._check_widths_file()
        paths = [f.path.casefold() for f in self.files]
        if len(set(paths)) != len(paths) or not paths:
            raise ValueError("file paths must be unique and at least one")
        known = self.file_digests
        if (self.digest is None) != (known is None):
            raise ValueError("digest is known exactly when every file's sha256 is")
        if known is not None and artifact_digest(known) != self.digest:
            raise ValueError(f"digest is not that of the file list ({artifact_digest(known)})")
        rotations = sorted(f.role for f in self.files if f.role.endswith("_rotation"))
        if self.kind == "rotation_pair" and rotations != ["k_rotation", "v_rotation"]:
            raise ValueError("a rotation pair has exactly one k_rotation and one v_rotation")
        if latent and rotations != ["latent_rotation"]:
            raise ValueError("latents have exactly one latent_rotation")
        return self

    def _check_widths_file(self) -> None:
        listed, widths = self.files_of("widths"), self.recipe.widths
        if any(f.path == WIDTHS_NAME for f in self.files) != bool(listed):
            raise ValueError(f"the file with widths is {WIDTHS_NAME}, and no other one")
        if len(listed) != (widths is not None):
            raise ValueError(f"recipe.widths go with one file {WIDTHS_NAME}, which has them too")
        if widths is None or listed[0].sha256 is None:
            return
        want = file_digest(WIDTHS_NAME, widths.to_bytes())
        if (listed[0].path, listed[0].sha256, listed[0].size) != astuple(want):
            raise ValueError(f"recipe.widths are not those of {WIDTHS_NAME}, whose sha256 is known")

    @property
    def bits_per_element(self) -> float:
        """Stored bits of an element, scales and offsets included; rotary keys beside latents have
        16."""
        coded, exact = self.model.head_dim, self.model.rotary_key or 0
        return (coded * self.recipe.bits_per_element + 16 * exact) / (coded + exact)

    @property
    def artifact_id(self) -> ArtifactId:
        return ArtifactId.parse(self.id)

    @property
    def file_digests(self) -> tuple[FileDigest, ...] | None:
        if any(f.sha256 is None or f.size is None for f in self.files):
            return None
        return tuple(FileDigest(f.path, str(f.sha256), int(f.size or 0)) for f in self.files)

    def files_of(self, role: FileRole) -> tuple[FileEntry, ...]:
        return tuple(f for f in self.files if f.role == role)

    def file(self, role: FileRole) -> FileEntry | None:
        return next(iter(self.files_of(role)), None)

    def to_json(self) -> dict[str, Any]:
        value = super().to_json()
        for optional in ("registry", "statistics", "quality"):
            if value[optional] is None:
                del value[optional]
        return value

    @classmethod
    def from_bytes(
        cls, data: bytes, *, what: str = "", remedy: str = "", registry: bool = False
    ) -> Self:
        manifest = super().from_bytes(data, what=what, remedy=remedy)
        if manifest.registry is not None and not registry:
            message = f"{what or FILE_NAME} must not have a registry block."
            raise MalformedFile("manifest.schema", message, hint=cls.REMEDY)
        return manifest

    @classmethod
    def readable(cls, data: bytes | None) -> Manifest | None:
        try:
            return None if data is None else cls.from_bytes(data)
        except MalformedFile:
            return None


def schema_of(model: Geometry, recipe: ServingRecipe) -> Schema:
    """The oldest schema that can say it."""
    if model.rotary_key is not None:
        return OF_LATENTS
    return SCHEMA if recipe.widths is None else WITH_WIDTHS


def is_payload(name: str) -> bool:
    """Whether a file belongs to an artifact for which no manifest lists its files."""
    return name.endswith(SUFFIX) or name in (STATISTICS_NAME, WIDTHS_NAME)
