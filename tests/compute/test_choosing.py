"""What `auto` keeps, and why: on the example model for real, and the rule on numbers of our own."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest

from oscar_zoo.artifact.specs import Clip, ServingRecipe
from oscar_zoo.compute.capture.transformers import capture
from oscar_zoo.compute.choosing import Choice, _best, choose
from oscar_zoo.compute.data import CalibrationData, HeldOut, load_calibration
from oscar_zoo.compute.fit import METHODS, FitResult, Fits, fit_all
from oscar_zoo.compute.moments import Moments
from oscar_zoo.errors import ComputeFailed, UsageError
from oscar_zoo.evaluate.models import LoadedModel, load_model
from oscar_zoo.evaluate.tasks.base import Measurement

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
RECIPE = ServingRecipe(group_size=64, clip=Clip(k=0.96, v=0.92))


@pytest.fixture(scope="module")
def loaded() -> Iterator[LoadedModel]:
    yield load_model(str(EXAMPLES / "models" / "tiny-qwen3-hard"))


@pytest.fixture(scope="module")
def data(loaded: LoadedModel) -> CalibrationData:
    source = EXAMPLES / "text" / "calibration.txt"
    return load_calibration(source, loaded.tokenizer, tokens=2048, seq_len=512, heldout_tokens=4096)


@pytest.fixture(scope="module")
def moments(loaded: LoadedModel, data: CalibrationData) -> Moments:
    return capture(loaded, data, needs=frozenset(need for method in METHODS.values() for need in method.needs))


def only(moments: Moments, *names: str) -> Fits:
    return fit_all(moments, names)


def held(data: CalibrationData, count: int = 2) -> HeldOut:
    assert data.heldout is not None
    return HeldOut(data.heldout.sequences[:count])


def test_on_outlier_channels_wush_is_kept_and_costs_little(
    loaded: LoadedModel, data: CalibrationData, moments: Moments
) -> None:
    found = choose(loaded, held(data), only(moments, "hadamard", "oscar", "wush"), RECIPE)
    assert found.chosen.method == found.result.method.name == "wush"
    assert found.chosen.change_percent < 3
    assert min(t.change_percent for t in found.trials if t.method != "wush") > 20
    assert found.recipe.clip == Clip(k=found.chosen.clip_k, v=found.chosen.clip_v)
    assert found.selection["chosen"]["method"] == "wush"
    assert len(found.selection["candidates"]) == len(found.trials)


def test_a_poor_best_is_refused_unless_it_is_wanted(
    loaded: LoadedModel, data: CalibrationData, moments: Moments
) -> None:
    fits = only(moments, "hadamard")
    with pytest.raises(ComputeFailed, match="hadamard") as caught:
        choose(loaded, held(data, 1), fits, RECIPE, fixed_clip=True)
    assert "--allow-poor" in (caught.value.hint or "")
    found = choose(loaded, held(data, 1), fits, RECIPE, fixed_clip=True, allow_poor=True)
    assert found.chosen.gate == "fail"
    assert len(found.trials) == 1


def test_short_held_out_text_is_refused(loaded: LoadedModel, data: CalibrationData, moments: Moments) -> None:
    short = HeldOut(tuple(sequence[:300] for sequence in held(data).sequences))
    with pytest.raises(UsageError, match="320 tokens"):
        choose(loaded, short, only(moments, "hadamard"), RECIPE)


def plan(name: str, clip: float = 0.96) -> tuple[FitResult, ServingRecipe]:
    """A fit that is never looked into."""
    result = RESULTS.setdefault(name, FitResult(METHODS[name], None, None, {}, None))  # type: ignore[arg-type]
    return result, RECIPE.model_copy(update={"clip": Clip(k=clip, v=clip)})


RESULTS: dict[str, FitResult] = {}


def measured(*nats: float) -> Measurement:
    """Negative log likelihoods per token of sequences of 100 tokens."""
    return Measurement(math.exp(sum(nats) / len(nats)), tuple((100 * n, 100) for n in nats))


@pytest.mark.parametrize(
    ("values", "kept"),
    [
        ({"oscar": (2.01, 2.01), "wush": (2.0, 2.0)}, "wush"),  # clearly better
        ({"oscar": (2.0009, 2.0009), "wush": (2.0, 2.0)}, "oscar"),  # within 0.1 %
        ({"oscar": (2.01, 1.994), "wush": (2.0, 2.0)}, "oscar"),  # within its error and 0.25 %
        ({"oscar": (2.1, 1.96), "wush": (2.0, 2.0)}, "wush"),  # noisy, and 3 % apart
        ({"identity": (1.0, 1.0), "wush": (2.0, 2.0)}, "wush"),  # not to be published
    ],
)
def test_of_equal_methods_the_one_that_asks_less_is_kept(values: dict[str, tuple[float, ...]], kept: str) -> None:
    plans = [plan(name) for name in METHODS if name in values]
    found = [measured(*values[result.method.name]) for result, _ in plans]
    assert plans[_best(plans, found)][0].method.name == kept


def test_of_one_methods_clips_the_best_is_kept() -> None:
    plans = [plan("oscar", 0.96), plan("oscar", 0.9), plan("wush")]
    found = [measured(2.0006, 2.0006), measured(2.0004, 2.0004), measured(2.0, 2.0)]
    assert _best(plans, found) == 1


def test_a_choice_is_plain_data(loaded: LoadedModel, data: CalibrationData, moments: Moments) -> None:
    found: Choice = choose(loaded, held(data, 1), only(moments, "wush"), RECIPE, fixed_clip=True, allow_poor=True)
    assert found.quality["gates"][0]["result"] == found.chosen.gate
    assert found.reason == "the lowest perplexity on held-out text"
