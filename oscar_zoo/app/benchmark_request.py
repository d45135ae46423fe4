"""What a benchmark asks of which servers, and the one place of the defaults."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oscar_zoo.artifact.specs import Clip
from oscar_zoo.errors import UsageError
from oscar_zoo.evaluate.benchmarks.tasks import Benchmark, benchmark

if TYPE_CHECKING:
    from oscar_zoo.evaluate.benchmarks.client import Generation
    from oscar_zoo.models.loading import Dtype

REPEATS = 3
"""Seeds of answers that are drawn at random, unless the user says otherwise."""
CONTEXT_SHARE = 0.8
"""Of the model's context that an answer may fill by default; the rest is for the prompt."""


@dataclass(frozen=True)
class BenchmarkRequest:
    """What to ask.

    Attributes:
        artifact: name of an artifact, or its folder.
        tasks: benchmarks by name, see `evaluate.benchmarks.tasks`.
        model: folder, name of the zoo or hub id; `None` for the artifact's base model.
        data: rows in place of the data set of the only task.
        fp8: measure an FP8 cache too.
        seeds: repeats; `None` for 3, or 1 where answers are not drawn at random.
        limit: questions of every task at most.
        concurrency: questions at a time.
        max_new_tokens: tokens of an answer; `None` for the benchmark's own cap, within the model's
            context.
        temperature, top_p: in place of those in `generation_config.json`.
        thinking: what the chat template is told about thinking; `None` for its default.
        run_code: whether programs that the model writes may run here.
        url: a running INT2 server to ask instead of starting one.
        base_url: a running BF16 server to ask beside `url`.
        fresh: drop the answers of an earlier run.
        output: file for the scores; `None` for one in the state folder.
        clip: clip ratios in place of the recipe's.
        device, dtype, revision, hubs, extra, timeout, again: as for `ServerEvaluateRequest`.
    """

    artifact: str | Path
    tasks: tuple[str, ...]
    model: str | None = None
    data: Path | None = None
    fp8: bool = False
    seeds: int | None = None
    limit: int | None = None
    concurrency: int = 16
    max_new_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    thinking: bool | None = None
    run_code: bool = False
    url: str | None = None
    base_url: str | None = None
    fresh: bool = False
    output: Path | None = None
    clip: Clip | None = None
    device: str | None = None
    dtype: Dtype = "auto"
    revision: str | None = None
    hubs: tuple[str, ...] = ()
    extra: tuple[str, ...] = ()
    timeout: float = 1800.0
    again: str = field(default="--model FOLDER", compare=False)

    def benchmarks(self) -> tuple[Benchmark, ...]:
        """The benchmarks to ask."""
        found = tuple(benchmark(name) for name in dict.fromkeys(self.tasks))
        if self.data is not None and len(found) != 1:
            raise UsageError("--data is the data of one task.", hint="give one --task")
        if self.base_url is not None and self.url is None:
            raise UsageError(
                "--base-url is the BF16 server beside an INT2 server.", hint="give --url as well"
            )
        if self.url is not None and (self.extra or self.fp8):
            raise UsageError(
                "--url measures servers as they are.", hint="leave out what is for new ones"
            )
        for one in found:
            if one.runs_code and not self.run_code:
                raise UsageError(
                    f"{one.name} runs programs that the model writes, as this user.",
                    hint="on a machine where that may happen, add --run-model-code",
                )
        return found

    def caches(self) -> tuple[str, ...]:
        """The caches to ask, in order."""
        if self.url is not None and self.base_url is None:
            return ("int2",)
        return ("int2", "bf16", "fp8") if self.fp8 else ("int2", "bf16")


def generation_of(
    request: BenchmarkRequest, one: Benchmark, authors: dict[str, Any], context: int | None
) -> Generation:
    """How answers to a benchmark are generated.

    Args:
        context: tokens that the model reads, where it is known.
    """
    from oscar_zoo.evaluate.benchmarks.client import Generation

    sampled = bool(authors.get("do_sample")) or request.temperature is not None
    temperature = request.temperature
    if temperature is None:
        temperature = float(authors.get("temperature") or 1.0) if sampled else 0.0
    top_p = request.top_p if request.top_p is not None else authors.get("top_p")
    cap = request.max_new_tokens
    if cap is None:
        cap = one.cap if context is None else min(one.cap, int(CONTEXT_SHARE * context))
    return Generation(
        max_new_tokens=cap,
        temperature=temperature,
        top_p=float(1.0 if top_p is None else top_p),
        top_k=int(authors.get("top_k") or -1),
        min_p=float(authors.get("min_p") or 0.0),
        repetition_penalty=float(authors.get("repetition_penalty") or 1.0),
        thinking=request.thinking,
    )


def seeds_of(request: BenchmarkRequest, one: Benchmark, generation: Generation) -> tuple[int, ...]:
    """The seed of every repeat; raises `UsageError` for repeats that would all be the same."""
    drawn = one.kind == "generated" and generation.temperature > 0
    if not drawn and (request.seeds or 1) > 1:
        raise UsageError(
            f"every repeat of {one.name} would be the same: nothing is drawn at random.",
            hint="give --temperature, or leave --seeds out",
        )
    return tuple(range(request.seeds or REPEATS)) if drawn else (0,)
