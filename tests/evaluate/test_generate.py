"""The chunked reference server against plain generation, the one-pass cache, and a drawn picture of
who reads what; also for models with states, convolutions and sliding windows."""

import pytest
import torch
from architectures import shorten_chunks, write_architecture
from torch import Tensor

from oscar_zoo.artifact.formats import hadamard_set
from oscar_zoo.artifact.specs import Clip, ServingRecipe, Windows
from oscar_zoo.errors import UsageError
from oscar_zoo.evaluate.generate import (
    GenerationRequest,
    greedy_generate,
    prefill_log_probabilities,
)
from oscar_zoo.evaluate.simulated_cache import STORED, CacheSpec, SimulatedCache
from oscar_zoo.models.attention import attention_scope
from oscar_zoo.models.loading import LoadedModel, load_model

LONG = torch.randint(3, 2000, (300,), generator=torch.Generator().manual_seed(1))
"""Longer than the sliding window of Gemma 3, which is 256; other models get the beginning."""
PROMPT = LONG[:70]
IDS = PROMPT.tolist()
HYBRIDS = ("lfm2", "qwen3_5_moe", "granite-4-h", "falcon_h1", "nemotron_h", "gemma3_text")


@pytest.fixture(scope="module", params=HYBRIDS)
def hybrid(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = write_architecture(request.param, tmp_path_factory.mktemp("model"), dtype="float32")
    return load_model(str(shorten_chunks(folder)), dtype="float32")


def cache(model: LoadedModel, sink: int, recent: int) -> CacheSpec:
    windows = Windows(sink=sink, recent=recent)
    recipe = ServingRecipe(group_size=16, clip=Clip(k=0.96, v=0.92), windows=windows)
    return CacheSpec(hadamard_set(model.block, "k"), hadamard_set(model.block, "v"), recipe)


def greedy(model: LoadedModel, spec: CacheSpec | None, chunk: int, new: int = 12) -> list[int]:
    return greedy_generate(model, IDS, cache=spec, max_new_tokens=new, chunk_size=chunk)


def assert_reads_like(
    model: LoadedModel, got: Tensor, ids: Tensor, *, sink: int = 4, recent: int
) -> None:
    """`got` is the one-pass result with this window, and far from those with one token more or
    less.

    A value on a rounding tie may fall the other way in another order of float32 sums, so the bound
    is not one of float32 noise but a tenth of what a wrong window does.
    """
    distance = []
    for window in (recent - 1, recent, recent + 1):
        simulated = SimulatedCache(cache(model, sink, window), model.block, model.device)
        with attention_scope(model, simulated), torch.inference_mode():
            logits = model.model(ids[None], use_cache=False).logits[0]
        distance.append(float((got - logits).abs().mean()))
    assert distance[1] < 0.1 * min(distance[0], distance[2])


@pytest.mark.parametrize("chunk", [1, 13, 70, 512])
def test_without_a_cache_it_is_plain_greedy_generation(model: LoadedModel, chunk: int) -> None:
    want = model.model.generate(
        PROMPT[None], max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0
    )[0, len(PROMPT) :].tolist()
    assert greedy(model, None, chunk) == want


@pytest.mark.parametrize("chunk", [7, 64])
def test_windows_that_hold_everything_change_no_token(model: LoadedModel, chunk: int) -> None:
    assert greedy(model, cache(model, 90, 1), chunk) == greedy(model, None, 70)


def test_decoded_positions_equal_the_one_pass_cache(model: LoadedModel) -> None:
    request = GenerationRequest(model, cache(model, 4, 9))
    got = torch.stack([request.decode(int(token)) for token in PROMPT])
    assert_reads_like(model, got, PROMPT, recent=9)


def test_a_chunk_of_one_token_reads_itself_beside_all_of_the_window(model: LoadedModel) -> None:
    request = GenerationRequest(model, cache(model, 4, 9))
    chunks = [request.extend(PROMPT[i : i + 1]) for i in range(len(PROMPT))]
    assert_reads_like(model, torch.cat(chunks), PROMPT, recent=10)


def test_a_chunk_reads_older_tokens_as_the_cache_and_its_own_exactly(model: LoadedModel) -> None:
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
    # One chunk reads nothing from the cache.
    torch.testing.assert_close(one, exact, atol=1e-3, rtol=1e-3)


def test_a_hybrid_without_a_cache_is_the_model_itself(hybrid: LoadedModel) -> None:
    """Chunks and decoded tokens, without a cache of transformers, whose chunked states are not the
    question."""
    gemma = hybrid.model.config.model_type == "gemma3_text"
    ids = LONG if gemma else LONG[:120]
    with torch.inference_mode():
        want = hybrid.model(ids[None], use_cache=False).logits[0]
    request, cut = GenerationRequest(hybrid, None), len(ids) * 2 // 5
    got = [request.extend(ids[:cut]), request.extend(ids[cut:-3])]
    got += [request.decode(int(token))[None] for token in ids[-3:]]
    assert torch.allclose(torch.cat(got), want, rtol=1e-3, atol=2e-3)


def test_decoded_positions_of_a_hybrid_equal_the_one_pass_cache(hybrid: LoadedModel) -> None:
    """Token by token every position reads like a decoded one, in the layers below too."""
    request = GenerationRequest(hybrid, cache(hybrid, 2, 4))
    got = torch.stack([request.decode(int(token)) for token in LONG[:12]])
    assert_reads_like(hybrid, got, LONG[:12], sink=2, recent=4)


def probabilities(model: LoadedModel, spec: CacheSpec | None, chunk: int, **hit: object) -> Tensor:
    return torch.tensor(prefill_log_probabilities(model, IDS, cache=spec, chunk_size=chunk, **hit))


def plain(model: LoadedModel) -> Tensor:
    with torch.inference_mode():
        logits = model.model(torch.tensor([IDS]), use_cache=False).logits[0, :-1].double()
    return logits.log_softmax(1).gather(1, torch.tensor(IDS[1:])[:, None])[:, 0].float()


@pytest.mark.parametrize(("chunk", "sink", "recent"), [(70, 4, 8), (16, 70, 1), (16, 0, 70)])
def test_where_nothing_is_read_as_int2_it_is_the_model_itself(
    model: LoadedModel, chunk: int, sink: int, recent: int
) -> None:
    for spec in (None, cache(model, sink, recent)):
        assert probabilities(model, spec, chunk) == pytest.approx(plain(model), abs=1e-4)


def test_a_hit_is_scored_from_there_on_and_reads_it_as_int2(model: LoadedModel) -> None:
    """A window that holds everything is empty after a hit; only the first tokens are still
    there."""
    want = plain(model)[32:]
    assert probabilities(model, None, 16, hit=32) == pytest.approx(want, abs=1e-4)
    hit = probabilities(model, cache(model, 0, 70), 16, hit=32)
    assert (hit - want).abs().max() > 0.01
    kept, lost = (
        probabilities(model, cache(model, 32, 1), 70, hit=32, sinks=sinks)
        for sinks in (True, False)
    )
    assert kept == pytest.approx(want, abs=1e-4)
    assert lost == pytest.approx(hit, abs=1e-4), "windows hold all of its own tokens in both"


@pytest.mark.parametrize(
    ("count", "chunk", "hit"), [(1, 8, 0), (70, 0, 0), (70, 8, 69), (70, 8, -1)]
)
def test_what_has_no_score_is_refused(model: LoadedModel, count: int, chunk: int, hit: int) -> None:
    with pytest.raises(UsageError, match="cannot be scored"):
        prefill_log_probabilities(model, IDS[:count], cache=None, chunk_size=chunk, hit=hit)
