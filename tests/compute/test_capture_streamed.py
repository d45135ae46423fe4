"""Models larger than their device: layer by layer from files, or over several devices, with the
same numbers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_models import EXAMPLE, float8_pair, same_sum, save_model, sequences, write_model
from torch.multiprocessing.reductions import StorageWeakRef

from oscar_zoo.artifact.specs import Clip, ServingRecipe, Windows
from oscar_zoo.compute.capture import layerwise
from oscar_zoo.compute.capture.held_out_rows import collect
from oscar_zoo.compute.capture.transformers import capture
from oscar_zoo.compute.job import ComputeOptions, compute_artifact
from oscar_zoo.compute.layer_moments import Need
from oscar_zoo.compute.moments import Moments
from oscar_zoo.errors import NotEnoughMemory
from oscar_zoo.evaluate.measure import Measurement, TaskPrompt, measure
from oscar_zoo.evaluate.questions import Perplexity
from oscar_zoo.evaluate.simulated_cache import CacheSpec
from oscar_zoo.models import placement
from oscar_zoo.models.checkpoint import CheckpointFile
from oscar_zoo.models.loading import LoadedModel, load_model
from oscar_zoo.models.placement import Slot, place

ALL: frozenset[Need] = frozenset(("rows", "weighted", "outputs", "weights"))
SUMS = ("qq", "kk", "k_sum", "vv", "v_sum", "oo", "sst_num", "sst_den", "wo")
LAYERS = 12
MATRICES = 3
"""Of the MLP of a layer."""
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


def test_two_layers_at_most_are_in_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One layer is there to run, and one is on its way; a model in memory has all of them."""
    folder = str(save_model(tmp_path / "model", dtype=torch.bfloat16, num_hidden_layers=LAYERS))
    streamed, whole = (
        most_matrices(monkeypatch, folder, stream=stream) for stream in (True, False)
    )
    assert MATRICES < streamed <= 2 * MATRICES
    assert whole >= LAYERS * MATRICES


def most_matrices(monkeypatch: pytest.MonkeyPatch, folder: str, *, stream: bool) -> int:
    """MLP matrices that exist at most while layers run, as they are stored or in float32."""
    made: list[StorageWeakRef] = []

    def remember(tensor: torch.Tensor) -> None:
        if tensor.shape in ((48, 32), (32, 48)):
            made.append(StorageWeakRef(tensor.untyped_storage()))

    def fetch(stored: CheckpointFile) -> tuple[torch.Tensor, ...]:
        parts = fetched(stored)
        for part in parts:
            remember(part)
        return parts

    def put(slot: Slot, tensor: torch.Tensor) -> None:
        remember(tensor)
        kept(slot, tensor)

    counts: list[int] = []

    def count(*_: object) -> None:
        counts.append(sum(not storage.expired() for storage in list(made)))

    fetched, kept = CheckpointFile.fetch, Slot.put
    with monkeypatch.context() as patch:
        patch.setattr(CheckpointFile, "fetch", fetch)
        patch.setattr(Slot, "put", put)
        loaded = load_model(folder, stream=stream, dtype="float32")
        for name, module in loaded.model.named_modules():
            if name.endswith(("q_proj", "down_proj")):
                module.register_forward_hook(count)
        capture(loaded, DATA, needs=frozenset(("rows",)))
    assert len(counts) >= 2 * LAYERS * len(DATA.sequences)
    return max(counts)


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
