"""Closed models of what others write, and the blocks that recipes and manifests share: geometry,
serving recipe, scores.

All models are frozen and refuse unknown keys. "Not reported" is `None`, never a guess.
"""

from __future__ import annotations

import json
import math
from typing import Annotated, Any, ClassVar, Final, Literal, Self, TypeVar, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
    model_validator,
)
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue

from oscar_kernels import spec as rows
from oscar_zoo.artifact import strict_json
from oscar_zoo.errors import MalformedFile, UsageError, malformed_hint

Hex64 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Hex40 = Annotated[str, Field(pattern=r"^[0-9a-f]{40}$")]
Digest = Annotated[str, Field(pattern=r"^sha256:[0-9a-f]{64}$")]
Text = Annotated[str, Field(min_length=1, max_length=4000)]
_PART = "[A-Za-z0-9_][A-Za-z0-9._-]{0,99}"
ModelId = Annotated[str, Field(pattern=rf"^{_PART}(?:/{_PART})?$")]
"""The id of a model as hubs have it. No letter of it looks like another one."""
Count = Annotated[int, Field(ge=1, lt=1 << 31)]

Capability = Literal[
    "per_head", "k_partner", "v_partner", "k_mean", "k_feedback", "grouped", "latent"
]
"""What an engine must do beside a matrix per layer.

`k_mean` is a mean that is subtracted from keys. An engine that serves a model with learned sinks or
a soft cap must add `scaling * q . mean` to its logits again, in every part of its cache, or refuse
the pair. With `k_feedback` the rounding of a channel of a key makes up for the errors of channels
before it (`oscar_kernels.quantizer`). A `latent` is cached once, for keys and values.
"""
StatisticName = Literal["qq", "kk", "sst", "oo", "vv", "wo"]
"""Matrices of the statistics fingerprint."""

CAPABILITIES: tuple[Capability, ...] = get_args(Capability)


