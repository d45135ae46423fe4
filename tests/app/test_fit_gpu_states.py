"""What `fit-gpu` says of models with states or sliding windows, and of names that lack a fact."""

from __future__ import annotations

from pathlib import Path

import pytest
from cli_output import Cli, numbers

from oscar_zoo import fit_gpu
from oscar_zoo.engines.sglang.launch.preflight import ServerDemand, check_memory
from oscar_zoo.engines.sglang.sizing import splits
from oscar_zoo.errors import NotEnoughMemory, UsageError
from oscar_zoo.models.config_file import ConfigFile
from oscar_zoo.models.other_layers import STATES_PER_REQUEST
from oscar_zoo.models.weight_count import weights_of_config, weights_of_name
from oscar_zoo.registry.catalog import Catalog, recipe_for
from oscar_zoo.serving.memory import needs_of_recipe

MODELS = Path(__file__).parents[2] / "docs/figures/models"
GB = 10**9


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    return Cli(capsys)


@pytest.mark.parametrize(("name", "term"), [("gpt-oss-20b", "sliding"), ("Qwen3.5-35B-A3B", "st")])
def test_windows_and_states_are_in_the_sum(cli: Cli, name: str, term: str) -> None:
    lines = cli(0, "fit-gpu", MODELS / name, "--memory", "141GB", "--tp", "1").splitlines()
    (line,) = (line for line in lines if line.startswith("INT2: "))
    room, rows, row, slots, slot, left, again, token, found = numbers(line.partition(": ")[2])
    assert term in line and room - rows * row - slots * slot == left == again
    assert left // token == found


def test_states_are_counted_by_name_as_by_folder() -> None:
    """A server with 400 requests and no prefix cache had 25.8 GB of states (docs/figures.md)."""
    words = {"gpus": 1, "weights": 70 * GB}
    name = fit_gpu("Qwen3.5-35B-A3B", 141 * GB, **words)  # type: ignore[arg-type]
    folder = fit_gpu(str(MODELS / "Qwen3.5-35B-A3B"), 141 * GB, **words)  # type: ignore[arg-type]
    assert name.caches == folder.caches and name.other_layers
    assert round(400 * name.caches[0].cache.state / STATES_PER_REQUEST / GB, 1) == 25.8
    name, folder = (
        fit_gpu(one, 24 * GB, weights=14 * GB)
        for one in ("gpt-oss-20b", str(MODELS / "gpt-oss-20b"))
    )
    assert name.caches == folder.caches and name.caches[-1].cache.window == 128


