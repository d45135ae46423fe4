"""What `auto` measures and keeps, on the example model; `test_select` has the rule on numbers."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from oscar_zoo.artifact import strict_json
from oscar_zoo.artifact.specs import Clip, ServingRecipe
from oscar_zoo.cli.render import terminal
from oscar_zoo.cli.render.computing import choice_lines
from oscar_zoo.compute.capture.transformers import capture
from oscar_zoo.compute.data.calibration import CalibrationData, HeldOut, load_calibration
from oscar_zoo.compute.methods.table import METHODS, fit_all
from oscar_zoo.compute.moments import Moments
from oscar_zoo.compute.select import rule
from oscar_zoo.compute.select.choose import FINER_CLIPS, choose, refuse_poor
from oscar_zoo.compute.select.decision import Choice
from oscar_zoo.compute.select.rule import Trial
from oscar_zoo.errors import ComputeFailed
from oscar_zoo.evaluate.measure import Measurement
from oscar_zoo.models.loading import LoadedModel, load_model

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
RECIPE = ServingRecipe(group_size=64, clip=Clip(k=0.96, v=0.92))


@pytest.fixture(scope="module")
def loaded() -> Iterator[LoadedModel]:
    yield load_model(str(EXAMPLES / "models" / "tiny-qwen3-hard"), dtype="float32")


@pytest.fixture(scope="module")
def data(loaded: LoadedModel) -> CalibrationData:
    source = EXAMPLES / "text" / "calibration.txt"
    return load_calibration(source, loaded.tokenizer, tokens=2048, seq_len=512, heldout_tokens=4096)


@pytest.fixture(scope="module")
def moments(loaded: LoadedModel, data: CalibrationData) -> Moments:
    return capture(
        loaded, data, needs=frozenset(need for method in METHODS.values() for need in method.needs)
    )


def held(data: CalibrationData, count: int = 2) -> HeldOut:
    assert data.heldout is not None
    return HeldOut(data.heldout.sequences[:count])


@pytest.fixture(scope="module")
def chosen(loaded: LoadedModel, data: CalibrationData, moments: Moments) -> Choice:
    """Between a data-free method and a good one, with few questions: the whole held-out text is
    filler."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("oscar_zoo.compute.select.choose.RECALL_ANSWERS", 16)
        fits = fit_all(moments, ["identity", "hadamard", "wush"])
        return choose(loaded, held(data, 4), fits, RECIPE)


def test_what_2_bits_cost_is_said_where_they_do_not_pass_the_gates(chosen: Choice) -> None:
    assert chosen.base is not None and chosen.base.recall is not None
    own, answers = chosen.base.perplexity, chosen.base.recall
    exact = replace(chosen.trials[chosen.at], perplexity=own, recall=answers)

    def said(kept: Trial, *, raised: bool = False) -> str | None:
        trials = (*chosen.trials[: chosen.at], kept, *chosen.trials[chosen.at + 1 :])
        return replace(chosen, trials=trials, raised=raised).two_bits

    assert said(exact) is None
    assert f"{rule.typical(exact.divergence):.4f} nats" in (said(exact, raised=True) or "")
    worse = Measurement(own.value, tuple((loss + n / 100, n) for loss, n in own.parts))
    assert "raise perplexity by 1.01 %" in (said(replace(exact, perplexity=worse)) or "")
    fewer = Measurement(0.5, tuple((right / 2, count) for right, count in answers.parts))
    assert "points of recall" in (said(replace(exact, recall=fewer)) or "")