class Spec(BaseModel):
    """Base of every block: frozen, closed, strict about types."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


def brief(value: int | tuple[int, ...]) -> str:
    """A number, or a list of layers that is cut in the middle when it is long, for messages."""
    if isinstance(value, int):
        return str(value)
    if len(value) <= 6:
        return str(list(value))
    return f"[{value[0]}, {value[1]}, .. {value[-1]}] ({len(value)} layers)"


class Rope(Spec):
    """Rotary embedding as active during the fit; YaRN and friends change post-RoPE statistics."""

    type: Text
    theta: float | None = None
    scaling: Text | None = None
    factor: float | None = None
    rotary_dim: Count | None = None
    max_position: Count | None = None


class Geometry(Spec):
    """Shape of a model's KV cache; `attention_layers` own a full-attention cache. With `rotary_key`
    it is that of multi-head latent attention (MLA): one KV head, whose rows are keys and values at
    once, `head_dim` channels of a latent, which have codes, and beside them a rotary key of
    `rotary_key` channels, which stays in 16 bits."""

    num_layers: Count
    num_q_heads: Count
    num_kv_heads: Count
    head_dim: Count
    v_head_dim: Count
    attention_layers: tuple[Annotated[int, Field(ge=0)], ...]
    rotary_key: Annotated[Count | None, Field(exclude_if=lambda value: value is None)] = None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        layers = self.attention_layers
        if not layers or list(layers) != sorted(set(layers)) or layers[-1] >= self.num_layers:
            raise ValueError("attention_layers must be ascending, unique and below num_layers")
        if self.num_q_heads % self.num_kv_heads:
            raise ValueError("num_q_heads must be a multiple of num_kv_heads")
        if self.rotary_key and (self.num_kv_heads > 1 or self.head_dim != self.v_head_dim):
            raise ValueError("latents are rows of one KV head, keys and values at once")
        return self

    @property
    def head_dims(self) -> tuple[int, int]:
        """Channels of a row of K and of a row of V."""
        return self.head_dim, self.v_head_dim

    @property
    def row_dims(self) -> tuple[int, int]:
        """Channels that a cache stores of a head: of K and of V, or of a latent and of its key."""
        return self.head_dim, self.rotary_key or self.v_head_dim

    def difference(self, other: Geometry) -> str | None:
        for name in Geometry.model_fields:
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs:
                return f"{name} is {brief(mine)} here and {brief(theirs)} there"
        return None


LEAST_CLIP = 0.1
"""A smaller ratio would clip nearly all numbers of a row."""


def _is_clip(ratio: float) -> float:
    if 0 < ratio < LEAST_CLIP:
        raise ValueError(f"must be 0, which clips nothing, or from {LEAST_CLIP} to 1")
    return ratio


Ratio = Annotated[float, Field(ge=0, le=1), AfterValidator(_is_clip)]


class Clip(Spec):
    """Clip ratios of the order-statistic clip `absrank-floor/1`; 0 means no clipping."""

    k: Ratio
    v: Ratio
    algorithm: Literal["none", "absrank-floor/1", "absrank-bisect7/1"] = "absrank-floor/1"


def read_clip(text: str | None) -> Clip | None:
    if text is None:
        return None
    try:
        k, v = (float(part) for part in text.split(","))
        return Clip(k=k, v=v)
    except ValueError:
        message = f"--clip {text!r} is not two ratios between 0 and 1."
        raise UsageError(message, hint="for example --clip 0.96,0.92; 0 turns it off") from None


MOST_TOKENS = 1 << 20
"""Of one window. No other setting of a cache may be larger."""


class Windows(Spec):
    """Tokens kept in high precision: the first `sink` and the last `recent` of every sequence."""

    sink: Annotated[int, Field(ge=0, le=MOST_TOKENS)] = 64
    recent: Annotated[int, Field(ge=1, le=MOST_TOKENS)] = 256
    flush: Annotated[int, Field(ge=1)] | None = None
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"


CodeBits = Literal[2, 4]


class SideWidths(Spec):
    """Bits of a code and the clip ratio of one side, for each attention layer in its order."""

    bits: Annotated[tuple[CodeBits, ...], Field(min_length=1, max_length=1000)]
    clip: tuple[Ratio, ...]

    @model_validator(mode="after")
    def _as_many(self) -> Self:
        if len(self.bits) != len(self.clip):
            raise ValueError("bits and clip have one entry for each attention layer")
        return self


WIDTHS_SCHEMA = "oscar-zoo.widths/1"


class Widths(Spec):
    """Codes of 2 or of 4 bits, chosen for keys and values of every attention layer."""

    k: SideWidths
    v: SideWidths

    @model_validator(mode="after")
    def _as_many(self) -> Self:
        if len(self.k.bits) != len(self.v.bits):
            raise ValueError("keys and values have one entry for each attention layer")
        return self

    @classmethod
    def uniform(cls, layers: int, *, k: CodeBits, v: CodeBits, clip: Clip) -> Widths:
        """The same bits in each layer. Clips belong to a width: codes of 2 bits have the ratios of
        `clip`, and codes of 4 bits are not clipped."""

        def side(bits: CodeBits, ratio: float) -> SideWidths:
            kept = ratio if bits == 2 and clip.algorithm != "none" else 0.0
            return SideWidths(bits=(bits,) * layers, clip=(kept,) * layers)

        return cls(k=side(k, clip.k), v=side(v, clip.v))

    @property
    def mean_bits(self) -> float:
        both = (*self.k.bits, *self.v.bits)
        return sum(both) / len(both)

    def to_bytes(self) -> bytes:
        return strict_json.pretty_bytes({"schema": WIDTHS_SCHEMA, **self.model_dump(mode="json")})


class ServingRecipe(Spec):
    """Exact serving settings of an artifact. `group_size` channels share a scale and an offset;
    where K and V rows differ in width it is the most of them. Codes have `bits`, and rows are
    clipped at `clip`, unless `widths` says both for each layer and side."""

    bits: Annotated[int, Field(ge=2, le=2)] = 2
    group_size: Count
    scale_dtype: Literal["float16", "bfloat16", "float32"] = "float16"
    quantizer: Literal["asym-minmax-u2/1", "asym-minmax-u24/1", "lloydmax-uniform-u2/1"] = (
        "asym-minmax-u2/1"
    )
    clip: Clip
    widths: Widths | None = None
    windows: Windows = Windows()
    v_absorption: Literal["required", "allowed", "forbidden"] = "allowed"
    origin: Literal["shipped", "default", "measured"] = "default"
    requires: tuple[Capability, ...] = ()

    @model_validator(mode="after")
    def _quantizer_of_widths(self) -> Self:
        if (self.widths is not None) != (self.quantizer == rows.MIXED_QUANTIZER):
            raise ValueError(
                f"widths go with the quantizer {rows.MIXED_QUANTIZER}, and with no other"
            )
        return self

    @model_serializer(mode="wrap")
    def _without_absent_widths(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        value: dict[str, Any] = write(self)
        if self.widths is None:
            value.pop("widths", None)
        return value

    @property
    def bits_per_element(self) -> float:
        """Stored bits per element, including its share of the 16-bit scale and offset."""
        return (self.widths.mean_bits if self.widths else self.bits) + 32 / self.group_size

    def code_bits(self, role: Literal["k", "v"], index: int) -> int:
        return getattr(self.widths, role).bits[index] if self.widths else self.bits

    def clip_ratio(self, role: Literal["k", "v"], index: int) -> float:
        if self.widths is not None:
            return float(getattr(self.widths, role).clip[index])
        return 0.0 if self.clip.algorithm == "none" else float(getattr(self.clip, role))

    def quant_spec(self, role: Literal["k", "v"], head_dim: int, index: int = 0) -> rows.QuantSpec:
        """The quantizer of one side in the attention layer `index`, counted from 0."""
        known, clips = (rows.QUANTIZER, rows.MIXED_QUANTIZER), ("none", rows.CLIP_ALGORITHM)
        if self.quantizer not in known or self.clip.algorithm not in clips:
            asked = f"the recipe asks for {self.quantizer} with clip {self.clip.algorithm}"
            raise UsageError(f"{asked}; known are {', '.join(known)} with {' or '.join(clips)}.")
        group = rows.group_channels(head_dim, self.group_size)
        bits, clip = self.code_bits(role, index), self.clip_ratio(role, index)
        return rows.QuantSpec(head_dim, group, clip, self.scale_dtype, bits)

    def check_model(self, model: Geometry, name: str) -> None:
        """Refuse a model whose rows or layers this recipe does not fit; `name` is for messages."""
        check_groups(model.head_dims, self.group_size, name)
        self.quant_spec("k", model.head_dim)
        self.quant_spec("v", model.v_head_dim)
        widths = self.widths
        same = self.clip.k == self.clip.v if widths is None else widths.k == widths.v
        if model.rotary_key and not same:
            message = f"rows of {name} are keys and values at once, with the same codes for both."
            raise UsageError(message, hint="give both the same clip ratio and the same bits")
        if widths is not None and len(widths.k.bits) != len(model.attention_layers):
            raise UsageError(
                f"the recipe has bits for {len(widths.k.bits)} layers, and {name} has"
                f" {len(model.attention_layers)} with full attention."
            )

    def with_widths(self, widths: Widths | None) -> ServingRecipe:
        quantizer = rows.QUANTIZER if widths is None else rows.MIXED_QUANTIZER
        return self.model_copy(update={"widths": widths, "quantizer": quantizer})

    def override(
        self,
        *,
        clip: Clip | None = None,
        group_size: int | None = None,
        sink: int | None = None,
        recent: int | None = None,
    ) -> ServingRecipe:
        """A copy in which the given settings replace its own."""
        if clip is not None and self.widths is not None:
            message = "the recipe has a clip ratio for each layer, which --clip does not change."
            raise UsageError(message, hint="leave out --clip")
        given = {"clip": clip, "group_size": group_size}
        changes: dict[str, object] = {n: value for n, value in given.items() if value is not None}
        tokens = {"sink": sink, "recent": recent}
        windows = {name: count for name, count in tokens.items() if count is not None}
        if windows:
            changes["windows"] = Windows(**(self.windows.model_dump() | windows))
        return ServingRecipe(**(self.model_dump() | changes)) if changes else self


class Harness(Spec):
    """Name, version and commit of a tool that produced something."""

    name: Text
    version: Text | None = None
    commit: Text | None = None


class HistoryEntry(Spec):
    """An earlier value of a score: values are appended here, never overwritten."""

    value: float
    source: Text
    date: Text | None = None


class Spread(Spec):
    """A spread as its source states it; `kind` is null when the source does not say what it is."""

    value: float
    kind: Text | None = None


class TokenCounts(Spec):
    """Tokens of all requests of a measurement: read, and generated."""

    prompt: Annotated[int, Field(ge=0, lt=1 << 53)]
    completion: Annotated[int, Field(ge=0, lt=1 << 53)]


class Paired(Spec):
    """A score against its baseline on the same questions.

    Attributes:
        n: questions that both answered.
        difference: the score minus its baseline, in the unit of the score.
        lower95, upper95: ends of its 95 % confidence interval, from a bootstrap over questions.
        p_value: of McNemar's exact test over questions, where a majority of the seeds says whether
            a question was answered right; null where the test does not apply.
        no_worse_than: the score is at most this much worse, in its unit, with 95 % confidence on
            one side.
    """

    n: Count
    difference: float
    lower95: float
    upper95: float
    p_value: Annotated[float, Field(ge=0, le=1)] | None = None
    no_worse_than: float

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.lower95 > self.upper95:
            raise ValueError("lower95 is above upper95")
        return self


_LATER: Final = tuple(
    "thinking hardware tokens responses_sha256 calibrated_on values paired".split()
)
"""Keys of a score that readers of version 0.1.0 do not know and refuse."""


class Score(Spec):
    """One quality claim.

    Reporters other than `measured` may leave what they did not say as null; what `measured` has to
    say is in `registry.score_file`.

    Attributes:
        task, metric: what was measured, such as `gpqa_diamond` and `accuracy`.
        value: of `metric`, in `unit`; null where a source names the task without a number.
        kv_dtype: type of the cache.
        reporter: whether upstream says so, somebody else, or this tool measured it.
        who, date, source: who says so, when, and where.
        dataset_revision: commit of the data, or `sha256:<hex>` of the file.
        stderr: standard error of `value`, in `unit`.
        n, repeats, seeds: questions, runs over all of them, and the seed of every run.
        values: `value` of every run, in the order of `seeds`.
        harness, engine: the tool that asked and the engine that answered.
        hardware: that it ran on, such as `NVIDIA H200`.
        recipe_changes: settings that were not those of the recipe.
        sampling, thinking, generation_cap: how answers were generated; the cap is in tokens.
        exhausted_rate: share of answers that hit the cap, 0 to 1.
        tokens: of all requests.
        responses_sha256: of the answers that were kept, as a compressed file.
        artifact_digest: of the rotations.
        calibrated_on: whether the calibration saw questions of this set.
        baseline: the same with a BF16 cache, from the same run.
        paired: this score against `baseline`, question by question.
        history: other values that were claimed, oldest claim first.
    """

    task: Text
    metric: Text = "accuracy"
    value: float | None
    unit: Text = "percent"
    kv_dtype: Literal["bf16", "int2", "fp8"]
    reporter: Literal["upstream", "third_party", "measured"]
    who: Text | None = None
    date: Text | None = None
    source: Text | None = None
    dataset_revision: Text | None = None
    stderr: float | None = None
    spread: Spread | None = None
    n: Count | None = None
    repeats: Count | None = None
    seeds: tuple[int, ...] | None = None
    values: tuple[float, ...] | None = None
    harness: Harness | None = None
    engine: Harness | None = None
    hardware: Text | None = None
    recipe_changes: dict[str, str] = Field(default_factory=dict)
    model_revision: Hex40 | None = None
    sampling: dict[str, float] | None = None
    thinking: bool | None = None
    generation_cap: Count | None = None
    exhausted_rate: float | None = None
    tokens: TokenCounts | None = None
    responses_sha256: Hex64 | None = None
    artifact_digest: Digest | None = None
    calibrated_on: bool | None = None
    baseline: Score | None = None
    paired: Paired | None = None
    history: tuple[HistoryEntry, ...] = ()

    @model_serializer(mode="wrap")
    def _without_later_keys(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        value: dict[str, Any] = write(self)
        return {key: said for key, said in value.items() if said is not None or key not in _LATER}


M = TypeVar("M", bound=BaseModel)
LONGEST_PLACE = 120
"""Characters of the place of an error that a message has."""


def validated(kind: type[M], value: Any, *, code: str, what: str) -> M:
    """The strict model `kind` of a plain value. The value goes through JSON once more, because
    strict validation of Python values would refuse a list where a tuple is meant. `code` is the
    `reason` of the error."""
    try:
        return kind.model_validate_json(json.dumps(value, default=str))
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))[:LONGEST_PLACE]
        cause = first["msg"].removeprefix("Value error, ").rstrip(".")
        said = f"{place}: {cause}" if place else cause
        raise MalformedFile(code, f"{what}: {said}.") from None


class Document(Spec):
    """A file in JSON whose field `schema` says what it is. `CODE` begins the reasons of errors, and
    `REMEDY` and `NEWER` are what to do about a damaged file and about one of another schema."""

    NAME: ClassVar[str]
    CODE: ClassVar[str]
    REMEDY: ClassVar[str]
    NEWER: ClassVar[str] = "a newer version of this tool may read it: pip install -U oscar-zoo"
    MAX_BYTES: ClassVar[int] = strict_json.MAX_BYTES

    @classmethod
    def from_bytes(cls, data: bytes, *, what: str = "", remedy: str = "") -> Self:
        """Parse what others may have written; `what` and `remedy` are in place of the usual."""
        what = what or cls.NAME
        with malformed_hint(remedy or cls.REMEDY):
            value = strict_json.loads(data, what=what, max_bytes=cls.MAX_BYTES)
            if type(value) is not dict:
                raise MalformedFile(f"{cls.CODE}.schema", f"{what} is not a JSON object.")
            known, said = get_args(cls.model_fields["schema_"].annotation), value.get("schema")
            if said not in known:
                message = f"{what} has schema {str(said)[:60]!r}, not {' or '.join(known)}."
                raise MalformedFile(f"{cls.CODE}.version", message, hint=cls.NEWER)
            return validated(cls, value, code=f"{cls.CODE}.schema", what=what)

    def to_json(self) -> dict[str, Any]:
        return self.model_dump(mode="json", by_alias=True)

    def to_bytes(self) -> bytes:
        return strict_json.pretty_bytes(self.to_json())


class Closed(GenerateJsonSchema):
    """A dataclass becomes an object that has each of its keys and no other."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False

    def default_schema(self, schema: Any) -> JsonSchemaValue:
        return self.generate_inner(schema["schema"])

    def field_is_required(self, field: Any, total: bool) -> bool:
        return "serialization_exclude_if" not in field

    def literal_schema(self, schema: Any) -> JsonSchemaValue:
        made = super().literal_schema(schema)
        made.pop("type", None)
        return made

    def dataclass_schema(self, schema: Any) -> JsonSchemaValue:
        made = super().dataclass_schema(schema)
        inner = made if "properties" in made else self.definitions[made["$ref"].rsplit("/", 1)[1]]
        inner.pop("title", None)
        return made

    def _named_required_fields_schema(self, named_required_fields: Any) -> JsonSchemaValue:
        made = super()._named_required_fields_schema(named_required_fields)
        return made | {"additionalProperties": False}


def check_groups(
    dims: tuple[int, int], group_size: int, model: str, *, option: str = "a group size of {}"
) -> None:
    """Refuse groups that rows of a cache cannot be cut into; `dims` are the channels of a row of K
    and of V."""
    try:
        rows.check_group_size(dims, group_size)
    except ValueError as error:
        message = f"a group size of {group_size} does not go with {model}: {error}."
        raise UsageError(message, hint=f"use {option.format(largest_group(dims))}") from None


def largest_group(dims: tuple[int, int]) -> int:
    """The largest group size for both rows: their common divisor where that cuts both into 1, 2 or
    4 groups, else one row of the narrower of them."""
    common = math.gcd(*dims)
    both = all(width // common in rows.GROUPS for width in dims)
    return common if both else min(dims)