@pytest.fixture
def unknown_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The zoo as it is for models of which it knows the geometry alone."""
    recipes = (one.model_copy(update={"config": {}}) for one in Catalog.packaged().recipes())
    bare = Catalog(recipes)
    monkeypatch.setattr("oscar_zoo.registry.catalog._packaged", lambda: bare)


@pytest.mark.usefixtures("unknown_shapes")
def test_names_whose_states_nobody_knows_get_a_range(cli: Cli) -> None:
    shown = cli(0, "fit-gpu", "Qwen3.5-4B", "--memory", "24GB")
    first, second, *_ = shown.splitlines()
    assert "between 372,000 and 2,760,000 tokens fit with INT2, and between" in first
    assert "does not know the size of the states of Qwen3.5-4B" in second
    assert "hf download Qwen/Qwen3.5-4B config.json" in second
    facts = cli.json(0, "fit-gpu", "Qwen3.5-4B", "--memory", "24GB", "--requests", 64)
    assert not facts["other_layers_counted"] and facts["fits"] is None
    int2 = facts["caches"][-1]
    assert (int2["fits"], int2["max_requests"], int2["running_requests"]) == (None, 0, 0)
    assert int2["most_requests"] > 64 and int2["tokens"] < int2["most_tokens"]
    assert cli.json(0, "fit-gpu", "Qwen3.5-4B", "--memory", "24GB")["fits"] is True
    small = cli.json(0, "fit-gpu", "Qwen3.5-4B", "--memory", "8GB")
    assert small["fits"] is False
    shown = cli(0, "fit-gpu", "Qwen3.5-4B", "--memory", "8GB")
    assert "leave nothing for a cache" in shown and "range" not in shown
    assert "2 GPUs of this size may be enough" in shown.splitlines()[0]
    windows = fit_gpu("gemma-3-12b-it", 80 * GB)
    assert windows.unknown == "the length of the sliding windows"
    assert all(one.tokens == one.most_tokens for one in windows.caches)
    assert windows.caches[-1].requests < windows.caches[-1].most_requests


def test_text_and_json_say_the_same(cli: Cli) -> None:
    for name in ("Qwen3.5-35B-A3B", "Qwen3.5-4B", "gemma-4-31B-it", "gpt-oss-20b", "Qwen3-8B"):
        rows_are_the_json(cli, name)


def rows_are_the_json(cli: Cli, name: str) -> None:
    words = ("fit-gpu", name, "--memory", "80GB", "--tp", "2")
    lines = cli(0, *words).splitlines()
    for one in cli.json(0, *words)["caches"]:
        (row,) = (line for line in lines if line.startswith(one["kind"]) and " kB " in line)
        told = numbers(row.partition(" kB ")[2])
        assert {one["tokens"], one["most_tokens"], one["max_context"]} <= {*told}
        assert {one["max_requests"], one["most_requests"]} <= {*told}


@pytest.mark.parametrize(
    "name",
    [
        "Qwen3-8B", "Qwen3.5-35B-A3B", "Qwen3.5-4B", "gpt-oss-20b", "gpt-oss-120b", "GLM-4.7-FP8",
        "gemma-3-12b-it", "Olmo-3-7B-Instruct", "LFM2-1.2B", "granite-4.0-h-tiny",
        "Falcon-H1-7B-Instruct", "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
    ],
)  # fmt: skip
@pytest.mark.parametrize("gpus", [1, 2, 4, 8])
def test_what_fits_is_not_refused_before_a_start(name: str, gpus: int) -> None:
    """`serve` has the same number of requests, and finds enough memory for them."""
    recipe = recipe_for(name)
    assert recipe is not None
    if not splits(recipe.geometry, gpus):
        with pytest.raises(UsageError, match="cannot share"):
            fit_gpu(name, 141 * GB, gpus=gpus)
        return
    report = fit_gpu(name, 141 * GB, gpus=gpus)
    server = ServerDemand(
        model=name,
        geometry=recipe.geometry,
        windows=recipe.serving.windows,
        weights=report.weights.nbytes,
        itemsize=None,
        device="cuda",
        tensor_parallel=gpus,
        memory=141 * GB,
    )
    assert server.usual_requests == report.usual_requests
    assert server.demand().weights == report.gpu_weights
    if report.fits:
        check_memory(server, 141 * GB)
    else:
        with pytest.raises(NotEnoughMemory):
            check_memory(server, 141 * GB)


WITHOUT_SIZE = {
    "GLM-4.6", "Llama-4-Maverick-17B-128E-Instruct", "Llama-4-Scout-17B-16E-Instruct",
    "Ministral-3-8B-Instruct-2512",
}  # fmt: skip


def test_names_with_a_range_are_these() -> None:
    """Their other layers keep chunks, which no server of ours has."""
    found = Catalog.packaged().recipes()
    ranges = {one.name for one in found if needs_of_recipe(one).unknown is not None}
    assert ranges == {one for one in WITHOUT_SIZE if one.startswith("Llama-4")}


def test_names_without_a_size_are_these() -> None:
    found = Catalog.packaged().recipes()
    assert {one.name for one in found if needs_of_recipe(one).weights is None} == WITHOUT_SIZE


def test_weights_are_counted_from_what_recipes_know() -> None:
    """Shapes are those of the folders that were measured, of which two have fewer layers."""
    for name, folder, layers in (
        ("MiniMax-M2", "MiniMax-M2-20-layers", 62),
        ("GLM-4.7-FP8", "GLM-4.7-FP8-20-layers", 92),
    ):
        config = ConfigFile.of_folder(MODELS / folder).as_written
        counted = weights_of_config(ConfigFile(config | {"num_hidden_layers": layers}))
        found = fit_gpu(name, 80 * GB).weights
        assert (found.nbytes, found.source) == (counted, "counted from its recipe")
    config = ConfigFile.of_folder(MODELS / "gpt-oss-20b").as_written
    packed = ConfigFile(config | {"quantization_config": {"quant_method": "mxfp4"}})
    assert fit_gpu("gpt-oss-20b", 80 * GB).weights.nbytes == weights_of_config(packed)
    assert fit_gpu("LFM2-350M", 8 * GB).weights.nbytes == 0.7 * GB
    # Its shapes are 0.75 billion numbers, without the tower for images that its name counts.
    assert fit_gpu("Qwen3.5-0.8B", 8 * GB).weights.nbytes == 1.6 * GB
    assert fit_gpu("Falcon-H1-7B-Instruct", 24 * GB).weights.nbytes > 15 * GB
    assert weights_of_name("Qwen2.5-7B-Instruct-1M") == 14 * GB
    assert fit_gpu("tiny-qwen3", GB).weights == fit_gpu("tiny-qwen3-hard", GB).weights
