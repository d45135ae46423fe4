"""Models larger than their device: layer by layer from files, or over several devices, with the
same numbers."""

from pathlib import Path

import pytest
import torch
from tiny_models import EXAMPLE, float8_pair, same_sum, save_model, sequences, write_model

from oscar_zoo.artifact.specs import Clip, ServingRecipe, Windows
from oscar_zoo.compute.capture.rows import collect
from oscar_zoo.compute.capture.transformers import capture
from oscar_zoo.compute.job import compute_artifact
from oscar_zoo.compute.moments import Moments, Need
from oscar_zoo.compute.options import Job
from oscar_zoo.errors import NotEnoughMemory
from oscar_zoo.evaluate.measure import Measurement, TaskPrompt, measure
from oscar_zoo.evaluate.questions import Perplexity
from oscar_zoo.evaluate.simulated_cache import CacheSpec
from oscar_zoo.models.loading import LoadedModel, load_model

ALL: frozenset[Need] = frozenset(("rows", "weighted", "outputs", "weights"))
SUMS = ("qq", "kk", "k_sum", "vv", "v_sum", "oo", "sst_num", "sst_den", "wo")
"""Of the MLP of a layer."""
DATA = sequences(40, 23, 1, 33)
PROMPTS = [torch.tensor(ids) for ids in DATA.sequences if len(ids) > 6]
TASK = Perplexity(tuple(TaskPrompt(ids, torch.arange(5, len(ids) - 1)) for ids in PROMPTS))
RECIPE = ServingRecipe(group_size=16, windows=Windows(sink=2, recent=4), clip=Clip(k=0.96, v=0.92))


def assert_equal(one: Moments, other: Moments) -> None:
    for layer in one.layers:
        for name in SUMS:
            mine, theirs = (getattr(some.layers[layer], name) for some in (one, other))
            assert same_sum(mine, theirs), (layer, name)


def measured(loaded: LoadedModel) -> list[Measurement]:
    return [measure(loaded, TASK, cache) for cache in (None, CacheSpec(None, None, RECIPE))]


@pytest.mark.parametrize("family", ["Qwen3", "Qwen3Moe", "Qwen3Next", "Gemma3Text"])
def test_streamed_weights_give_the_bits_of_the_model_in_memory(family: str, tmp_path: Path) -> None:
    folder = str(save_model(tmp_path / "model", family, shard="30KB"))
    whole, streamed = load_model(folder), load_model(folder, stream=True)
    assert (whole.streamed, streamed.streamed) == (False, True)
    news: list[tuple[int, int]] = []
    got = capture(streamed, DATA, needs=ALL, progress=lambda *one: news.append(one))
    assert_equal(got, capture(whole, DATA, needs=ALL))
    assert len(news) == 1 + streamed.block.num_layers * len(DATA.sequences)  # layer by layer
    assert measured(streamed) == measured(whole)


def test_held_out_rows_are_the_same(tmp_path: Path) -> None:
    folder = str(save_model(tmp_path / "model"))
    one, other = (
        collect(load_model(folder, stream=stream), DATA.sequences, RECIPE.windows)
        for stream in (True, False)
    )
    for layer in (0, 1):
        assert torch.equal(one(layer).o_proj, other(layer).o_proj)
        for mine, theirs in zip(one(layer).sequences, other(layer).sequences, strict=True):
            assert torch.equal(mine.even.rows, theirs.even.rows)
            assert torch.equal(mine.focused.rows, theirs.focused.rows)
            assert torch.equal(mine.key, theirs.key)
            assert torch.equal(mine.value, theirs.value)


def test_memory_that_ends_in_the_middle_of_a_job_is_one_line(tmp_path: Path) -> None:
    def ends(done: int, total: int, phase: str) -> None:
        if phase == "capture" and done:
            torch.empty(1 << 52, dtype=torch.uint8)

    options = Job(
        model=str(write_model(tmp_path / "model")),
        model_name="m",
        calib_data=EXAMPLE.parents[1] / "text/calibration.txt",
        calib_tokens=256,
        seq_len=64,
        recipe=RECIPE,
        method="wush",
        output=tmp_path / "made" / "rotation",
    )
    with pytest.raises(NotEnoughMemory, match=r"^model needs about \d+ GB on cpu, .* are free\."):
        compute_artifact(options, progress=ends)
    assert not (tmp_path / "made").exists()


def test_float8_is_dequantized_by_layer_and_its_output_weights_are_read(tmp_path: Path) -> None:
    folders = float8_pair(EXAMPLE, tmp_path)
    data = sequences(64, 30, vocabulary=2048)
    streamed, whole, plain = (
        load_model(str(folder), stream=stream)
        for folder, stream in zip((folders[0], *folders), (True, False, False), strict=True)
    )
    want = capture(plain, data, needs=ALL)
    for loaded in (streamed, whole):
        assert_equal(capture(loaded, data, needs=ALL), want)
