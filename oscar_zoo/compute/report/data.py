"""The numbers behind a report: schema `oscar-zoo.report/1`, a closed JSON document.

A measurement fills a `ReportData`. Page and picture are functions of it alone, so a report can be
drawn again years later from its JSON. Every block may be absent: a quick fit has no perplexity, and
a moments file has only spectra and headroom. Numbers keep six significant digits from the start, so
a report that is read equals the one that was written. Needs no torch.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from oscar_zoo.artifact import strict_json
from oscar_zoo.artifact.files import refuse_mistaken
from oscar_zoo.artifact.specs import Count, Spec, Text, validated
from oscar_zoo.artifact.width_selection import WidthSelection
from oscar_zoo.errors import MalformedFile, malformed_hint

SCHEMA = "oscar-zoo.report/1"
SUFFIX = ".report.json"
"""Suffix of the report file beside an artifact."""
MAX_BYTES = 8 << 20
MAX_POINTS = 64
"""Points of one spectrum; a chart cannot show more of them apart."""

Verdict = Literal["pass", "warn", "fail"]


_LARGEST, _SMALLEST = 1e60, 1e-60
"""Range of numbers that a chart can show; a smaller number becomes 0."""


def _short(value: float) -> float:
    return 0.0 if abs(value) < _SMALLEST else float(f"{value:.6g}")


Number = Annotated[float, Field(ge=-_LARGEST, le=_LARGEST), AfterValidator(_short)]
NotNegative = Annotated[float, Field(ge=0, le=_LARGEST), AfterValidator(_short)]
Perplexity = Annotated[float, Field(ge=0.999, le=_LARGEST), AfterValidator(_short)]
Share = Annotated[float, Field(ge=0, le=1), AfterValidator(_short)]
Label = Annotated[str, Field(min_length=1, max_length=60)]
LayerId = Annotated[int, Field(ge=0, lt=1 << 20)]
PerLayer = tuple[NotNegative, ...]
"""One value per entry of `ReportData.layers`."""


class Fact(Spec):
    """A line of the facts: what was run, on what, how long it took."""

    label: Label
    value: Text


class Candidate(Spec):
    """One row of the comparison.

    `clip_k` and `clip_v` are ratios, 0 for no clipping. `output_error` is the geometric mean over
    layers of the relative squared error of the attention output. `change_percent` is the rise of
    perplexity over BF16 and `standard_error` its paired standard error, both in percent of the BF16
    perplexity, of the first `sequences` of the held-out text where a candidate left early, and then
    it has no `perplexity`. `divergence` is that of the next token's distribution from that with the
    exact cache, in nats per position. `recall` is a share.
    """

    method: Label
    clip_k: Share | None = None
    clip_v: Share | None = None
    output_error: NotNegative | None = None
    sequences: Annotated[int, Field(ge=1, lt=1 << 20)] | None = None
    divergence: NotNegative | None = None
    perplexity: Perplexity | None = None
    change_percent: Number | None = None
    standard_error: NotNegative | None = None
    recall: Share | None = None
    chosen: bool = False
    gate: Verdict | None = None


class Comparison(Spec):
    """The candidates in the order of trial, the BF16 values, and the reason of the choice."""

    candidates: Annotated[tuple[Candidate, ...], Field(min_length=1)]
    bf16_perplexity: Perplexity | None = None
    bf16_recall: Share | None = None
    reason: Text | None = None

    @model_validator(mode="after")
    def _one_winner(self) -> Self:
        if sum(candidate.chosen for candidate in self.candidates) > 1:
            raise ValueError("at most one candidate is chosen")
        return self

    @property
    def chosen(self) -> Candidate | None:
        """The candidate that was kept."""
        return next((candidate for candidate in self.candidates if candidate.chosen), None)


class MethodErrors(Spec):
    """Relative squared error of the attention output of one method, layer by layer."""

    method: Label
    layers: PerLayer


class Spectrum(Spec):
    """Eigenvalues of one target matrix per layer, descending, as shares of their sum. `target` is
    the estimator's id, `dim` the number of eigenvalues; `ranks` are the positions kept, from 1."""

    target: Label
    dim: Count
    ranks: Annotated[tuple[Count, ...], Field(min_length=1, max_length=MAX_POINTS)]
    layers: tuple[tuple[NotNegative, ...], ...]

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if list(self.ranks) != sorted(set(self.ranks)) or self.ranks[-1] > self.dim:
            raise ValueError("ranks must ascend and be at most dim")
        for layer in self.layers:
            if len(layer) != len(self.ranks) or any(a < b for a, b in itertools.pairwise(layer)):
                raise ValueError("a layer has one share per rank, in descending order")
        return self

    @classmethod
    def of(cls, target: str, eigenvalues: Sequence[Sequence[float]]) -> Self:
        """Shares from all eigenvalues of every layer, in any order. An eigenvalue that rounding
        made negative counts as 0."""
        dim = len(eigenvalues[0])
        ranks: Sequence[int] = range(1, dim + 1)
        if dim > MAX_POINTS:  # evenly spaced on a log axis
            steps = (round(dim ** (step / (MAX_POINTS - 1))) for step in range(MAX_POINTS))
            ranks = sorted(set(steps))
        layers = []
        for layer in eigenvalues:
            values = sorted((max(float(value), 0.0) for value in layer), reverse=True)
            total = math.fsum(values) or 1.0
            layers.append(tuple(values[rank - 1] / total for rank in ranks))
        return cls(target=target, dim=dim, ranks=tuple(ranks), layers=tuple(layers))


