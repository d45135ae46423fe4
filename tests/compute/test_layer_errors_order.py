"""The point of it all: on a cache with outlier channels a fitted rotation beats the data-free
baselines."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from tiny_models import EXAMPLE

from oscar_zoo.artifact.formats import RotationSet
from oscar_zoo.artifact.specs import Clip, ServingRecipe
from oscar_zoo.compute.capture.transformers import capture
from oscar_zoo.compute.data import load_calibration
from oscar_zoo.compute.estimators import estimate
from oscar_zoo.compute.fit import FitResult, fit
from oscar_zoo.compute.methods.table import METHODS
from oscar_zoo.compute.moments import Moments
from oscar_zoo.evaluate.measure import measure
from oscar_zoo.evaluate.questions import Perplexity
from oscar_zoo.evaluate.simulated_cache import CacheSpec
from oscar_zoo.models.loading import LoadedModel, load_model

TEXT = EXAMPLE.parents[1] / "text"
CLIPPED = ServingRecipe(group_size=64, clip=Clip(k=0.96, v=0.92))
UNCLIPPED = ServingRecipe(group_size=64, clip=Clip(k=0, v=0))


@pytest.fixture(scope="module")
def loaded() -> Iterator[LoadedModel]:
    yield load_model(str(EXAMPLE), dtype="float32")


@pytest.fixture(scope="module")
def moments(loaded: LoadedModel) -> Iterator[Moments]:
    data = load_calibration(TEXT / "calibration.txt", loaded.tokenizer, tokens=2048, seq_len=1024)
    yield capture(loaded, data, needs=METHODS["oscar"].needs)


@pytest.fixture(scope="module")
def oscar(moments: Moments) -> Iterator[FitResult]:
    yield fit(moments, METHODS["oscar"])


def test_fitted_rotations_make_the_error_weight_flat(oscar: FitResult, moments: Moments) -> None:
    for side, target in ((oscar.k, "qqt/1"), (oscar.v, "sst/1")):
        for layer, covariance in zip(side.layers, estimate(moments, target), strict=True):
            rotation = torch.from_numpy(layer.forward).double()
            identity = torch.eye(side.head_dim, dtype=torch.float64)
            assert (
                rotation @ torch.from_numpy(layer.partner).double().T - identity
            ).abs().max() < 2e-7
            c = torch.from_numpy(covariance)
            flat = torch.diagonal(rotation.T @ c @ rotation)
            mean = torch.trace(c) / side.head_dim
            assert ((flat - mean).abs().max() / mean) < 1e-6


def test_bf16_beats_oscar_beats_hadamard_beats_nothing(
    loaded: LoadedModel, oscar: FitResult
) -> None:
    text = Path(TEXT / "validation.txt").read_text("utf-8")[:40_000]
    ids = torch.tensor(loaded.tokenizer(text, verbose=False)["input_ids"])
    task = Perplexity.from_tokens(ids, windows=2, length=1024, skip=320)
    hadamard = fit(Moments(loaded.block, {}), METHODS["hadamard"])

    def perplexity(k: RotationSet | None, v: RotationSet | None, recipe: ServingRecipe) -> float:
        return measure(loaded, task, CacheSpec(k, v, recipe)).value

    values = [
        measure(loaded, task).value,
        perplexity(oscar.k, oscar.v, CLIPPED),
        perplexity(hadamard.k, hadamard.v, CLIPPED),
        perplexity(hadamard.k, hadamard.v, UNCLIPPED),
        perplexity(None, None, UNCLIPPED),
    ]
    assert values == sorted(values), values
    assert all(worse > 1.02 * better for better, worse in pairwise(values)), values