def test_every_method_is_measured_and_the_best_with_more_clips_on_more_text(
    chosen: Choice, capsys: pytest.CaptureFixture[str]
) -> None:
    clips: dict[str, list[tuple[float, float]]] = {}
    sequences: dict[str, set[int | None]] = {}
    for row in chosen.rows:
        clips.setdefault(row.method, []).append((row.clip_k, row.clip_v))
        sequences.setdefault(row.method, set()).add(row.sequences)
    assert list(clips) == ["identity", "hadamard", "wush"]
    assert clips["identity"] == [(0, 0)] and len(clips["wush"]) > len(FINER_CLIPS)
    for name in ("hadamard", "wush"):
        assert (chosen.errors[name].found.clip.k, chosen.errors[name].found.clip.v) in clips[name]
    assert {(0.96, 0.92), (0, 0)} <= set(clips["wush"])
    assert sequences == {"identity": {2}, "hadamard": {2}, "wush": {2, 4}}
    early = [row for row in chosen.rows if row.sequences == 2]
    assert early and all(row.perplexity is None and row.change_percent for row in early)
    assert all(row.divergence for row in chosen.rows)
    for line in choice_lines(chosen):
        terminal.out().print(line)
    printed = capsys.readouterr().out
    (kept,) = (line.split() for line in printed.splitlines() if line.endswith(" kept"))
    ratios = [0.0 if text == "-" else float(text) for text in kept[1:3]]
    assert ratios == pytest.approx([chosen.chosen.clip_k, chosen.chosen.clip_v], abs=5e-5)
    assert " 2/4 " in printed and " 4/4 " in printed


def test_a_choice_is_plain_data(chosen: Choice) -> None:
    layers = len(chosen.trials[0].errors.output)
    selection, quality = chosen.selection, chosen.quality
    for block in (selection, quality):
        assert strict_json.loads(strict_json.canonical_bytes(block), what="block") == block
    assert selection["rule"] == "auto/4"
    assert selection["chosen"] in selection["candidates"]
    assert selection["chosen"]["method"] == "wush"
    assert selection["bf16_recall"] == quality["recall"]["bf16"]
    assert quality["recall"]["answers"] == 16
    perplexity_and_recall = [gate["result"] for gate in quality["gates"][:2]]
    assert chosen.chosen.gate == max(perplexity_and_recall, key=["pass", "warn", "fail"].index)
    for name in ("output", "output_k", "output_v", "logit"):
        assert len(quality["errors"][name]) == layers
    for side in ("k", "v"):
        curve = quality["clip"][side]
        assert len(curve["best_by_layer"]) == layers
        assert curve["best"] in curve["ratios"]


def test_fast_measures_no_perplexity(
    loaded: LoadedModel, data: CalibrationData, moments: Moments
) -> None:
    seen: list[tuple[int, int, str]] = []
    fits = fit_all(moments, ["hadamard", "wush"])
    found = choose(
        loaded, held(data), fits, RECIPE, fast=True, progress=lambda *news: seen.append(news)
    )
    assert found.chosen.method == "wush"
    assert found.reason == "the lowest output error on held-out text"
    assert [row.method for row in found.rows] == ["hadamard", "wush"]
    assert all(row.perplexity is row.recall is row.gate is None for row in found.rows)
    assert found.selection["rule"] == "auto-fast/1"
    assert "recall" not in found.quality
    assert [gate.name for gate in found.gates] == [
        "output_error_over_hadamard",
        "worst_layer_over_hadamard",
    ]
    assert seen[-1][0] == seen[-1][1]


def test_a_poor_best_is_refused_unless_it_is_wanted(
    loaded: LoadedModel, data: CalibrationData, moments: Moments
) -> None:
    fits = fit_all(moments, ["hadamard"])
    found = choose(loaded, held(data, 1), fits, RECIPE, fixed_clip=True)
    with pytest.raises(ComputeFailed, match="hadamard") as caught:
        refuse_poor(found.chosen.method, found.gates)
    assert "--allow-poor" in (caught.value.hint or "")
    assert found.chosen.gate == "fail"
    assert len(found.trials) == 1
    assert found.base is not None and "leave no room" in (found.base.remark or "")


def test_a_model_that_recalls_nothing_is_not_judged_by_it(
    loaded: LoadedModel, data: CalibrationData, moments: Moments, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("oscar_zoo.compute.select.choose.RECALL_ANSWERS", 8)
    mute = loaded.tokenizer
    odd = replace(
        loaded,
        tokenizer=lambda text, **options: {"input_ids": mute(text, **options)["input_ids"][::-1]},
    )
    found = choose(odd, held(data, 4), fit_all(moments, ["wush"]), RECIPE, fixed_clip=True)
    assert found.base is not None and found.base.answers is not None
    assert found.base.answers.value < 0.5
    assert "recall was not judged" in (found.base.remark or "")
    assert found.chosen.recall is None
    assert [gate.name for gate in found.gates] == ["perplexity_change_percent"]
