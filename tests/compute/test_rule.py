"""The rule of `auto` on numbers of our own: who leaves early, who is a finalist, who is kept, and
what fails."""

import math
from collections.abc import Sequence
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
    race,
    recall_gate,
    substitutes,
    whole,
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


ALL, MOST, FEW = (digits(*right) for right in ((40,) * 4, (39,) * 4, (30, 31, 30, 31)))
NOISY, SOME = digits(40, 40, 40, 30), digits(38, 38, 39, 38)
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
        # its best clip
        ([trial("oscar", 2.0006, clip=0.9), trial("oscar", 2.0004), trial("wush", 2.0)], 1),
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


def test_finalists_equal_the_lowest_and_others_come_where_they_may_be_judged_better() -> None:
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
    for recall, more in ((ALL, []), (MOST, []), (FEW, [2])):
        told = [*trials[:4], replace(trials[4], recall=recall), trials[5]]
        assert substitutes(told, [4], BF16) == more


def test_of_clips_with_equal_perplexity_the_one_that_retrieves_best_comes_first() -> None:
    clips = [
        trial("oscar", 2 + n / 1e5, clip=n / 100, retrieval=abs(n - 95) + 0.1)
        for n in range(88, 98)
    ]
    assert finalists([*clips, trial("wush", 2.0)])[:2] == [10, 7]
    far = [
        trial("oscar", 2.02, clip=0.98, retrieval=0.01),  # and 0.9 % more perplexity
        trial("oscar", 2.011, clip=0.9, retrieval=0.4),
        trial("oscar", 2.0115, clip=0.94, retrieval=0.2),
        trial("wush", 2.0, FEW),
    ]
    assert substitutes(far, [3], BF16) == [2]


def test_without_perplexity_the_least_output_error_is_kept() -> None:
    def only(method: str, *output: float) -> Trial:
        return Trial(method, errors(*output))

    apart = [only("hadamard", 0.2, 0.1), only("oscar", 0.1, 0.1), only("wush", 0.05, 0.05)]
    near = [only("hadamard", 0.2), only("oscar", 0.104), only("wush", 0.1)]
    assert [best_by_error(trials)[0] for trials in (apart, near)] == [2, 1]


@pytest.mark.parametrize(
    ("rise", "verdict"),
    [(-0.01, "pass"), (0.004, "pass"), (0.015, "warn"), (0.08, "fail"), (900, "fail")],
)
def test_the_gate_on_perplexity(rise: float, verdict: str) -> None:
    gate = perplexity_gate(nats(2 + rise, 2 + rise), BF16.perplexity)
    assert gate.result == verdict
    assert gate.value <= LARGEST
    assert gate.value == pytest.approx(min(100 * math.expm1(min(rise, 20)), LARGEST))


@pytest.mark.parametrize(
    ("found", "verdict"),
    [(ALL, "pass"), (MOST, "warn"), (LESS, "pass"), (FEW, "fail"), (NOISY, "pass")],
)
def test_the_gate_on_recall_counts_what_exceeds_chance(found: Measurement, verdict: str) -> None:
    gate = recall_gate(found, ALL)
    assert gate.result == verdict
    assert gate.value == pytest.approx(100 * (1 - found.value))


SEQUENCES = 8


OWN = nats(*(2.0,) * SEQUENCES)


def offer(method: str, *clips: float) -> list[Trial]:
    """Trials of a method; stronger clips have less retrieval error."""
    return [Trial(method, errors(clip=clip, retrieval=clip)) for clip in clips]


class Text:
    """Held-out text on which every method and clip has its own loss; counts what is measured."""

    def __init__(self, rises: dict[tuple[str, float], float]) -> None:
        self.rises = rises
        self.passes: list[tuple[str, float]] = []

    def measure(self, trial: Trial, sequences: int) -> Trial:
        done = 0 if trial.perplexity is None else len(trial.perplexity.parts)
        key = (trial.method, trial.errors.clip.k)
        self.passes += [key] * (sequences - done)
        rise = self.rises[key]
        kl = Measurement(rise, ((100 * rise, 100),))
        return replace(trial, perplexity=nats(*(2 + rise,) * sequences), divergence=kl)

    def race(self, *offered: list[Trial], finer: Sequence[Trial] = ()) -> list[Trial]:
        def more(names: Sequence[str]) -> list[Trial]:
            return [trial for trial in finer if trial.method in names]

        clips = {trials[0].method: trials for trials in offered}
        return race(OWN, self.measure, more, clips)


def measured(trials: Sequence[Trial]) -> dict[tuple[str, float], int]:
    return {
        (one.method, one.errors.clip.k): len(one.perplexity.parts) if one.perplexity else 0
        for one in trials
    }


def test_what_cannot_win_leaves_after_a_quarter() -> None:
    rises = {("wush", 0.9): 0.003, ("wush", 0.96): 0.004, ("wush", 0.0): 0.02}
    rises |= {("wush", 0.94): 0.0035, ("identity", 0.0): 5.0, ("hadamard", 0.9): 0.5}
    text = Text(rises)
    found = text.race(
        offer("identity", 0.0),
        offer("hadamard", 0.9, 0.96, 0.0),
        offer("wush", 0.9, 0.96, 0.0),
        finer=[*offer("hadamard", 0.94), *offer("wush", 0.94)],
    )
    assert measured(found) == {
        ("identity", 0.0): 2,
        ("hadamard", 0.9): 2,
        ("wush", 0.9): 8,
        ("wush", 0.96): 8,
        ("wush", 0.0): 4,
        ("wush", 0.94): 8,
    }
    assert len(text.passes) == 2 + 2 + 8 + 8 + 4 + 8  # nothing twice
    assert [one.method for one in found] == ["identity", "hadamard", *["wush"] * 4]
    assert [whole(one, OWN) for one in found].count(True) == 3


def test_methods_that_may_be_equal_all_reach_the_end() -> None:
    """Each with one clip, the one that is more accurate far back; no other has room."""
    names = ("hadamard", "oscar", "oscar-exact", "oscar-per-head", "wush", "wush-tuned")
    rises = {(name, clip): 0.001 + 0.0005 * at for at, name in enumerate(names) for clip in (0.9,)}
    rises |= {(name, 0.96): rise * 1.05 for (name, _), rise in rises.items()}
    text = Text(rises)
    found = text.race(*(offer(name, 0.96, 0.9) for name in names))
    lasting = {one.method: one.errors.clip.k for one in found if whole(one, OWN)}
    assert lasting == dict.fromkeys(names, 0.9)


def test_a_method_that_gets_worse_leaves_later() -> None:
    """A clip other than its first one may save a method, and the others may leave it behind."""
    rises = {("oscar", 0.9): 0.006, ("oscar", 0.96): 0.009, ("wush", 0.9): 0.003}
    text = Text(rises | {("wush", 0.96): 1e-5})
    found = measured(text.race(offer("oscar", 0.9, 0.96), offer("wush", 0.9, 0.96)))
    assert found == {key: 4 if key[0] == "oscar" else 8 for key in text.rises}
