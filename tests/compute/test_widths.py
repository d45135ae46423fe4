"""Bits per layer and side: chosen on a small model, and on the command line."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from tiny_models import EXAMPLE, write_model

from oscar_zoo.artifact.manifest import WIDTHS_NAME, Manifest
from oscar_zoo.artifact.specs import Clip, ServingRecipe, Windows
from oscar_zoo.artifact.width_selection import WidthSelection
from oscar_zoo.cli.main import run
from oscar_zoo.cli.render.computing import print_result
from oscar_zoo.cli.render.described import print_manifest
from oscar_zoo.compute.job import ComputeOptions, ComputeResult, compute_artifact
from oscar_zoo.compute.phases import expected_phases
from oscar_zoo.compute.refit import refit
from oscar_zoo.compute.report.data import ReportData
from oscar_zoo.compute.select import rule
from oscar_zoo.compute.width_wish import WidthWish
from oscar_zoo.errors import ComputeFailed
from oscar_zoo.next_step import AddOption
from oscar_zoo.registry.measured import Measured

TEXT = EXAMPLE.parents[1] / "text/calibration.txt"
RECIPE = ServingRecipe(
    group_size=16, clip=Clip(k=0.9, v=0.9), windows=Windows(sink=2, recent=8, dtype="bfloat16")
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


def options(model: Path, target: Path, wish: WidthWish, **changes: object) -> ComputeOptions:
    base = ComputeOptions(
        model=str(model),
        model_name="random",
        calib_data=TEXT,
        calib_tokens=200,
        recipe=RECIPE,
        seq_len=100,
        method="hadamard",
        output_dir=target,
        heldout_tokens=400,
        widths=wish,
        allow_poor=True,
    )
    return dataclasses.replace(base, **changes)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def result(model: Path, tmp_path_factory: pytest.TempPathFactory) -> ComputeResult:
    """Groups of 16 cost 2 bits beside the codes: from 4 to 6 bits, half a bit for each raise."""
    found = compute_artifact(
        options(model, tmp_path_factory.mktemp("out") / "a", WidthWish(bits=4.6), method="oscar")
    )
    assert found is not None
    return found


def block(result: ComputeResult) -> WidthSelection:
    found = WidthSelection.of(result.manifest.fit.selection)
    assert found is not None
    return found


def test_a_budget_raises_what_gains_most(result: ComputeResult) -> None:
    found, recipe = block(result), result.manifest.recipe
    assert result.manifest.schema_ == "oscar-zoo.manifest/2"
    assert result.manifest == Manifest.from_bytes((result.path / "oscar.json").read_bytes())
    assert recipe.widths is not None
    assert recipe.bits_per_element == found.kept.bits == 4.5
    assert len(found.raised) == 1
    ((layer, side),) = found.raised
    widths = recipe.widths.k if side == "k" else recipe.widths.v
    assert (widths.bits[layer], widths.clip[layer]) == (4, 0.0)
    assert (widths.bits[1 - layer], widths.clip[1 - layer]) == (2, 0.9)
    gains = {"k": found.gains_k, "v": found.gains_v}
    every = [gain for of_side in gains.values() for gain in of_side or ()]
    assert (gains[side] or ())[layer] == max(every) > 0


def test_bits_are_part_of_the_digest_and_of_the_tag(
    result: ComputeResult, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same fit with codes of 2 bits is another artifact, with another name and folder."""
    monkeypatch.chdir(tmp_path)
    plain = dataclasses.replace(
        options(model, tmp_path, WidthWish(bits=4.6), method="oscar"), output_dir=None, widths=None
    )
    mixed = dataclasses.replace(plain, widths=WidthWish(bits=4.6))
    two, more = (compute_artifact(one) for one in (plain, mixed))
    assert two is not None and more is not None
    assert str(more.artifact_id) == f"{two.artifact_id}_bits4.5" == str(result.artifact_id)
    assert (two.path.name, more.path.name) == (two.artifact_id.tag, more.artifact_id.tag)
    assert more.manifest.digest == result.manifest.digest != two.manifest.digest
    rotations = [{f.path: f.sha256 for f in one.manifest.files} for one in (two, more)]
    assert rotations[1].pop(WIDTHS_NAME) is not None and rotations[0] == rotations[1]


