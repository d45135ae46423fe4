"""How long a computation is said to take: the right order of things, without reading a weight."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cli_output import Clock
from safetensors.torch import load_file

from oscar_zoo.artifact.specs import Clip, ServingRecipe
from oscar_zoo.cli.render.course import Course
from oscar_zoo.compute.estimate import LONGEST_TUNING, estimate, expected_phases
from oscar_zoo.compute.options import Job
from oscar_zoo.models.model_source import ModelSize, model_size, read_model_config

MODEL = Path(__file__).resolve().parents[2] / "examples" / "models" / "tiny-qwen3-hard"
READ = read_model_config(str(MODEL), None, None)
OPTIONS = Job(
    model=str(MODEL),
    model_name="tiny-qwen3-hard",
    calib_data="text.txt",
    calib_tokens=1 << 20,
    recipe=ServingRecipe(group_size=64, clip=Clip(k=0.96, v=0.92)),
)


def test_the_outline_has_the_parameters_of_the_file() -> None:
    files = [load_file(path) for path in MODEL.glob("*.safetensors")]
    total = sum(tensor.numel() for file in files for tensor in file.values())
    assert model_size(READ.parsed, "tiny") == ModelSize(total, total)


RECORDED = (
    ("load", 0, "0.0:0"),
    ("capture", 0, "0.1:0"),
    ("capture", 16384, "0.1:0 0.5:8192 1.0:16384"),
    ("fit", 0, "1.0:0"),
    ("rows", 8, "1.1:0 1.1:1 1.2:2 1.4:4 1.5:5 1.6:6 1.8:8"),
    ("tune", 2400, "1.9:1 2.7:400 3.5:800 4.2:1200 5.0:1600 5.7:2000 6.4:2400"),
    ("held-out rows", 4, "6.4:0 6.5:1 6.6:2 6.7:3 6.8:4"),
    ("errors", 4, "6.8:0 6.9:1 6.9:2 8.3:3 9.0:4"),
    ("perplexity", 120, "9.0:0 9.0:1 9.8:20 11.6:40 12.6:60 13.2:72"),
    ("recall", 32, "13.3:0 13.3:1 13.5:5 13.7:10 14.1:16 14.4:21 14.7:26 15.1:32"),
    ("bits by layer", 44, "15.1:0 15.2:1 15.6:7 15.9:14 16.2:22 16.5:29 16.5:36"),
    ("bits verified", 52, "16.5:0 16.6:1 16.9:8 17.5:17 18.0:20"),
    ("bits by layer", 12, "18.0:0 18.1:1 18.3:2 18.8:4"),
    ("bits verified", 20, "18.8:0 18.9:1 19.2:3 19.5:6 20.0:10 20.4:13 20.8:16"),
    ("write", 0, "20.8:0"),
)
"""News of a computation on two quiet cores in which 2 bits and `auto` failed their gates, so that
4 bits were measured: phase, total, and seconds with what was done by then."""


def test_a_recorded_computation_grows_by_a_third_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    """From no moment to a later one: so the bits that are measured where 2 fail are in it."""
    speeds = {torch.bfloat16: 9.426e11, torch.float32: 2.175e11}
    monkeypatch.setattr("oscar_zoo.compute.estimate.matmul_speed", lambda _, dtype: speeds[dtype])
    plan = estimate(replace(OPTIONS, device="cpu", calib_tokens=16384, seq_len=2048), READ)
    assert plan is not None
    clock = Clock(0.0)
    course, totals = Course(plan.phases, clock), [plan.seconds]
    for phase, of, news in RECORDED:
        for seconds, done in (one.split(":") for one in news.split()):
            for update in (False, True):  # what is shown just before the news, and with it
                clock.now = float(seconds)
                if update:
                    course.update(int(done), of, phase)
                left = course.seconds_left
                assert left is not None
                totals.append(clock.now + left)
                assert totals[-1] <= 4 / 3 * min(totals), (phase, done)
    assert totals[0] == pytest.approx(clock.now, rel=1 / 3)


def test_more_work_takes_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oscar_zoo.compute.estimate.matmul_speed", lambda device, dtype: 1e11)
    costs = {
        "one method": replace(OPTIONS, method="wush"),
        "all, by errors of attention": replace(OPTIONS, fast=True),
        "all but what is tuned": replace(OPTIONS, tune=False),
        "all, measured": OPTIONS,
        "twice the text": replace(OPTIONS, calib_tokens=1 << 21),
    }
    found = {name: estimate(options, READ) for name, options in costs.items()}
    seconds = [cost.seconds for cost in found.values() if cost is not None]
    assert len(seconds) == 5 and seconds == sorted(set(seconds))
    assert {cost.weight_bytes for cost in found.values() if cost} == {2 * 3_476_224}


def test_tuning_counts_where_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """`auto` leaves it out where it takes too long; who names it waits."""

    def seconds(speed: float, **changes: object) -> float:
        monkeypatch.setattr("oscar_zoo.compute.estimate.matmul_speed", lambda device, dtype: speed)
        found = estimate(replace(OPTIONS, device="cpu", **changes), READ)  # type: ignore[arg-type]
        assert found is not None
        return found.seconds

    assert seconds(1e11) > seconds(1e11, tune=False)
    assert seconds(5e8) == seconds(5e8, tune=False)
    assert seconds(5e8, method="wush-tuned") > seconds(5e8, method="wush") + LONGEST_TUNING
    assert seconds(1e11, fast=True) == seconds(1e11, fast=True, tune=False)


def test_an_estimate_has_the_phases_options_ask_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine that is fast enough to tune."""
    monkeypatch.setattr("oscar_zoo.compute.estimate.matmul_speed", lambda device, dtype: 1e11)
    for changes in ({}, {"fast": True}, {"method": "wush"}, {"tune": False}):
        options = replace(OPTIONS, **changes)
        found = estimate(options, READ)
        assert found is not None
        told = [(one.name, one.unit) for one in found.phases]
        assert told == [(one.name, one.unit) for one in expected_phases(options)]
