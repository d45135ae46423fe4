"""Benchmarks known by name: which task of the harness each one is, and how it is asked.

A server answers in chat form. Where the prompt of the harness does not say how the answer must look
so that its filter finds it, one sentence is added. That sentence is part of the benchmark here and
of the key under which answers are kept.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from oscar_zoo.errors import UsageError

Kind = Literal["generated", "choice"]

_BOXED = "\nPlease reason step by step, and put your final answer within \\boxed{}."
_LETTER = (
    "What is the correct answer to this question: {{Question}}\nChoices:\n(A) {{choice1}}\n"
    "(B) {{choice2}}\n(C) {{choice3}}\n(D) {{choice4}}\nThink step by step, then finish with the"
    ' line "The answer is (X).", where X is the letter of your choice.'
)
_CODE = (
    "Complete this Python function. Answer with the whole function in one code block.\n"
    "```python\n{{prompt}}\n```"
)


@dataclass(frozen=True)
class Benchmark:
    """One benchmark: metric and filter are the harness's.

    Attributes:
        file: the task's configuration, below the harness's folder of tasks.
        kind: `choice`: log-probabilities of the choices are compared.
        cap: tokens that an answer may have, with its reasoning, unless the user says otherwise.
        measures: what the score is called in records.
        prompt: template in place of the harness's.
        scored_by: file of a task whose function judges the answer instead.
        fewshot: examples before the question, when data comes from the hub.
        gated: page on which the terms of the data must be accepted.
        runs_code: whether judging runs what the model wrote.
        calibration_name: how manifests call the set when calibration overlaps with it.
    """

    name: str
    file: str
    metric: str = "exact_match"
    filter: str = "none"
    kind: Kind = "generated"
    cap: int = 32768
    measures: str = "accuracy"
    prompt: str | None = None
    scored_by: str | None = None
    fewshot: int = 0
    gated: str | None = None
    runs_code: bool = False
    calibration_name: str | None = None


def _gpqa(subset: str) -> Benchmark:
    return Benchmark(
        f"gpqa_{subset}",
        f"gpqa/cot_zeroshot/gpqa_{subset}_cot_zeroshot.yaml",
        filter="flexible-extract",
        prompt=_LETTER,
        gated="https://huggingface.co/datasets/Idavidrein/gpqa",
        calibration_name=f"gpqa_{subset}",
    )


def _aime(year: int) -> Benchmark:
    return Benchmark(
        f"aime{year}",
        f"aime/aime{year}.yaml",
        prompt="{{problem}}" + _BOXED if year == 25 else "{{Problem}}" + _BOXED,
        calibration_name=f"aime_20{year}",
    )


SAMPLE = "sample"
"""The freely licensed sample in GPQA's format that is part of this package."""
MMLU = "mmlu"
_MMLU_FILE = "mmlu/default/mmlu_{}.yaml"
_MMLU_SUBJECT = re.compile(r"mmlu_([a-z_]+)")

BENCHMARKS: Mapping[str, Benchmark] = {
    one.name: one
    for one in (
        _gpqa("diamond"),
        _gpqa("main"),
        _gpqa("extended"),
        _aime(24),
        _aime(25),
        Benchmark(
            "math500",
            "hendrycks_math/hendrycks_math500.yaml",
            prompt="{{problem}}" + _BOXED,
            scored_by="aime/aime25.yaml",
            calibration_name="math_500",
        ),
        Benchmark("gsm8k", "gsm8k/gsm8k-cot-zeroshot.yaml", filter="flexible-extract", cap=16384),
        Benchmark(
            "humaneval",
            "humaneval/humaneval.yaml",
            metric="pass@1",
            filter="create_test",
            measures="pass@1",
            prompt=_CODE,
            runs_code=True,
            calibration_name="humaneval",
        ),
        Benchmark(
            "ifeval",
            "ifeval/ifeval.yaml",
            metric="prompt_level_strict_acc",
            measures="prompt-level strict accuracy",
            cap=16384,
        ),
        Benchmark(MMLU, _MMLU_FILE, metric="acc", kind="choice", fewshot=5),
        Benchmark(
            SAMPLE,
            "gpqa/cot_zeroshot/gpqa_main_cot_zeroshot.yaml",
            filter="flexible-extract",
            prompt=_LETTER,
            cap=2048,
        ),
    )
}
NAMES = (*BENCHMARKS, "mmlu_SUBJECT")
"""For people; `mmlu_anatomy` is one subject of MMLU."""


def is_benchmark(name: str) -> bool:
    """Whether `name` is one of `NAMES`."""
    return name in BENCHMARKS or bool(_MMLU_SUBJECT.fullmatch(name))


def benchmark(name: str) -> Benchmark:
    """The benchmark called `name`; raises `UsageError`, which lists all names."""
    if name in BENCHMARKS:
        return BENCHMARKS[name]
    subject = _MMLU_SUBJECT.fullmatch(name)
    if subject is None:
        raise UsageError(f"no such task: {name}.", hint=f"tasks: {', '.join(NAMES)}")
    return Benchmark(name, _MMLU_FILE.format(subject[1]), metric="acc", kind="choice", fewshot=5)
