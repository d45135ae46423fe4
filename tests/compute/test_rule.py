"""The rule of `auto` on numbers of our own: who is a finalist, who is kept, and what fails."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from oscar_zoo.artifact.specs import Clip
from oscar_zoo.compute.select.attention_errors import ClipErrors
from oscar_zoo.compute.select.rule import (
    FINALISTS,
    LARGEST,
    Base,
    Trial,
    best,
    best_by_error,
    finalists,
    perplexity_gate,
    recall_gate,
    substitutes,
)
from oscar_zoo.evaluate.measure import Measurement


def errors(*output: float, clip: float = 0.96, retrieval: float = 0.1) -> ClipErrors:
    return ClipErrors(Clip(k=clip, v=clip), output or (0.1,), (0.1,), (0.1,), (0.1,), retrieval)


def nats(*values: float) -> Measurement:
    """Perplexity from the negative log likelihoods per token of sequences of 100 tokens."""
    mean = sum(values) / len(values)
    return Measurement(
        math.exp(mean) if mean < 700 else math.inf, tuple((100 * n, 100) for n in values)
    )


def digits(*right: int) -> Measurement:
    """Recall from the digits that were right in prompts of 40."""
    return Measurement(sum(right) / 40 / len(right), tuple((n, 40) for n in right))


def trial(
    method: str,
    perplexity: float | tuple[float, ...],
    recall: Measurement | None = None,
    clip: float = 0.96,
    retrieval: float = 0.1,
) -> Trial:
    values = perplexity if isinstance(perplexity, tuple) else (perplexity,) * 2
    return Trial(
        method, errors(clip=clip, retrieval=retrieval), perplexity=nats(*values), recall=recall
    )


ALL, MOST, FEW, NOISY = (
    digits(40, 40, 40, 40),
    digits(39, 39, 39, 39),
    digits(30, 31, 30, 31),
    digits(40, 40, 40, 30),
)
SOME = digits(38, 38, 39, 38)
LESS = digits(40, 38, 40, 40)  # 1.25 points, each as likely as its error
FEWER = digits(40, 38, 39, 39)  # 2.5 points, 0.9 of them by chance
BF16 = Base(nats(2.0, 2.0), ALL)


@pytest.mark.parametrize(
    ("trials", "kept"),
    [
        ([trial("oscar", 2.01), trial("wush", 2.0)], 1),  # clearly better
        ([trial("oscar", 2.0009), trial("wush", 2.0)], 0),  # within 0.1 %
        ([trial("oscar", (2.01, 1.994)), trial("wush", 2.0)], 0),  # within its error and 0.25 %
        ([trial("oscar", (2.1, 1.96)), trial("wush", 2.0)], 1),  # noisy, and 3 % apart
        (
            [trial("oscar", 2.0006, clip=0.9), trial("oscar", 2.0004), trial("wush", 2.0)],
            1,
        ),  # its best clip
        ([trial("wush", 2.0005), trial("wush-tuned", 2.0)], 1),  # ask the same: the lower one
        ([trial("oscar", 2.0005), trial("wush", 2.0004), trial("wush-tuned", 2.0)], 0),
    ],
)
def test_of_equal_methods_the_one_that_asks_less_is_kept(trials: list[Trial], kept: int) -> None:
    assert best(trials, Base(nats(2.0, 2.0)))[0] == kept


OSCAR_OR_WUSH = {
    "equal, forgets more": (2.0005, FEW, ALL, 1, "the lowest perplexity"),
    "2.5 points, all alike": (2.0005, MOST, ALL, 1, "the lowest perplexity"),
    "2.5 points, one error is 0.9": (2.0005, FEWER, ALL, 1, "the lowest perplexity"),
    "1.3 points, from one prompt": (2.0005, LESS, ALL, 0, "asks less"),
    "6 points, from one prompt": (2.0005, NOISY, ALL, 0, "asks less"),
    "1.5 % passes, FEW does not": (2.015, ALL, FEW, 0, "recalls too little"),
    "a remark beats a failure": (2.05, ALL, FEW, 0, "recalls too little"),
    "two failures": (2.5, ALL, FEW, 1, "the lowest perplexity"),
    "6 points, by chance": (2.004, NOISY, SOME, 1, "the lowest perplexity"),
}
"""Perplexity of `oscar`, where that of `wush` is 2.0, recall of both, who is kept, and why."""
CLIPS = {
    "equal clips": (trial("wush", 2.0, NOISY), trial("wush", 2.0005, ALL, 0.9), 1, "accurate"),
    "chance": (trial("wush", 2.0, ALL, 0.96, 0.3), trial("wush", 2.0005, LESS, 0.9), 1, "distant"),
    "no chance": (trial("wush", 2.0, ALL, 0.96, 0.3), trial("wush", 2.0005, FEWER, 0.9), 0, "low"),
    "of clips too": (trial("wush", 2.0, FEW), trial("wush", 2.0005, ALL, 0.0), 1, "too little"),
}


@pytest.mark.parametrize("name", OSCAR_OR_WUSH)
def test_what_forgets_does_not_win(name: str) -> None:
    nats_of_oscar, oscar, wush, kept, why = OSCAR_OR_WUSH[name]
    at, reason = best([trial("oscar", nats_of_oscar, oscar), trial("wush", 2.0, wush)], BF16)
    assert at == kept and why in reason


@pytest.mark.parametrize("name", CLIPS)
def test_a_clip_that_forgets_does_not_win(name: str) -> None:
    *trials, kept, why = CLIPS[name]
    at, reason = best(trials, BF16)
    assert at == kept and why in reason


def test_finalists_equal_the_lowest_and_others_come_where_none_of_those_passes() -> None:
    trials = [
        trial("hadamard", 2.2),  # fails its gate
        trial("oscar", 2.05, clip=0.9),
        trial("oscar", 2.03),
        trial("wush", 2.0005, clip=0.9),
        trial("wush", 2.0),
        trial("wush", 2.02, clip=0.0),
    ]
    assert finalists(trials) == [4, 3]
    assert finalists(trials[:1]) == [0]
    assert len(finalists([trial("wush", 2.0, clip=n / 100) for n in range(60, 90)])) == FINALISTS
    for recall, more in ((ALL, []), (MOST, [2]), (FEW, [2])):
        assert (
            substitutes([*trials[:4], replace(trials[4], recall=recall), trials[5]], [4], BF16)
            == more
        )


def test_of_clips_with_equal_perplexity_the_one_that_retrieves_best_comes_first() -> None:
    clips = [
        trial("oscar", 2 + n / 1e5, clip=n / 100, retrieval=abs(n - 95) + 0.1)
        for n in range(88, 98)
    ]
    assert finalists([*clips, trial("wush", 2.0)])[:2] == [10, 7]
    far = [
        trial(
            "oscar", 2.02, clip=0.98, retrieval=0.01
        ),  # the least error, and 0.9 % more perplexity
        trial("oscar", 2.011, clip=0.9, retrieval=0.4),
        trial("oscar", 2.0115, clip=0.94, retrieval=0.2),
        trial("wush", 2.0, MOST),
    ]
    assert substitutes(far, [3], BF16) == [2]


def test_without_perplexity_the_least_output_error_is_kept() -> None:
    def only(method: str, *output: float) -> Trial:
        return Trial(method, errors(*output))

    assert (
        best_by_error(
            [only("hadamard", 0.2, 0.1), only("oscar", 0.1, 0.1), only("wush", 0.05, 0.05)]
        )[0]
        == 2
    )
    assert best_by_error([only("hadamard", 0.2), only("oscar", 0.104), only("wush", 0.1)]) == (
        1,
        "as good as wush on held-out text, and it asks less of a server",
    )


@pytest.mark.parametrize(
    ("rise", "verdict"),
    [(-0.01, "pass"), (0.015, "pass"), (0.03, "warn"), (0.08, "fail"), (900, "fail")],
)
def test_the_gate_on_perplexity(rise: float, verdict: str) -> None:
    gate = perplexity_gate(nats(2 + rise, 2 + rise), BF16.perplexity)
    assert gate.result == verdict
    assert gate.value <= LARGEST
    assert gate.value == pytest.approx(min(100 * math.expm1(min(rise, 20)), LARGEST))


@pytest.mark.parametrize(
    ("found", "verdict"),
    [
        (ALL, "pass"),
        (MOST, "warn"),
        (digits(38, 40, 40, 40), "pass"),
        (FEW, "fail"),
        (NOISY, "pass"),
    ],
)
def test_the_gate_on_recall_counts_what_exceeds_chance(found: Measurement, verdict: str) -> None:
    gate = recall_gate(found, ALL)
    assert gate.result == verdict
    assert gate.value == pytest.approx(100 * (1 - found.value))
