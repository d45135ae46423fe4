"""The chunked reference server against plain generation, the one-pass cache, and a drawn picture of
who reads what."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_models import write_model
from torch import Tensor

from oscar_zoo.artifact.formats import hadamard_set
from oscar_zoo.artifact.specs import Clip, ServingRecipe, Windows
from oscar_zoo.evaluate.generate import GenerationRequest, greedy_generate
from oscar_zoo.evaluate.simulated_cache import STORED, CacheSpec, SimulatedCache
from oscar_zoo.models.attention import attention_scope
from oscar_zoo.models.loading import LoadedModel, load_model

PROMPT = torch.randint(3, 2000, (70,), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_model(str(write_model(tmp_path_factory.mktemp("model"))), dtype="float32")


def cache(model: LoadedModel, sink: int, recent: int) -> CacheSpec:
    recipe = ServingRecipe(
        group_size=16, clip=Clip(k=0.96, v=0.92), windows=Windows(sink=sink, recent=recent)
    )
    return CacheSpec(hadamard_set(model.block, "k"), hadamard_set(model.block, "v"), recipe)


def one_pass(model: LoadedModel, ids: Tensor, spec: CacheSpec) -> Tensor:
    with (
        attention_scope(model, SimulatedCache(spec, model.block, model.device)),
        torch.inference_mode(),
    ):
        logits: Tensor = model.model(ids[None], use_cache=False).logits[0]
    return logits


@pytest.mark.parametrize("chunk_size", [1, 13, 70, 512])
def test_without_a_cache_it_is_plain_greedy_generation(model: LoadedModel, chunk_size: int) -> None:
    want = model.model.generate(
        PROMPT[None], max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0
    )[0, len(PROMPT) :].tolist()
    got = greedy_generate(
        model, PROMPT.tolist(), cache=None, max_new_tokens=12, chunk_size=chunk_size
    )
    assert got == want


@pytest.mark.parametrize("chunk_size", [7, 64])
def test_windows_that_hold_everything_change_no_token(model: LoadedModel, chunk_size: int) -> None:
    prompt = PROMPT.tolist()
    want = greedy_generate(model, prompt, cache=None, max_new_tokens=12, chunk_size=70)
    got = greedy_generate(
        model, prompt, cache=cache(model, 90, 1), max_new_tokens=12, chunk_size=chunk_size
    )
    assert got == want


def assert_reads_like(model: LoadedModel, got: Tensor, *, recent: int) -> None:
    """`got` is the one-pass result with this window, and far from those with one token more or
    less.

    A value on a rounding tie may fall the other way in another order of float32 sums, so the bound
    is not one of float32 noise but a tenth of what a wrong window does.
    """
    distance = {
        w: float((got - one_pass(model, PROMPT, cache(model, 4, w))).abs().mean())
        for w in (recent - 1, recent, recent + 1)
    }
    assert distance[recent] < 0.1 * min(distance[recent - 1], distance[recent + 1])


def test_decoded_positions_equal_the_one_pass_cache(model: LoadedModel) -> None:
    request = GenerationRequest(model, cache(model, 4, 9))
    assert_reads_like(
        model, torch.stack([request.decode(int(token)) for token in PROMPT]), recent=9
    )


def test_a_chunk_of_one_token_reads_itself_beside_the_whole_recent_window(
    model: LoadedModel,
) -> None:
    request = GenerationRequest(model, cache(model, 4, 9))
    chunks = [request.extend(PROMPT[i : i + 1]) for i in range(len(PROMPT))]
    assert_reads_like(model, torch.cat(chunks), recent=10)


def test_a_chunk_reads_older_tokens_as_the_cache_holds_them_and_its_own_exactly(
    model: LoadedModel,
) -> None:
    request = GenerationRequest(model, cache(model, 2, 3))
    request.extend(PROMPT[:10])
    stretches, mask = request._reads(torch.arange(10, 14), cached=10)
    positions = [(tier, s) for tier, first, last in stretches for s in range(first, last)]
    assert [s for _, s in positions] == list(range(14))
    assert [s for tier, s in positions if tier == STORED] == [2, 3, 4, 5, 6]
    assert mask.sum(1).tolist() == [11, 12, 13, 14]


def test_chunk_boundaries_change_int2_logits(model: LoadedModel) -> None:
    spec = cache(model, 4, 8)
    whole, halves = GenerationRequest(model, spec), GenerationRequest(model, spec)
    one = whole.extend(PROMPT)
    two = torch.cat([halves.extend(PROMPT[:40]), halves.extend(PROMPT[40:])])
    torch.testing.assert_close(one[:40], two[:40], atol=1e-4, rtol=1e-4)
    assert (one[40:] - two[40:]).abs().max() > 1e-2
    exact = GenerationRequest(model, None).extend(PROMPT)
    torch.testing.assert_close(
        one, exact, atol=1e-3, rtol=1e-3
    )  # one chunk reads nothing from the cache


def test_bfloat16_runs(tmp_path: Path) -> None:
    half = load_model(str(write_model(tmp_path)), dtype="bfloat16")
    tokens = greedy_generate(
        half, PROMPT.tolist(), cache=cache(half, 4, 8), max_new_tokens=6, chunk_size=16
    )
    assert len(tokens) == 6