def test_moments_and_the_model_give_what_compute_gave(
    result: ComputeResult, model: Path, tmp_path: Path
) -> None:
    """The held-out text is cut from the same text, and the choice is the same code."""
    assert result.moments is not None
    given = options(model, tmp_path / "a", WidthWish(bits=4.6), method="oscar")
    told: list[str] = []
    path, manifest = refit(
        result.moments,
        "oscar",
        RECIPE,
        model_name="random",
        target=tmp_path / "a",
        options=given,
        tell=told.append,
    )
    assert (path, told) == (tmp_path / "a", [])
    assert (manifest.digest, manifest.id) == (result.manifest.digest, result.manifest.id)
    assert manifest.fit.selection == result.manifest.fit.selection
    assert manifest.quality == result.manifest.quality
    other = dataclasses.replace(given, calib_tokens=150, output_dir=tmp_path / "b")
    refit(
        result.moments,
        "oscar",
        RECIPE,
        model_name="random",
        target=tmp_path / "b",
        options=other,
        tell=told.append,
    )
    assert len(told) == 1 and "may be among the text" in told[0]


def test_the_curve_goes_from_2_bits_to_4_and_says_what_was_measured(result: ComputeResult) -> None:
    steps = block(result).steps
    assert [step.bits for step in steps] == [4.0, 4.5, 5.0, 5.5, 6.0]
    assert len({(step.layer, step.side) for step in steps}) == 5
    verified = [step.verified for step in steps]
    assert [at for at, one in enumerate(verified) if one is not None] == [0, 1, 4]
    first, kept, last = (one for one in verified if one is not None)
    assert (first.divergence or 0) > (kept.divergence or 0) > (last.divergence or 0) > 0
    assert steps[1].predicted == pytest.approx(kept.divergence)
    assert None not in (first.change_percent, kept.change_percent)  # two rows that people compare
    assert (first.recall is None) == (kept.recall is None)
    assert block(result).bits_at["8192"] == pytest.approx(4.5 + 16 * 10 / 8192)


def test_figures_of_the_manifest_are_those_of_its_bits(result: ComputeResult) -> None:
    measured, kept = Measured.of(result.manifest), block(result).kept.verified
    assert measured is not None
    assert kept is not None
    assert measured.change_percent == kept.change_percent
    quality = result.manifest.quality or {}
    assert quality["quantizer"] == "asym-minmax-u24/1"
    assert quality["gates"][0]["value"] == kept.change_percent


def test_people_see_the_curve_in_the_table_the_report_and_info(
    result: ComputeResult, capsys: pytest.CaptureFixture[str]
) -> None:
    found = block(result)
    print_result(result)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:2] == ["RAISED", "BITS"]
    legend = next(line for line in lines if line.startswith("RAISED:"))
    for head in ("OF 2 BITS", "vs BF16", "RECALL"):
        assert head in lines[0] and f"{head}:" in legend
    two, kept = lines[1], next(line for line in lines if line.endswith("kept"))
    assert two.startswith("2 bits") and two.count("%") == kept.count("%") >= 2
    assert kept.split()[:3] == [*found.kept.name.split(), "4.5"]
    assert f"Kept 4.5 bits per element (4 bits in 1 of 4 sides of layers: {found.kept.name}" in (
        "\n".join(lines)
    )
    assert result.report is not None
    page = result.report.read_text("utf-8")
    assert "4.5 bits per element" in page and "Bits and what they buy" in page
    written = ReportData.from_bytes(result.report.with_suffix(".json").read_bytes())
    assert written.widths == found
    print_manifest(result.manifest, None)
    told = " ".join(capsys.readouterr().out.split())
    assert f"bits 4.5 per element, 4 bits in 1 of 4 sides of layers: {found.kept.name}" in told
    assert "bits to KL 4 bits" in told and "4.52 bits at 8k" in told


def test_4_bits_everywhere_measure_no_single_raise(model: Path, tmp_path: Path) -> None:
    phases: list[str] = []
    found = compute_artifact(
        options(model, tmp_path / "a", WidthWish(bits=4.0)),
        progress=lambda done, total, phase: phases.append(phase),
    )
    assert found is not None
    assert found.manifest.recipe.bits_per_element == 6
    told = block(found)
    assert (len(told.steps), told.chosen, told.gains_k) == (2, 1, None)
    assert all(one.verified and one.verified.change_percent is not None for one in told.steps)
    assert {"bits by layer", "bits verified"} < set(phases)


def test_a_loss_takes_the_fewest_bits_that_keep_it(model: Path, tmp_path: Path) -> None:
    found = compute_artifact(options(model, tmp_path / "a", WidthWish(max_loss=100.0)))
    assert found is not None
    told = block(found)
    assert told.kept.verified is not None
    assert (told.kept.verified.change_percent or 0) <= 100
    before = [step.verified for step in told.steps[: told.chosen] if step.verified]
    assert all((one.change_percent or 0) > 100 for one in before if one.change_percent is not None)
    with pytest.raises(ComputeFailed, match="4 bits everywhere raise perplexity") as caught:
        compute_artifact(options(model, tmp_path / "b", WidthWish(max_loss=1e-9)))
    assert "--group-size" in (caught.value.hint or "")
    assert not (tmp_path / "b").exists()


