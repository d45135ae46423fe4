"""What callers hand over stands in the manifest, and nothing is written that no engine may
serve."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from random_moments import MODEL, NUMERICS, describe, random_moments

from oscar_zoo.artifact.manifest import FILE_NAME, Manifest, ModelBlock, MomentsFile, WeightsInfo
from oscar_zoo.artifact.names import ArtifactId
from oscar_zoo.artifact.outcome import Verified
from oscar_zoo.artifact.reader import read_rotation
from oscar_zoo.artifact.specs import Clip, ServingRecipe
from oscar_zoo.artifact.verify import verify_files
from oscar_zoo.compute.assemble import Facts, assemble
from oscar_zoo.compute.coverage import observed
from oscar_zoo.compute.fit import FitResult, fit
from oscar_zoo.compute.methods.table import METHODS
from oscar_zoo.errors import UsageError

MOMENTS = random_moments()
RECIPE = ServingRecipe(group_size=8, clip=Clip(k=0.96, v=0.92))
FACTS = Facts(
    artifact_id=ArtifactId("random", "seq200_prompt1_group8"),
    model=MODEL,
    recipe=RECIPE,
    calibration=describe(MOMENTS).calibration,
    numerics=NUMERICS,
    created="2026-01-02T03:04:05Z",
)


@pytest.fixture(scope="module")
def oscar() -> FitResult:
    return fit(MOMENTS, METHODS["oscar"])


@pytest.fixture(scope="module")
def wush() -> FitResult:
    return fit(MOMENTS, METHODS["wush"])


def manifest(result: FitResult, facts: Facts) -> Manifest:
    files = assemble(result, facts)
    assert isinstance(verify_files(files, strict=True), Verified)
    return Manifest.from_bytes(files[FILE_NAME])


def test_the_blocks_of_the_caller_stand_in_the_manifest(oscar: FitResult) -> None:
    selection = {
        "rule": "auto/1",
        "candidates": ({"method": "oscar", "ppl": 9.5},),
        "chosen": "oscar",
    }
    source = MomentsFile(sha256="ab" * 32, size=12, location="moments.safetensors")
    facts = replace(
        FACTS,
        selection=selection,
        quality={"gates": [{"name": "perplexity", "result": "pass"}]},
        moments=source,
        coverage=observed(MOMENTS, tp=2, dp=3),
    )
    found = manifest(oscar, facts)
    assert found.fit.selection == {**selection, "candidates": [{"method": "oscar", "ppl": 9.5}]}
    assert found.fit.moments == source
    assert found.fit.coverage == facts.coverage
    assert found.quality == {"gates": [{"name": "perplexity", "result": "pass"}]}
    rotation = read_rotation(assemble(oscar, facts)["k_rotation_qqt_r_h_pbr.pt"], what="k")
    assert rotation.calibration["tp_size"] == 2


def test_blocks_nobody_gave_are_absent(oscar: FitResult) -> None:
    found = manifest(oscar, FACTS)
    assert (found.quality, found.fit.selection, found.fit.moments) == (None, None, None)
    assert found.fit.coverage == observed(MOMENTS)
    assert found.recipe == RECIPE


def test_numbers_that_are_no_numbers_are_refused(oscar: FitResult) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        assemble(oscar, replace(FACTS, quality={"ppl": math.nan}))


def test_headroom_and_condition_of_a_partnered_method_are_recorded(wush: FitResult) -> None:
    quality = manifest(wush, replace(FACTS, quality={"gates": []})).quality
    assert quality is not None
    assert quality["gates"] == []
    for role, forecast in wush.forecasts.items():
        assert quality["headroom_per_layer"][role] == pytest.approx(
            forecast.headroom.mean(-1), rel=1e-3
        )
        assert quality["condition_per_layer"][role] == pytest.approx(
            forecast.condition.max(-1), rel=1e-3
        )
    assert np.min(quality["headroom_per_layer"]["k"]) >= 1


def test_the_same_fit_gives_the_same_files(wush: FitResult) -> None:
    again = fit(random_moments(), METHODS["wush"])
    assert assemble(wush, FACTS) == assemble(again, FACTS)
    other = assemble(fit(random_moments(seed=1), METHODS["wush"]), FACTS)
    ids = [
        Manifest.from_bytes(files[FILE_NAME]).fit.fit_id for files in (assemble(wush, FACTS), other)
    ]
    assert ids[0] != ids[1]


def model(**changes: object) -> ModelBlock:
    return MODEL.model_copy(update=changes)


@pytest.mark.parametrize(
    ("changes", "absorption"),
    [
        ({}, "allowed"),
        ({"output_gate": True}, "forbidden"),
        ({"output_gate": None}, "forbidden"),
        ({"weights": None}, "forbidden"),
        ({"weights": WeightsInfo(dtype="float8_e4m3fn", quantization="fp8")}, "forbidden"),
    ],
)
def test_values_are_folded_only_where_that_is_exact(
    oscar: FitResult, changes: dict[str, object], absorption: str
) -> None:
    facts = replace(FACTS, model=model(**changes))
    assert manifest(oscar, facts).recipe.v_absorption == absorption
    required = replace(facts, recipe=RECIPE.model_copy(update={"v_absorption": "required"}))
    if absorption == "allowed":
        assert manifest(oscar, required).recipe.v_absorption == "required"
        return
    with pytest.raises(UsageError, match="cannot be folded into the weights of oscar-zoo/random"):
        assemble(oscar, required)


def test_a_baseline_is_no_artifact() -> None:
    with pytest.raises(UsageError, match="identity is a baseline"):
        assemble(fit(MOMENTS, METHODS["identity"]), FACTS)
