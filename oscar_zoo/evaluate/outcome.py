"""What `eval` and `ruler` print: one type for each way to measure, whose JSON is made of it.

Needs no torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field, InstanceOf, PlainSerializer, TypeAdapter, WithJsonSchema, computed_field

from oscar_zoo.artifact import specs
from oscar_zoo.artifact.outcome import HIDDEN, Digest, Sha256, says
from oscar_zoo.errors import OscarZooError
from oscar_zoo.evaluate.params import Cache, Family

T = TypeVar("T")
Count = Annotated[int, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Maybe = Annotated[T | None, Field(exclude_if=lambda value: value is None)]
"""A key that is left out where there is nothing to say."""


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


Number = Annotated[float | None, PlainSerializer(_finite, return_type=float | None)]
"""Null where it was not measured, or is not finite, which only a broken cache gives."""
Finite = Annotated[float, PlainSerializer(_finite, return_type=float | None)]
"""The same where there is always a number."""
Error = Annotated[Number, Field(ge=0)]
Clip = Annotated[InstanceOf[specs.Clip], WithJsonSchema({"x-ref": "Clip"})]
Changes = Mapping[str, int | str]


class Plain:
    """An outcome that callers from Python may want as plain values."""

    def to_json(self) -> dict[str, Any]:
        """The values that `--json` prints."""
        kind: TypeAdapter[Any] = TypeAdapter(type(self))
        found: dict[str, Any] = kind.dump_python(self, mode="json", by_alias=True)
        return found


@dataclass(frozen=True)
class MeasuredModel:
    """The model that was measured."""

    id: Annotated[str, says("Name or path.")]
    revision: Annotated[str | None, says("Commit of the hub.")]
    config_sha256: Annotated[Sha256 | None, says("Of config.json.")]
    dtype: Annotated[str, says("Of the weights.")]


@dataclass(frozen=True, kw_only=True)
class Facts(Plain):
    """What a reader needs to repeat a measurement in this process."""

    model: MeasuredModel
    text_sha256: Sha256
    sink: Annotated[Count, says("First tokens that stay uncompressed.")]
    recent: Annotated[Count, says("Last tokens that stay uncompressed.")]
    clip: Clip
    group_size: Annotated[Count, says("Channels that share a scale.")]
    scale_dtype: str
    quantizer: str
    chunking: Annotated[str, says("How the prompt was processed.")]
    torch: Annotated[str, says("Version.")]
    device: str
    tokens: Annotated[Count, says("Of the text.")]
    length: Annotated[Count, says("Tokens of a sequence, at most.")]
    tasks: Annotated[Mapping[str, Mapping[str, int | str]], says("What was asked, by task.")]


@dataclass(frozen=True, kw_only=True)
class Bits:
    """What an element costs in one cache."""

    bits_per_element: Annotated[float, says("Of an element, with scales and rotary keys.")]
    bits_per_element_with_windows: Annotated[float, says("Of all that one sequence occupies.")]
    bits_per_element_at: Annotated[Mapping[str, float], says("The same, by tokens of a sequence.")]


@dataclass(frozen=True, kw_only=True)
class EvalRow(Bits):
    """One cache, or one cache under one setting."""

    cache: Cache
    perplexity: Annotated[Number, says("Null when not measured.")]
    recall: Annotated[Share | None, says("Of digits of all answers; guessing gives 0.1.")]
    changes: Annotated[Changes, says("Values in place of those above, where several were tried.")]


@dataclass(frozen=True, kw_only=True)
class EvalReport(Facts):
    """What oscar-zoo eval prints: perplexity and recall of caches that are simulated in the
    process."""

    rows: tuple[EvalRow, ...]
    compared: Annotated[Any, *HIDDEN] = ()
    """Every task with its measurements under BF16 and under the artifact's cache."""
    record: Annotated[Path | None, says("The file in which the scores were kept.")] = None
    schema: Literal["oscar-zoo.eval/1"] = "oscar-zoo.eval/1"


@dataclass(frozen=True, kw_only=True)
class AgainstRow(Bits):
    """One cache beside the others."""

    cache: Annotated[
        str, says("bf16, or a name as --against takes it.", pattern=r"^[a-z0-9-]+(:[0-9.]+)?$")
    ]
    title: Annotated[str, says("For people; of the artifact its method, and bits of its codes.")]
    own: Annotated[bool, says("Whether it is the artifact's.")]
    source: Annotated[str | None, says("Where the method is described.")]
    windows: Annotated[
        Literal["lent", "own", "none"] | None,
        says("First and last tokens: those of the recipe, which it was published without, or own."),
    ]
    tokens_per_gb: Annotated[Count, says("Of this model, in sequences of context tokens.")]
    divergence: Annotated[Finite, says("From the exact cache, in nats per position.")]
    divergence_error: Annotated[Error, says("Over the windows of text; null for one window.")]
    perplexity: Finite
    perplexity_change: Annotated[Finite, says("Against BF16, in percent.")]
    perplexity_change_error: Annotated[Error, says("Over the same windows, in percent.")]
    digits: Annotated[Share, says("Share of the digits of all answers that are right.")]
    digits_error: Annotated[Error, says("Over the prompts; null for one prompt.")]
    answers: Annotated[Share, says("Share of whole answers that are right.")]
    answers_error: Annotated[Error, says("Over the prompts; null for one prompt.")]
    pareto: Annotated[bool, says("Whether none has at most its bits and its divergence.")] = False
    pareto_at: Annotated[Mapping[str, bool], says("The same with the bits of other sequences.")] = (
        field(default_factory=dict)
    )


