"""Models larger than their device: layer by layer from files, or over several devices, with the
same numbers."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from capture_models import same_sum, sequences
from random_qwen3 import EXAMPLE, write_model
from saved_models import float8_pair, save_model

from oscar_zoo.artifact.specs import Clip, ServingRecipe, Windows
from oscar_zoo.compute.capture import layerwise
from oscar_zoo.compute.capture.held_out_rows import collect
from oscar_zoo.compute.capture.transformers import capture
from oscar_zoo.compute.job import ComputeOptions, compute_artifact
from oscar_zoo.compute.layer_moments import Need
from oscar_zoo.compute.moments import Moments
from oscar_zoo.errors import NotEnoughMemory
from oscar_zoo.evaluate.simulated_cache import CacheSpec
from oscar_zoo.evaluate.tasks.base import Measurement, TaskPrompt, measure
from oscar_zoo.evaluate.tasks.perplexity import Perplexity
from oscar_zoo.models import placement
from oscar_zoo.models.loading import LoadedModel, load_model
from oscar_zoo.models.offload import place

ALL: frozenset[Need] = frozenset(("rows", "weighted", "outputs", "weights"))
SUMS = ("qq", "kk", "k_sum", "vv", "v_sum", "oo", "sst_num", "sst_den", "wo")
LAYERS = 12
DATA = sequences(40, 23, 1, 33)
TASK = Perplexity(
    tuple(
        TaskPrompt(torch.tensor(ids), torch.arange(5, len(ids) - 1))
        for ids in DATA.sequences
        if len(ids) > 6
    )
)
RECIPE = ServingRecipe(group_size=16, windows=Windows(sink=2, recent=4), clip=Clip(k=0.96, v=0.92))


def assert_equal(one: Moments, other: Moments) -> None:
    for layer in one.layers:
        for name in SUMS:
            assert same_sum(getattr(one.layers[layer], name), getattr(other.layers[layer], name)), (
                layer,
                name,
            )


def measured(loaded: LoadedModel) -> list[Measurement]:
    return [measure(loaded, TASK, cache) for cache in (None, CacheSpec(None, None, RECIPE))]


@contextmanager
def largest(model: torch.nn.Module) -> Iterator[list[int]]:
    """Bytes of this process beside mapped files, as the system counts them, at their most while
    layers run."""
    most = [0]

    def count(*_: object) -> None:
        most[0] = max(most[0], own_bytes())

    watched = [
        module for name, module in model.named_modules() if name.endswith(("q_proj", "down_proj"))
    ]
    handles = [module.register_forward_hook(count) for module in watched]
    assert len(handles) == 2 * LAYERS
    yield most
    for handle in handles:
        handle.remove()


def give_back_freed() -> None:
    """Memory that earlier tests have freed, which the C library keeps and would use again: growth
    would not show."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def own_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))


@pytest.mark.parametrize("family", ["Qwen3", "Qwen3Moe", "Qwen3Next", "Gemma3Text"])
def test_streamed_weights_give_the_bits_of_the_model_in_memory(family: str, tmp_path: Path) -> None:
    folder = str(save_model(tmp_path / "model", family, shard="30KB"))
    whole, streamed = load_model(folder), load_model(folder, stream=True)
    assert (whole.streamed, streamed.streamed) == (False, True)
    places: set[str] = set()
    got = capture(streamed, DATA, needs=ALL, progress=lambda done, total, where: places.add(where))
    assert_equal(got, capture(whole, DATA, needs=ALL))
    assert "layer 1 of" in min(places)
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

    options = ComputeOptions(
        model=str(write_model(tmp_path / "model")),
        model_name="m",
        calib_data=EXAMPLE.parents[1] / "text/calibration.txt",
        calib_tokens=256,
        seq_len=64,
        recipe=RECIPE,
        method="wush",
        output_dir=tmp_path / "made" / "rotation",
    )
    with pytest.raises(
        NotEnoughMemory, match=r"^model needs about \d+ GB on cpu, .* GB are free\.$"
    ):
        compute_artifact(options, progress=ends)
    assert not (tmp_path / "made").exists()