class Spectra(Spec):
    """Spectra of the key side's and of the value side's target."""

    k: Spectrum
    v: Spectrum


class ClipChart(Spec):
    """Error against the clip ratio, layer by layer; a ratio of 1 clips nothing. `chosen` is the
    ratio that is served. `mean` is over layers, as the clip was chosen by. `error` says which
    error, in a word."""

    error: Label
    ratios: Annotated[tuple[Share, ...], Field(min_length=2)]
    layers: tuple[tuple[NotNegative, ...], ...]
    mean: tuple[NotNegative, ...]
    chosen: Share | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if list(self.ratios) != sorted(set(self.ratios)):
            raise ValueError("ratios must ascend")
        if any(len(errors) != len(self.ratios) for errors in (*self.layers, self.mean)):
            raise ValueError("a layer, and the mean, has one error per ratio")
        return self


class ClipCurves(Spec):
    """Clip curves of both sides, for one method."""

    method: Label
    k: ClipChart | None = None
    v: ClipChart | None = None


class Headroom(Spec):
    """How many times less error the best transform could have than the best rotation. One factor
    per layer; 1 means nothing to gain."""

    k: PerLayer
    v: PerLayer


class ReportData(Spec):
    """Everything that a report shows. `layers` are the model's indices of the layers; all other
    blocks have their order."""

    schema_: Literal["oscar-zoo.report/1"] = Field(default="oscar-zoo.report/1", alias="schema")
    title: Annotated[str, Field(min_length=1, max_length=300)]
    layers: Annotated[tuple[LayerId, ...], Field(min_length=1, max_length=1000)]
    facts: tuple[Fact, ...] = ()
    comparison: Comparison | None = None
    errors: tuple[MethodErrors, ...] = ()
    clip: ClipCurves | None = None
    headroom: Headroom | None = None
    spectra: Spectra | None = None
    widths: WidthSelection | None = None
    notes: tuple[Text, ...] = ()

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if list(self.layers) != sorted(set(self.layers)):
            raise ValueError("layers must ascend")
        blocks: list[Sequence[object]] = [error.layers for error in self.errors]
        if self.clip is not None:
            blocks += [side.layers for side in (self.clip.k, self.clip.v) if side is not None]
        if self.headroom is not None:
            blocks += [self.headroom.k, self.headroom.v]
        if self.spectra is not None:
            blocks += [self.spectra.k.layers, self.spectra.v.layers]
        if any(len(block) != len(self.layers) for block in blocks):
            raise ValueError("every block has one entry per layer")
        if len({error.method for error in self.errors}) != len(self.errors):
            raise ValueError("a method has its errors once")
        return self

    @property
    def kept(self) -> str | None:
        """The method that was kept."""
        chosen = self.comparison.chosen if self.comparison else None
        return chosen.method if chosen else None

    @property
    def methods(self) -> tuple[str, ...]:
        """Every method named anywhere, each once, in the order of the comparison."""
        candidates = self.comparison.candidates if self.comparison else ()
        named = [*(row.method for row in candidates), *(error.method for error in self.errors)]
        return tuple(dict.fromkeys(named + ([self.clip.method] if self.clip else [])))

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values; blocks that are absent are left out."""
        value: dict[str, Any] = self.model_dump(mode="json", by_alias=True, exclude_none=True)
        return value

    def to_bytes(self) -> bytes:
        """The file form: canonical JSON and a newline."""
        return strict_json.canonical_bytes(self.to_json()) + b"\n"

    @classmethod
    @malformed_hint("`oscar-zoo compute` writes it again, or copy it again from where it came from")
    def from_bytes(cls, data: bytes, *, what: str = "the report") -> Self:
        """Parse an untrusted file."""
        refuse_mistaken(data, what=what)
        value = strict_json.loads(data, what=what, max_bytes=MAX_BYTES)
        if type(value) is not dict or value.get("schema") != SCHEMA:
            found = value.get("schema") if type(value) is dict else None
            raise MalformedFile(
                "report.version",
                f"{what} has schema {str(found)[:60]!r}, not {SCHEMA}.",
                hint="`oscar-zoo compute` writes reports",
            )
        return validated(cls, value, code="report.schema", what=what)


def geometric_mean(values: Sequence[float]) -> float:
    """Geometric mean of values that are not negative; 0 when one of them is 0."""
    if min(values) <= 0:
        return 0.0
    return math.exp(math.fsum(math.log(value) for value in values) / len(values))