@dataclass(frozen=True, kw_only=True)
class AgainstReport(Facts):
    """What oscar-zoo eval --against prints: bits and losses of an artifact's cache and of other
    methods, simulated in the process."""

    context: Annotated[Count, says("32,768, or the most that the model takes.")]
    rows: Annotated[tuple[AgainstRow, ...], says("One per cache, by bits with windows.")]
    left_out: Annotated[Mapping[str, str], says("What does not fit the model, and why.")]
    schema: Literal["oscar-zoo.eval-against/1"] = "oscar-zoo.eval-against/1"


@dataclass(frozen=True, kw_only=True)
class SessionsRow(Bits):
    """One cache over sessions of an agent."""

    cache: Cache
    divergence: Annotated[Finite, says("From the exact cache, in nats per position.")]
    divergence_to: Annotated[
        Mapping[str, Finite], says("The same of a stretch of positions, by its end.")
    ]
    calls_valid: Annotated[Share, says("Of calls of tools that parse, as predicted.")]
    calls_same: Annotated[Share, says("Of calls that are predicted as with BF16.")]
    call_tokens_same: Annotated[Share, says("Of tokens of calls, a gentler number.")]
    recall: Annotated[Share, says("Of names and numbers of earlier turns, right as a whole.")]


@dataclass(frozen=True, kw_only=True)
class SessionsReport(Facts):
    """What oscar-zoo eval --task sessions prints: how caches bear long sessions of an agent,
    simulated in the process."""

    rows: tuple[SessionsRow, ...]
    schema: Literal["oscar-zoo.eval-sessions/1"] = "oscar-zoo.eval-sessions/1"


@dataclass(frozen=True)
class ServedArtifact:
    """The rotations that were measured."""

    name: Annotated[str, says("As it was asked for: a name, or a folder.")]
    digest: Digest


@dataclass(frozen=True)
class Perplexities:
    """Perplexity of one text, three times."""

    server: Annotated[Finite, says("With INT2, by the server.")]
    reference: Annotated[Finite, says("With INT2, in this process.")]
    exact: Annotated[Finite, says("In this process, without quantization.")]

    @computed_field(description="Relative difference of the first two.")  # type: ignore[prop-decorator]
    @property
    def deviation(self) -> Finite:
        """Of the server from the reference."""
        return self.server / self.reference - 1


@dataclass(frozen=True)
class Recalled:
    """Shares of right answers."""

    answers: Count
    talking: Annotated[Share | None, says("In a conversation; null when there was none.")]
    alone: Annotated[Share, says("When each is asked alone.")]
    reference: Annotated[Share, says("In this process.")]


@dataclass(frozen=True)
class ServerRow:
    """One server beside the reference."""

    chunk: Annotated[Count, says("Tokens prefilled at once.")]
    page_size: Annotated[Count, says("Tokens.")]
    radix: Annotated[bool, says("Whether prefixes are reused.")]
    tensor_parallel: Annotated[Count, says("Number of GPUs.")]
    engine: Annotated[str | None, says("And version; null with --engine transformers.")]
    dtype: Annotated[str, says("Of weights and activations.")]
    capacity_tokens: Annotated[Count | None, says("That the cache holds; null where it grows.")]
    perplexity: Annotated[Perplexities | None, says("Without reuse; null when not measured.")]
    perplexity_after_hit: Annotated[Perplexities | None, says("Null without a prefix cache.")]
    perplexity_after_hit_without_sinks: Annotated[Number, says("Their first tokens are INT2.")]
    reused_tokens: Annotated[tuple[Count, ...], says("That every hit took from the cache.")]
    recall: Annotated[Recalled | None, says("Null when not measured.")]
    violations: Annotated[tuple[str, ...], says("One line for each violated limit.")]
    largest_difference: Annotated[Number, says("Of log-probabilities, from the reference's.")]


@dataclass(frozen=True)
class FailedServer:
    """A server that gave no answers."""

    server: Annotated[str, says("Its settings in words.")]
    error: Annotated[
        InstanceOf[OscarZooError], PlainSerializer(lambda error: error.message, return_type=str)
    ]


