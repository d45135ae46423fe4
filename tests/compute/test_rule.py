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
    change_percent,
    finalists,
    output_gates,
    perplexity_gate,
    recall_gate,
    substitutes,
    worst,
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
    return Trial(method, errors(clip=clip, retrieval=retrieval), nats(*values), recall)


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


@pytest.mark.parametrize(
    ("trials", "kept", "why"),
    [
        (
            [trial("oscar", 2.0005, FEW), trial("wush", 2.0, ALL)],
            1,
            "the lowest perplexity",
        ),  # equal, forgets more
        (
            [trial("oscar", 2.0005, MOST), trial("wush", 2.0, ALL)],
            1,
            "the lowest perplexity",
        ),  # 2.5 points, all alike
        (
            [trial("oscar", 2.0005, FEWER), trial("wush", 2.0, ALL)],
            1,
            "the lowest perplexity",
        ),  # 2.5, one error: 0.9
        (
            [trial("oscar", 2.0005, LESS), trial("wush", 2.0, ALL)],
            0,
            "asks less",
        ),  # 1.3 points, from one prompt
        (
            [trial("oscar", 2.0005, NOISY), trial("wush", 2.0, ALL)],
            0,
            "asks less",
        ),  # 6 points, from one prompt
        (
            [trial("oscar", 2.015, ALL), trial("wush", 2.0, FEW)],
            0,
            "recalls too little",
        ),  # 1.5 % passes, FEW does not
        (
            [trial("oscar", 2.05, ALL), trial("wush", 2.0, FEW)],
            0,
            "recalls too little",
        ),  # a remark beats a failure
        (
            [trial("oscar", 2.5, ALL), trial("wush", 2.0, FEW)],
            1,
            "the lowest perplexity",
        ),  # two failures
        (
            [trial("oscar", 2.004, NOISY), trial("wush", 2.0, SOME)],
            1,
            "the lowest perplexity",
        ),  # 6 points, by chance
        (
            [trial("wush", 2.0, NOISY), trial("wush", 2.0005, ALL, clip=0.9)],
            1,
            "its attention to distant tokens is more accurate",
        ),  # equal clips
        (
            [trial("wush", 2.0, ALL, retrieval=0.3), trial("wush", 2.0005, LESS, clip=0.9)],
            1,
            "distant tokens",
        ),  # chance
        (
            [trial("wush", 2.0, ALL, retrieval=0.3), trial("wush", 2.0005, FEWER, clip=0.9)],
            0,
            "the lowest",
        ),  # not
        (
            [trial("wush", 2.0, FEW), trial("wush", 2.0005, ALL, clip=0.0)],
            1,
            "recalls too little",
        ),  # of clips too
    ],
)
def test_what_forgets_does_not_win(trials: list[Trial], kept: int, why: str) -> None:
    at, reason = best(trials, BF16)
    assert at == kept
    assert why in reason


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


def test_a_perplexity_that_is_not_finite_is_a_number() -> None:
    assert change_percent(nats(math.inf, 2.0), BF16.perplexity) == (LARGEST, LARGEST)
    assert change_percent(nats(math.nan, 2.0), BF16.perplexity) == (LARGEST, LARGEST)


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


def test_a_model_without_recall_of_its_own_has_no_gate_on_it() -> None:
    gates = trial("wush", 2.0, FEW).gates(Base(nats(2.0, 2.0)))
    assert [gate.name for gate in gates] == ["perplexity_change_percent"]
    assert worst(gates) == "pass"
    assert worst(()) == "pass"


def test_output_errors_above_those_of_hadamard_are_remarked_on() -> None:
    assert [gate.result for gate in output_gates(errors(0.1, 0.2), errors(0.2, 0.2))] == [
        "pass",
        "pass",
    ]
    assert [gate.result for gate in output_gates(errors(0.3, 0.2), errors(0.2, 0.2))] == [
        "warn",
        "pass",
    ]
    assert [gate.result for gate in output_gates(errors(0.4, 0.01), errors(0.2, 0.2))] == [
        "pass",
        "warn",
    ]
    assert output_gates(errors(0.1), errors(0.0))[0].result == "warn"
