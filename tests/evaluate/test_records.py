"""Score records of measurements: units, errors and what is left out, by measurements made here."""

import math

import pytest
import torch

from oscar_zoo.artifact.names import ArtifactId
from oscar_zoo.artifact.specs import Windows
from oscar_zoo.evaluate.measure import Measurement, Task
from oscar_zoo.evaluate.questions import Perplexity, Recall
from oscar_zoo.evaluate.records import Compared, scores
from oscar_zoo.models.loading import LoadedModel
from oscar_zoo.registry.score_file import ScoreFile

DIGEST = "sha256:" + "a" * 64
SHARED = {"date": "2026-11-24", "source": "oscar-zoo eval NAME"}
AROUND = SHARED | {"dataset_revision": "sha256:" + "b" * 64}, {"artifact_digest": DIGEST}


def recall(answers: int) -> Recall:
    ids, windows = torch.arange(1000), Windows(sink=4, recent=8)
    encode = lambda text: [ord(letter) % 100 for letter in text]  # noqa: E731
    return Recall.from_tokens(
        ids, encode, windows=windows, answers=answers, length=900, unit="token"
    )


def compared(task: Task, before: list[float], after: list[float]) -> Compared:
    """Values of each sequence, over 100 counted tokens."""
    sums = ([(100 * value, 100) for value in values] for values in (before, after))
    bf16, int2 = (Measurement.of(task, parts) for parts in sums)
    return task, bf16, int2


def test_recall_is_in_percent_and_perplexity_in_its_own_unit(model: LoadedModel) -> None:
    perplexity = Perplexity.from_tokens(torch.arange(1000), windows=2, length=100)
    found = scores(
        [compared(recall(16), [1.0, 0.9], [0.9, 0.7]), compared(perplexity, [1, 2], [1.1, 2.1])],
        model,
        *AROUND,
    )
    ScoreFile.of(ArtifactId("tiny", "tag"), DIGEST, found)  # raises where a rule is broken
    first, second = found
    assert (first.value, first.unit, first.n) == (pytest.approx(80.0), "percent", 16)
    assert first.baseline is not None and first.baseline.value == pytest.approx(95.0)
    assert first.paired is not None and first.paired.difference == pytest.approx(-15.0)
    assert first.paired.no_worse_than == pytest.approx(20.0), "the worse of the two prompts"
    assert (second.value, second.unit) == (pytest.approx(math.exp(1.6)), "perplexity")
    assert second.paired is not None and second.paired.no_worse_than > second.paired.difference > 0


def test_one_prompt_has_the_error_of_its_answers_and_one_window_none(model: LoadedModel) -> None:
    window = Perplexity.from_tokens(torch.arange(1000), windows=1, length=100)
    found = scores(
        [compared(recall(2), [1.0], [0.5]), compared(window, [1], [1.1])], model, *AROUND
    )
    ScoreFile.of(ArtifactId("tiny", "tag"), DIGEST, found)
    assert found[0].stderr == pytest.approx(100 * math.sqrt(0.25 / 8))
    assert (found[1].stderr, found[0].paired, found[1].paired) == (None, None, None)


def test_a_number_that_is_not_finite_is_no_record(model: LoadedModel) -> None:
    window = Perplexity.from_tokens(torch.arange(1000), windows=2, length=100)
    assert scores([compared(window, [1, 1], [1, 9999])], model, *AROUND) == ()