def test_tied_embeddings_in_bfloat16() -> None:
    data = sequences(64, 30, vocabulary=2048)
    whole, streamed = load_model(str(EXAMPLE)), load_model(str(EXAMPLE), stream=True)
    assert streamed.model.lm_head.weight is streamed.model.model.embed_tokens.weight
    assert_equal(capture(streamed, data, needs=ALL), capture(whole, data, needs=ALL))


def test_float8_is_dequantized_layer_by_layer_and_its_output_weights_are_read(
    tmp_path: Path,
) -> None:
    folders = float8_pair(EXAMPLE, tmp_path)
    data = sequences(64, 30, vocabulary=2048)
    streamed, whole, plain = (
        load_model(str(folder), stream=stream)
        for folder, stream in zip((folders[0], *folders), (True, False, False), strict=True)
    )
    want = capture(plain, data, needs=ALL)
    for loaded in (streamed, whole):
        assert_equal(capture(loaded, data, needs=ALL), want)


def test_layers_that_run_whole_give_the_same_bits_too(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Hidden states of all sequences do not fit: every pass reads every layer."""
    folder = str(save_model(tmp_path / "model"))
    want = capture(load_model(folder), DATA, needs=ALL)
    monkeypatch.setattr(layerwise, "MEMORY_SHARE", 0.0)
    assert_equal(capture(load_model(folder, stream=True), DATA, needs=ALL), want)


@pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="asks Linux for the memory of this process"
)
def test_two_layers_at_most_are_in_memory(tmp_path: Path) -> None:
    """A streamed pass needs less than half of the model; a model in memory needs nearly all.

    Two layers are a sixth of it. On a busy machine the process grew by up to a third.

    The checkpoint is bfloat16 and the model float32, so weights in memory are never a mapped file.
    """
    shape = {"num_hidden_layers": LAYERS, "hidden_size": 256, "intermediate_size": 12_288}
    folder = str(save_model(tmp_path / "model", dtype=torch.bfloat16, **shape))
    all_layers = LAYERS * 3 * 256 * 12_288 * 4  # bytes of the three MLP matrices of every layer
    # The first pass is not measured: thread pools and lazy imports allocate memory once.
    share_of_model(folder, all_layers, stream=True)
    streamed = share_of_model(folder, all_layers, stream=True)
    whole = share_of_model(folder, all_layers, stream=False)
    assert streamed < 1 / 2 < 10 / 12 < whole, (streamed, whole)


def share_of_model(folder: str, all_layers: int, *, stream: bool) -> float:
    """Growth of this process while it captures from the model, as a share of `all_layers` bytes."""
    gc.collect()
    give_back_freed()
    before = own_bytes()
    loaded = load_model(folder, stream=stream, dtype="float32")
    with largest(loaded.model) as most:
        capture(loaded, DATA, needs=frozenset(("rows",)))
    return (most[0] - before) / all_layers


@pytest.mark.parametrize("share", [0.6, 0.0], ids=["layers", "passes"])
def test_layers_on_several_devices_and_on_disk(
    share: float, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A processor is one device: what accelerate offloads still comes and goes as it does with
    several."""
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    monkeypatch.setattr(layerwise, "MEMORY_SHARE", share)
    folder = str(save_model(tmp_path / "model", num_hidden_layers=4))
    want = load_model(folder)
    rest = dict.fromkeys(("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"), "cpu")
    layers = {f"model.layers.{number}": "disk" if number % 2 else "cpu" for number in range(4)}
    monkeypatch.setattr(
        placement,
        "place",
        lambda model, device_map: place(model, rest | layers, str(tmp_path / "offload")),
    )
    spread = load_model(folder, stream=False)
    assert spread.spread
    assert any(parameter.is_meta for parameter in spread.model.parameters())
    assert_equal(capture(spread, DATA, needs=ALL), capture(want, DATA, needs=ALL))
    got, plain = measured(spread), measured(want)
    assert [one.value for one in got] == pytest.approx([one.value for one in plain], rel=1e-6)


def test_auto_without_a_gpu_is_the_processor() -> None:
    assert load_model(str(EXAMPLE), device="auto").device == torch.device(
        "cpu" if not torch.cuda.is_available() else 0
    )
