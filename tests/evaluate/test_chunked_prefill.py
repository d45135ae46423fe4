"""Log-probabilities of prefill: exact where nothing is quantized, and what a prefix-cache hit does
to windows."""

from __future__ import annotations

import pytest
import torch
from tiny_models import write_model

from oscar_zoo.artifact.formats import hadamard_set
from oscar_zoo.artifact.specs import Clip, ServingRecipe, Windows
from oscar_zoo.errors import UsageError
from oscar_zoo.evaluate.generate import prefill_log_probabilities
from oscar_zoo.evaluate.simulated_cache import CacheSpec
from oscar_zoo.models.loading import LoadedModel, load_model

IDS = torch.randint(3, 2000, (70,), generator=torch.Generator().manual_seed(1)).tolist()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_model(str(write_model(tmp_path_factory.mktemp("model"))), dtype="float32")


def cache(model: LoadedModel, sink: int, recent: int) -> CacheSpec:
    recipe = ServingRecipe(
        group_size=16, clip=Clip(k=0.96, v=0.92), windows=Windows(sink=sink, recent=recent)
    )
    return CacheSpec(hadamard_set(model.block, "k"), hadamard_set(model.block, "v"), recipe)


def plain(model: LoadedModel) -> torch.Tensor:
    with torch.inference_mode():
        logits = model.model(torch.tensor([IDS]), use_cache=False).logits[0, :-1].double()
    return logits.log_softmax(1).gather(1, torch.tensor(IDS[1:])[:, None])[:, 0]


@pytest.mark.parametrize(("chunk", "sink", "recent"), [(70, 4, 8), (16, 70, 1), (16, 0, 70)])
def test_where_nothing_is_read_as_int2_it_is_the_model_itself(
    model: LoadedModel, chunk: int, sink: int, recent: int
) -> None:
    for spec in (None, cache(model, sink, recent)):
        got = prefill_log_probabilities(model, IDS, cache=spec, chunk_size=chunk)
        assert torch.tensor(got) == pytest.approx(plain(model).float(), abs=1e-4)


def test_a_hit_is_scored_from_there_on_and_reads_it_as_int2(model: LoadedModel) -> None:
    """A window that holds everything is empty after a hit; only the first tokens are still
    there."""
    want = plain(model)[32:].float()
    spec = cache(model, 0, 70)
    assert torch.tensor(
        prefill_log_probabilities(model, IDS, cache=None, chunk_size=16, hit=32)
    ) == pytest.approx(want, abs=1e-4)
    hit = torch.tensor(prefill_log_probabilities(model, IDS, cache=spec, chunk_size=16, hit=32))
    assert (hit - want).abs().max() > 0.01
    kept, lost = (
        torch.tensor(
            prefill_log_probabilities(
                model, IDS, cache=cache(model, 32, 1), chunk_size=70, hit=32, sinks=s
            )
        )
        for s in (True, False)
    )
    assert kept == pytest.approx(want, abs=1e-4)
    assert lost == pytest.approx(hit, abs=1e-4), "windows hold all of its own tokens in both"


@pytest.mark.parametrize(
    ("count", "chunk", "hit"), [(1, 8, 0), (70, 0, 0), (70, 8, 69), (70, 8, -1)]
)
def test_what_cannot_be_scored_is_refused(
    model: LoadedModel, count: int, chunk: int, hit: int
) -> None:
    with pytest.raises(UsageError, match="cannot be scored"):
        prefill_log_probabilities(model, IDS[:count], cache=None, chunk_size=chunk, hit=hit)
