"""One benchmark over one cache after the other: every repeat asked, judged and counted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from oscar_zoo.evaluate.benchmarks import statistics
from oscar_zoo.evaluate.benchmarks.answers import Answer, Answers, Key
from oscar_zoo.evaluate.benchmarks.client import Generation
from oscar_zoo.evaluate.benchmarks.harness import Judged, LoadedTask, judge
from oscar_zoo.evaluate.benchmarks.harness_model import AnswersMissing, Ask, KeptModel

CUT = "length"
"""How an answer ends that the generation cap cut."""


@dataclass(frozen=True)
class Settings:
    """What a run does, beside which cache answers.

    Attributes:
        generation: how answers are generated.
        seeds: one per repeat.
        limit: questions of every part of the task at most, or `None`.
        concurrency: questions at a time.
        run_code: whether programs of the model may run.
    """

    generation: Generation
    seeds: tuple[int, ...]
    limit: int | None = None
    concurrency: int = 16
    run_code: bool = False


@dataclass(frozen=True)
class ArmResult:
    """What one cache answered.

    Attributes:
        arm: `int2`, `bf16` or `fp8`.
        values: `[questions, repeats]`, what each answer was worth.
        used: the answers, in the order of repeats and questions.
    """

    arm: str
    values: statistics.Values
    used: tuple[tuple[Key, Answer], ...]

    @property
    def mean(self) -> statistics.Mean:
        """The score, between 0 and 1."""
        return statistics.mean(self.values)

    @property
    def exhausted_rate(self) -> float:
        """The share of answers that the generation cap cut."""
        return sum(answer.finish == CUT for _, answer in self.used) / len(self.used)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(answer.prompt_tokens for _, answer in self.used)

    @property
    def completion_tokens(self) -> int:
        """Tokens of all answers, with their reasoning."""
        return sum(answer.completion_tokens for _, answer in self.used)

    def longer_than(self, tokens: int) -> float:
        """The share of requests with more than `tokens` tokens, prompt and answer."""
        longer = [a.prompt_tokens + a.completion_tokens > tokens for _, a in self.used]
        return sum(longer) / len(longer)


def run_arm(
    arm: str,
    task: LoadedTask,
    settings: Settings,
    answers: Answers,
    *,
    ask: Ask | None,
    tick: Callable[[], None] = lambda: None,
) -> ArmResult:
    """Every repeat of `task`, asked of the cache `arm`.

    Args:
        ask: asks the server; `None` reads kept answers only.
    """
    judged: list[Sequence[Judged]] = []
    used: list[tuple[Key, Answer]] = []
    for seed in settings.seeds:
        model = KeptModel(
            arm,
            seed,
            settings.generation,
            answers,
            ask=ask,
            concurrency=settings.concurrency,
            tick=tick,
        )
        judged.append(judge(task, model, limit=settings.limit, run_code=settings.run_code))
        used += model.used
    return ArmResult(arm, _values(judged), tuple(used))


def kept_arm(arm: str, task: LoadedTask, settings: Settings, answers: Answers) -> ArmResult | None:
    """As `run_arm` from kept answers alone; `None` when one is missing."""
    try:
        return run_arm(arm, task, settings, answers, ask=None)
    except AnswersMissing:
        return None


def _values(judged: Sequence[Sequence[Judged]]) -> statistics.Values:
    """`[questions, repeats]`; every repeat has the same questions in the same order."""
    order = [(one.part, one.question) for one in judged[0]]
    assert all([(one.part, one.question) for one in repeat] == order for repeat in judged)
    columns = [[one.value for one in repeat] for repeat in judged]
    return np.array(columns, dtype=np.float64).T