@dataclass(frozen=True)
class ServerReport(Plain):
    """What oscar-zoo eval --engine prints: servers or an OscarCache beside the simulated cache."""

    model: str
    artifact: ServedArtifact
    device: str
    recipe: Annotated[InstanceOf[specs.ServingRecipe], WithJsonSchema({"x-ref": "ServingRecipe"})]
    texts: Annotated[Count, says("For perplexity.")]
    length: Annotated[Count, says("Tokens of the longest.")]
    shared_tokens: Annotated[Count, says("Of each, that a request before it has.")]
    answers: Annotated[Count, says("Questions of recall.")]
    servers: tuple[ServerRow, ...]
    failures: Annotated[tuple[FailedServer, ...], says("Servers that gave no answers.")]
    schema: Literal["oscar-zoo.eval-server/1"] = "oscar-zoo.eval-server/1"

    @property
    def exit_code(self) -> int:
        """0 where every server answered and agrees with the reference, else 1."""
        return int(bool(self.failures) or any(row.violations for row in self.servers))


@dataclass(frozen=True)
class TaskResult:
    """One benchmark."""

    task: str
    answers: Annotated[Path, says("The file of kept answers.")]
    scores: Annotated[
        tuple[Annotated[InstanceOf[specs.Score], WithJsonSchema({"x-ref": "Score"})], ...],
        says("Of INT2, and of FP8 where it was asked; each holds that of BF16 as its baseline."),
    ]


@dataclass(frozen=True)
class BenchmarkReport(Plain):
    """What oscar-zoo eval prints with a benchmark as --task."""

    model: str
    artifact: ServedArtifact
    file: Annotated[Path | None, says("The score file; null where no score can be recorded.")]
    tasks: tuple[TaskResult, ...]
    schema: Literal["oscar-zoo.eval-benchmark/1"] = "oscar-zoo.eval-benchmark/1"


@dataclass(frozen=True)
class Cell:
    """Answers of one place of the map under one cache, each counted as a whole."""

    family: Family
    length: Annotated[Count, says("Tokens of a prompt.")]
    depth: Annotated[
        Share | None, says("Of the fact that is asked for; null where facts lie everywhere.")
    ]
    cache: str
    right: Annotated[Count, says("Answers.")]
    asked: Annotated[int, says("Answers.", ge=1)]

    @computed_field(description="Standard error of the share of right answers.")  # type: ignore[prop-decorator]
    @property
    def stderr(self) -> float:
        """Binomial, with the estimate of Agresti and Coull (The American Statistician 52, 1998),
        which is not 0 where all answers are right."""
        count = self.asked + 4
        share = (self.right + 2) / count
        return math.sqrt(share * (1 - share) / count)


@dataclass(frozen=True)
class LengthRow:
    """One cache at one length."""

    cache: str
    length: Annotated[Count, says("Tokens of a prompt.")]
    share: Annotated[Share, says("Of right answers, mean over the families.")]
    bits_per_element: Annotated[
        float | None,
        says("Of everything that a request of this length occupies; null for a server."),
    ]


@dataclass(frozen=True)
class AskedServer:
    """A server that was asked."""

    url: str
    sglang: Annotated[str, says("Version.")]
    cache_dtype: str
    recipe: Annotated[
        Mapping[str, Any], says("Settings of its INT2 cache by name, as far as it tells them.")
    ]


@dataclass(frozen=True, kw_only=True)
class RulerReport(Plain):
    """What oscar-zoo ruler prints: right answers over length and depth, for each cache. Either the
    model in this process was asked, and the keys of the model are there, or running servers, and
    the key servers is there."""

    model: Maybe[MeasuredModel] = None
    text_sha256: Maybe[Sha256] = None
    sink: Maybe[Count] = None
    recent: Maybe[Count] = None
    clip: Maybe[Clip] = None
    group_size: Maybe[Count] = None
    scale_dtype: Maybe[str] = None
    quantizer: Maybe[str] = None
    chunking: Maybe[str] = None
    torch: Maybe[str] = None
    device: Maybe[str] = None
    servers: Annotated[Maybe[Mapping[str, AskedServer]], says("By the name of the cache.")] = None
    depths: Annotated[Count, says("Number of depths.")]
    samples: Annotated[Count, says("Prompts of a cell.")]
    seed: int
    cells: tuple[Cell, ...]
    rows: Annotated[tuple[LengthRow, ...], Field(serialization_alias="lengths")]
    schema: Literal["oscar-zoo.ruler/1"] = "oscar-zoo.ruler/1"

    @property
    def caches(self) -> tuple[str, ...]:
        """In the order of measuring."""
        return tuple(dict.fromkeys(one.cache for one in self.cells))

    @property
    def families(self) -> tuple[str, ...]:
        """In the order of measuring."""
        return tuple(dict.fromkeys(one.family for one in self.cells))

    @property
    def lengths(self) -> tuple[int, ...]:
        """Ascending."""
        return tuple(sorted({one.length for one in self.cells}))

    @property
    def places(self) -> tuple[float, ...]:
        """Depths, ascending; empty without a family that has depths."""
        return tuple(sorted({one.depth for one in self.cells if one.depth is not None}))

    def share(self, cache: str, **wanted: Any) -> float | None:
        """Of right answers in the cells with these values, such as `family="single"`; `None`
        without one."""
        right, asked = 0, 0
        for one in self.cells:
            if one.cache == cache and all(getattr(one, k) == v for k, v in wanted.items()):
                right, asked = right + one.right, asked + one.asked
        return right / asked if asked else None