def test_auto_stays_below_its_bits(model: Path, tmp_path: Path) -> None:
    """With these groups codes of 2 bits cost more than `auto` takes: nothing is raised."""
    found = compute_artifact(options(model, tmp_path / "a", WidthWish(auto=True)))
    assert found is not None
    assert found.manifest.recipe.widths is None
    assert found.manifest.schema_ == "oscar-zoo.manifest/1"
    assert block(found).chosen == 0


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--bits", "2.4"], "2 or 4 for all codes, a budget from 2.5 to 4.5, or auto"),
        (["--bits", "4.6"], "2 or 4 for all codes, a budget from 2.5 to 4.5, or auto"),
        (["--bits", "many"], "2 or 4 for all codes, a budget such as 2.75, or auto"),
        (["--bits", "3", "--max-loss", "0.1%"], "exclude each other"),
        (["--max-loss", "0%"], "percent above 0"),
        (["--max-loss", "a little"], "a number in percent"),
        (["--bits", "3", "--compat"], "Leave out --compat"),
    ],
)
def test_bits_that_cannot_be_had_are_refused(
    given: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["compute", str(EXAMPLE), "--calib-data", str(TEXT), *given]) == 2
    assert said in capsys.readouterr().err


@pytest.fixture
def strict_gates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Codes of 2 bits of the example model fail the gate of perplexity, those of 4 bits pass."""
    monkeypatch.setattr(rule, "PERPLEXITY_PASS", 0.1)
    monkeypatch.setattr(rule, "PERPLEXITY_FAIL", 0.1)


def chosen_freely(model: Path, target: Path, **changes: object) -> ComputeOptions:
    free: dict[str, object] = {"widths": None, "method": "auto", "tune": False, "allow_poor": False}
    if model == EXAMPLE:
        windows = Windows(sink=16, recent=32, dtype="bfloat16")
        recipe = ServingRecipe(group_size=64, clip=Clip(k=0.96, v=0.92), windows=windows)
        free |= {"recipe": recipe, "dtype": "float32", "calib_tokens": 1024, "seq_len": 512}
        free |= {"heldout_tokens": 2048}
    return options(model, target, WidthWish(), **{**free, **changes})


def test_layers_get_more_bits_where_2_fail_and_nobody_asked_for_them(
    strict_gates: None, tmp_path: Path
) -> None:
    """`auto` takes 3.25 bits at most, which is not enough here: the last step is 4 bits."""
    wanted = chosen_freely(EXAMPLE, tmp_path / "a", raises=True)
    told: list[str] = []
    found = compute_artifact(wanted, progress=lambda *news: told.append(news[2]))
    assert found is not None and found.choice is not None
    assert {phase.name for phase in expected_phases(wanted)} >= set(told)
    assert set(found.manifest.recipe.widths.k.bits) == {4}  # type: ignore[union-attr]
    assert [gate.result for gate in found.choice.gates if gate.name.startswith("perp")] == ["pass"]
    assert found.choice.chosen.gate == "fail" and found.choice.served.gate == "pass"
    (note,) = (note for note in found.notes if "--bits 2 --allow-poor" in note)
    assert "4.50 bits" in note
    poor = compute_artifact(chosen_freely(EXAMPLE, tmp_path / "b", raises=True, allow_poor=True))
    assert poor is not None and poor.manifest.recipe.widths is None


def test_2_bits_that_were_asked_for_are_refused_with_the_budget_that_passes(
    strict_gates: None, tmp_path: Path
) -> None:
    wanted, told = chosen_freely(EXAMPLE, tmp_path / "a"), set[str]()
    with pytest.raises(ComputeFailed, match="raises perplexity") as caught:
        compute_artifact(wanted, progress=lambda *news: told.add(news[2]))
    assert {phase.name for phase in expected_phases(wanted)} >= told
    assert caught.value.next_step == AddOption("--bits", "4.5")
    assert not (tmp_path / "a").exists()


def test_the_last_step_is_refused_where_it_fails_too(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rule, "PERPLEXITY_PASS", -100.0)
    monkeypatch.setattr(rule, "PERPLEXITY_FAIL", -100.0)
    for raises in (True, False):
        with pytest.raises(ComputeFailed) as caught:
            compute_artifact(chosen_freely(model, tmp_path / "a", raises=raises))
        assert caught.value.next_step is None
