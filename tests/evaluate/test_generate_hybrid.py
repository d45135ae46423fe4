"""The chunked reference server for models with other layers beside full attention: states,
convolutions and sliding windows."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from architectures import shorten_chunks, write_architecture

from oscar_zoo.artifact.formats import hadamard_set
from oscar_zoo.artifact.specs import Clip, ServingRecipe, Windows
from oscar_zoo.evaluate.generate import GenerationRequest, greedy_generate
from oscar_zoo.evaluate.simulated_cache import CacheSpec, SimulatedCache
from oscar_zoo.models.attention import attention_scope
from oscar_zoo.models.loading import LoadedModel, load_model

PROMPT = torch.randint(3, 2000, (300,), generator=torch.Generator().manual_seed(1))
"""Longer than the sliding window of Gemma 3, which is 256; other models get the beginning."""
NAMES = ("lfm2", "qwen3_5_moe", "granite-4-h", "falcon_h1", "nemotron_h", "gemma3_text")


@pytest.fixture(scope="module", params=NAMES)
def model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LoadedModel]:
    folder = write_architecture(request.param, tmp_path_factory.mktemp("model"), dtype="float32")
    yield load_model(str(shorten_chunks(folder)), dtype="float32")


def prompt(model: LoadedModel) -> torch.Tensor:
    """As long as the layers of a model ask for."""
    return PROMPT if model.model.config.model_type == "gemma3_text" else PROMPT[:120]


def cache(model: LoadedModel, sink: int, recent: int) -> CacheSpec:
    recipe = ServingRecipe(
        group_size=16, clip=Clip(k=0.96, v=0.92), windows=Windows(sink=sink, recent=recent)
    )
    return CacheSpec(hadamard_set(model.block, "k"), hadamard_set(model.block, "v"), recipe)


def test_without_a_cache_it_is_plain_greedy_generation(model: LoadedModel) -> None:
    ids = start = prompt(model)
    for _ in range(4):  # without a cache of transformers, whose chunked states are not the question
        with torch.inference_mode():
            logits = model.model(ids[None], use_cache=False).logits[0, -1]
        ids = torch.cat([ids, logits.argmax()[None]])
    chunk = len(start) * 2 // 5
    got = greedy_generate(model, start.tolist(), cache=None, max_new_tokens=4, chunk_size=chunk)
    assert got == ids[len(start) :].tolist()


def test_logits_of_chunks_and_decoded_tokens_are_those_of_one_pass(model: LoadedModel) -> None:
    ids = prompt(model)
    with torch.inference_mode():
        want = model.model(ids[None], use_cache=False).logits[0]
    request, cut = GenerationRequest(model, None), len(ids) * 2 // 5
    got = [request.extend(ids[:cut]), request.extend(ids[cut:-3])]
    got += [request.decode(int(token))[None] for token in ids[-3:]]
    assert torch.allclose(torch.cat(got), want, rtol=1e-3, atol=2e-3)


def test_decoded_positions_read_int2_as_the_one_pass_cache_does(model: LoadedModel) -> None:
    """Token by token every position reads like a decoded one, in the layers below too."""
    ids, wanted = PROMPT[:18], cache(model, 4, 8)
    request = GenerationRequest(model, wanted)
    got = torch.stack([request.decode(int(token)) for token in ids])
    distance = {}
    for recent in (7, 8, 9):
        spec = cache(model, 4, recent)
        simulated = SimulatedCache(spec, model.block, model.device)
        with attention_scope(model, simulated), torch.inference_mode():
            logits = model.model(ids[None], use_cache=False).logits[0]
        distance[recent] = float((got - logits).abs().mean())
    assert distance[8] < 0.1 * min(distance[7], distance[9])
