"""Candidates leave early, and what could win stays, on numbers of our own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from oscar_zoo.artifact.specs import Clip
from oscar_zoo.compute.select.attention_errors import ClipErrors
from oscar_zoo.compute.select.rule import Trial, race, whole
from oscar_zoo.evaluate.measure import Measurement

SEQUENCES = 8


def nats(*values: float) -> Measurement:
    """Perplexity from the losses per token of sequences of 100 tokens."""
    return Measurement(math.exp(sum(values) / len(values)), tuple((100 * n, 100) for n in values))


BF16 = nats(*(2.0,) * SEQUENCES)


def offer(method: str, *clips: float) -> list[Trial]:
    """Trials of a method; stronger clips have less retrieval error."""
    return [
        Trial(method, ClipErrors(Clip(k=clip, v=clip), (0.1,), (0.1,), (0.1,), (0.1,), clip))
        for clip in clips
    ]


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
        return race(BF16, self.measure, more, clips)


def measured(trials: Sequence[Trial]) -> dict[tuple[str, float], int]:
    return {
        (one.method, one.errors.clip.k): len(one.perplexity.parts) if one.perplexity else 0
        for one in trials
    }


def test_what_cannot_win_leaves_after_a_quarter() -> None:
    text = Text(
        {
            ("identity", 0.0): 5.0,
            ("hadamard", 0.9): 0.5,
            ("wush", 0.9): 0.003,
            ("wush", 0.96): 0.004,
            ("wush", 0.0): 0.02,
            ("wush", 0.94): 0.0035,
        },
    )
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
    assert [whole(one, BF16) for one in found].count(True) == 3


def test_methods_that_may_be_equal_all_reach_the_end() -> None:
    """Each with one clip, the one that is more accurate far back; no other has room."""
    names = ("hadamard", "oscar", "oscar-exact", "oscar-per-head", "wush", "wush-tuned")
    rises = {(name, clip): 0.001 + 0.0005 * at for at, name in enumerate(names) for clip in (0.9,)}
    rises |= {(name, 0.96): rise * 1.05 for (name, _), rise in rises.items()}
    text = Text(rises)
    found = text.race(*(offer(name, 0.96, 0.9) for name in names))
    lasting = {one.method: one.errors.clip.k for one in found if whole(one, BF16)}
    assert lasting == dict.fromkeys(names, 0.9)


def test_a_method_that_gets_worse_leaves_later() -> None:
    """A clip other than its first one may save a method, and the others may leave it behind."""
    text = Text(
        {("oscar", 0.9): 0.006, ("oscar", 0.96): 0.009, ("wush", 0.9): 0.003, ("wush", 0.96): 1e-5},
    )
    found = measured(text.race(offer("oscar", 0.9, 0.96), offer("wush", 0.9, 0.96)))
    assert found == {
        ("oscar", 0.9): 4,
        ("oscar", 0.96): 4,
        ("wush", 0.9): 8,
        ("wush", 0.96): 8,
    }
