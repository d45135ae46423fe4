"""`OscarCache` gives the tokens of the chunked reference server, whatever the length of a prompt
and of the windows, for every kind of transform, and whichever way its rows are read."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_models import write_model
from torch import Tensor

from oscar_zoo.artifact.formats import hadamard_set
from oscar_zoo.artifact.specs import Clip, ServingRecipe, Windows
from oscar_zoo.evaluate.generate import greedy_generate
from oscar_zoo.evaluate.simulated_cache import CacheSpec
from oscar_zoo.models.loading import LoadedModel, load_model
from oscar_zoo.transformers import OscarCache

TEXT = torch.randint(3, 2000, (2, 400), generator=torch.Generator().manual_seed(1))
NEW = 24
WAYS = ("auto", "keep")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_model(str(write_model(tmp_path_factory.mktemp("model"))), dtype="float32")


def recipe(sink: int = 4, recent: int = 9, **more: Any) -> ServingRecipe:
    windows = Windows(sink=sink, recent=recent)
    return ServingRecipe(group_size=16, clip=Clip(k=0.96, v=0.92), windows=windows, **more)


def spec_of(model: LoadedModel, **windows: int) -> CacheSpec:
    return CacheSpec(
        hadamard_set(model.block, "k"), hadamard_set(model.block, "v"), recipe(**windows)
    )


def cache_of(model: LoadedModel, spec: CacheSpec, **options: Any) -> OscarCache:
    model.model.set_attn_implementation("sdpa")
    assert spec.k is not None and spec.v is not None
    return OscarCache(model.model, spec.k, spec.v, spec.recipe, **options)


def generated(model: LoadedModel, ids: Tensor, cache: Any, **options: Any) -> Tensor:
    options = {"max_new_tokens": NEW, "do_sample": False} | options
    found = model.model.generate(
        ids, eos_token_id=None, pad_token_id=0, past_key_values=cache, **options
    )
    return found[:, ids.shape[1] :]


def reference(model: LoadedModel, ids: Tensor, spec: CacheSpec, chunk: int = 4096) -> list[int]:
    return greedy_generate(model, ids.tolist(), cache=spec, max_new_tokens=NEW, chunk_size=chunk)


@pytest.mark.parametrize("attention", WAYS)
@pytest.mark.parametrize("tokens", [1, 3, 4, 5, 9, 10, 13, 14, 70, 200])
def test_tokens_of_greedy_search(model: LoadedModel, tokens: int, attention: str) -> None:
    spec, ids = spec_of(model), TEXT[0, :tokens]
    got = generated(model, ids[None], cache_of(model, spec, attention=attention))
    assert got[0].tolist() == reference(model, ids, spec)


@pytest.mark.parametrize("attention", WAYS)
@pytest.mark.parametrize(("sink", "recent"), [(0, 1), (0, 40), (2, 33), (7, 3), (64, 100)])
def test_windows(model: LoadedModel, sink: int, recent: int, attention: str) -> None:
    spec, ids = spec_of(model, sink=sink, recent=recent), TEXT[0, :90]
    got = generated(model, ids[None], cache_of(model, spec, attention=attention))
    assert got[0].tolist() == reference(model, ids, spec)
