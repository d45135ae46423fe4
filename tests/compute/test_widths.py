"""Bits per layer and side: chosen on a small model, and on the command line."""

import dataclasses
from pathlib import Path

import pytest
from architectures import write_architecture
from tiny_models import EXAMPLE, write_model

from oscar_zoo.artifact.manifest import WIDTHS_NAME, Manifest
from oscar_zoo.artifact.specs import Clip, ServingRecipe, Windows
from oscar_zoo.artifact.width_selection import WidthSelection
from oscar_zoo.compute.estimate import expected_phases
from oscar_zoo.compute.job import compute_artifact
from oscar_zoo.compute.options import Job
from oscar_zoo.compute.outcome import ComputeResult
from oscar_zoo.compute.select import rule
from oscar_zoo.compute.select.widths import Curve, Slot, share
from oscar_zoo.errors import ComputeFailed
from oscar_zoo.evaluate.measure import Measurement
from oscar_zoo.next_step import AddOption

TEXT = EXAMPLE.parents[1] / "text/calibration.txt"
RECIPE = ServingRecipe(
    group_size=16, clip=Clip(k=0.9, v=0.9), windows=Windows(sink=2, recent=8, dtype="bfloat16")
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


def options(model: Path, target: Path, bits: object, **changes: object) -> Job:
    base = Job(
        model=str(model),
        model_name="random",
        calib_data=TEXT,
        calib_tokens=200,
        recipe=RECIPE,
        seq_len=100,
        method="hadamard",
        output=target,
        heldout_tokens=400,
        bits=bits,  # type: ignore[arg-type]
        allow_poor=True,
    )
    return dataclasses.replace(base, **changes)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def result(model: Path, tmp_path_factory: pytest.TempPathFactory) -> ComputeResult:
    """Groups of 16 cost 2 bits beside the codes: from 4 to 6 bits, half a bit for each raise."""
    target = tmp_path_factory.mktemp("out") / "a"
    return compute_artifact(options(model, target, 4.6, method="oscar"))


def block(result: ComputeResult) -> WidthSelection:
    found = WidthSelection.of(result.manifest.fit.selection)
    assert found is not None
    return found


def test_a_budget_raises_what_gains_most(result: ComputeResult) -> None:
    found, recipe = block(result), result.manifest.recipe
    assert result.manifest.schema_ == "oscar-zoo.manifest/2"
    assert result.manifest == Manifest.from_bytes((result.path / "oscar.json").read_bytes())
    assert recipe.widths is not None and recipe.bits_per_element == found.kept.bits == 4.5
    ((layer, side),) = found.raised
    widths = recipe.widths.k if side == "k" else recipe.widths.v
    assert (widths.bits[layer], widths.clip[layer]) == (4, 0.0)
    assert (widths.bits[1 - layer], widths.clip[1 - layer]) == (2, 0.9)
    gains = {"k": found.gains_k or (), "v": found.gains_v or ()}
    assert gains[side][layer] == max(*gains["k"], *gains["v"]) > 0


def test_a_layer_of_latents_gets_the_same_bits_on_both_sides(tmp_path: Path) -> None:
    latents = write_architecture("deepseek_v3", tmp_path / "latents", dtype="float32")
    recipe = RECIPE.model_copy(update={"clip": Clip(k=0, v=0, algorithm="none")})
    # Latents of 128 channels, 4 or 6 bits with their scales, beside 32 of 16 bits.
    target, recipe = tmp_path / "a", recipe.model_copy(update={"group_size": 128})
    budget = (128 * 3.25 + 32 * 16) / 160
    made = compute_artifact(options(latents, target, budget, method="hadamard", recipe=recipe))
    widths, found = made.manifest.recipe.widths, block(made)
    assert widths is not None and widths.k == widths.v
    assert sorted(widths.k.bits) == [2, 2, 4, 4] and len(found.raised) == 2
    assert made.manifest.bits_per_element == pytest.approx(budget) == found.kept.bits
    assert found.gains_v is None and len(found.gains_k or ()) == 4


def test_bits_are_part_of_the_digest_and_of_the_tag(
    result: ComputeResult, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same fit with codes of 2 bits is another artifact, with another name and folder."""
    monkeypatch.chdir(tmp_path)
    plain = dataclasses.replace(options(model, tmp_path, 2, method="oscar"), output=None)
    mixed = dataclasses.replace(plain, bits=4.6)
    two, more = (compute_artifact(one) for one in (plain, mixed))
    assert str(more.id) == f"{two.id}_bits4.5" == str(result.id)
    assert (two.path.name, more.path.name) == (two.tag, more.tag)
    assert more.manifest.digest == result.manifest.digest != two.manifest.digest
    rotations = [{f.path: f.sha256 for f in one.manifest.files} for one in (two, more)]
    assert rotations[1].pop(WIDTHS_NAME) is not None and rotations[0] == rotations[1]


def test_the_curve_goes_from_2_bits_to_4_and_says_what_was_measured(result: ComputeResult) -> None:
    steps = block(result).steps
    assert [step.bits for step in steps] == [4.0, 4.5, 5.0, 5.5, 6.0]
    assert len({(step.layer, step.side) for step in steps}) == 5
    verified = [step.verified for step in steps]
    assert [at for at, one in enumerate(verified) if one is not None] == [0, 1, 4]
    first, kept, last = (one for one in verified if one is not None)
    assert (first.divergence or 0) > (kept.divergence or 0) > (last.divergence or 0) > 0
    assert steps[1].predicted == pytest.approx(kept.divergence, rel=0.3)  # from half of the text
    assert None not in (first.change_percent, kept.change_percent)  # two rows that people compare
    assert (first.recall is None) == (kept.recall is None)
    assert block(result).bits_at["8192"] == pytest.approx(4.5 + 16 * 10 / 8192)


def test_4_bits_everywhere_measure_no_single_raise(model: Path, tmp_path: Path) -> None:
    phases: set[str] = set()
    found = compute_artifact(
        options(model, tmp_path / "a", 4.0), progress=lambda *news: phases.add(news[2])
    )
    assert found.manifest.recipe.bits_per_element == 6
    told = block(found)
    assert (len(told.steps), told.chosen, told.gains_k) == (2, 1, None)
    assert all(one.verified and one.verified.change_percent is not None for one in told.steps)
    assert {"bits by layer", "bits verified"} < phases


@pytest.fixture
def strict_gates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Codes of 2 bits of the example model fail the gate of perplexity, those of 4 bits pass."""
    monkeypatch.setattr(rule, "PERPLEXITY_PASS", 0.25)
    monkeypatch.setattr(rule, "DIVERGENCE_PASS", 0.0025)
    monkeypatch.setattr(rule, "PERPLEXITY_FAIL", 0.25)
    monkeypatch.setattr(rule, "CHANCE", 0.0)


def chosen_freely(target: Path, **changes: object) -> Job:
    windows = Windows(sink=16, recent=32, dtype="bfloat16")
    free: dict[str, object] = {
        "recipe": ServingRecipe(group_size=64, clip=Clip(k=0.96, v=0.92), windows=windows),
        "method": "auto",
        "tune": False,
        "allow_poor": False,
        "dtype": "float32",
        "calib_tokens": 1024,
        "seq_len": 512,
        "heldout_tokens": 2048,
    }
    return options(EXAMPLE, target, **{"bits": 2, **free, **changes})


def test_layers_get_more_bits_where_2_fail_unasked(strict_gates: None, tmp_path: Path) -> None:
    wanted = chosen_freely(tmp_path / "a", bits=None)
    told: list[str] = []
    found = compute_artifact(wanted, progress=lambda *news: told.append(news[2]))
    assert found.choice is not None and found.choice.raised
    assert {phase.name for phase in expected_phases(wanted)} >= set(told)
    assert found.choice.chosen.gate == "fail" and found.choice.served.gate == "pass"
    bits = found.manifest.recipe.bits_per_element
    assert 2.5 < bits <= 4.5
    (note,) = (note for note in found.notes if "were chosen, because codes of 2 bits" in note)
    assert f"{bits:.2f} bits an element" in note and f"{1 - 2.5 / bits:.0%} fewer tokens" in note
    poor = compute_artifact(chosen_freely(tmp_path / "b", bits=None, allow_poor=True))
    assert poor.manifest.recipe.widths is None


def test_2_bits_that_were_asked_for_are_refused_with_the_budget_that_passes(
    strict_gates: None, tmp_path: Path
) -> None:
    wanted, told = chosen_freely(tmp_path / "a"), set[str]()
    with pytest.raises(ComputeFailed, match="raises perplexity") as caught:
        compute_artifact(wanted, progress=lambda *news: told.add(news[2]))
    assert {phase.name for phase in expected_phases(wanted)} >= told
    assert caught.value.next_step == AddOption("--bits", "3.25")
    assert not (tmp_path / "a").exists()


def measured(*sums: float) -> Measurement:
    """Of prompts with ten positions each."""
    return Measurement(sum(sums) / (10 * len(sums)), tuple((one, 10) for one in sums))


BASE = measured(10.0, 12.0, 11.0, 13.0)


def slot(index: int, *gains: float, cost: float = 0.25) -> Slot:
    """A slot that alone takes `gains` away from the prompts of `BASE`."""
    left = [total - gain for (total, _), gain in zip(BASE.parts, gains, strict=True)]
    found = share(BASE, measured(*left))
    return Slot(index, "k", cost, found, found)


GREAT, GOOD, SMALL = slot(0, 6, 6, 6, 6), slot(1, 3, 2, 3, 2), slot(2, 0.5, 1, 0.5, 1)
HARMFUL = slot(3, -1, 0.5, -1, 0.5)


def order(curve: Curve) -> list[int]:
    return [one.index for one in curve.slots]


def test_slots_come_in_the_order_of_what_they_take_away_for_their_bits() -> None:
    curve = Curve.of(BASE, 2.5, [SMALL, HARMFUL, GOOD, GREAT])
    assert order(curve) == [0, 1, 2, 3]
    assert [curve.bits(steps) for steps in range(5)] == [2.5, 2.75, 3.0, 3.25, 3.5]
    dear = slot(0, 6, 6, 6, 6, cost=1.0)
    assert order(Curve.of(BASE, 2.5, [dear, GOOD])) == [1, 0]


def test_every_prompt_counts_alike() -> None:
    """However large its divergence is."""
    base = measured(1.0, 100.0)
    assert share(base, measured(0.5, 100.0)) == pytest.approx(0.25)
    assert share(base, measured(1.0, 90.0)) == pytest.approx(0.05)
    assert share(measured(0.0, 2.0), measured(1.0, 1.0)) == pytest.approx(0.25)
    assert rule.typical(measured(1.0, 1.0, 1.0, 16.0)) == pytest.approx(0.2)


def test_predictions_add_single_shares_up_and_stop_at_nothing() -> None:
    curve = Curve.of(BASE, 2.5, [GREAT, GOOD, SMALL, HARMFUL])
    assert curve.predicted(0).value == pytest.approx(BASE.value)
    left = 1 - GREAT.of_text - GOOD.of_text
    assert curve.predicted(2).value == pytest.approx(left * BASE.value)
    assert curve.predicted(2).parts[0] == (pytest.approx(left * 10.0), 10)
    more = Curve.of(BASE, 2.5, [GREAT, slot(5, 6, 6, 6, 6), GOOD])
    assert more.predicted(3).value == 0


@pytest.mark.parametrize(
    ("budget", "steps"), [(2.5, 0), (2.74, 0), (2.75, 1), (3.1, 2), (3.4, 3), (3.5, 4), (9, 4)]
)
def test_a_budget_is_never_exceeded_nor_spent_on_harm(budget: float, steps: int) -> None:
    curve, found = Curve.of(BASE, 2.5, [GREAT, GOOD, SMALL, HARMFUL]).within(budget)
    assert found == steps
    assert curve.bits(found) <= max(budget, 2.5)
    assert order(curve) == [0, 1, 2, 3]
