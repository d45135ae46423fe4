"""What fits a GPU: the calculation, where its numbers come from, and the command."""

import importlib
import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from cli_output import Cli, numbers
from tiny_artifacts import artifact_files, write_folder

from oscar_zoo import fit_gpu
from oscar_zoo.artifact.specs import Clip, ServingRecipe, Widths
from oscar_zoo.engines.sglang.capacity import Cache
from oscar_zoo.engines.sglang.launch.preflight import ServerDemand, check_memory
from oscar_zoo.engines.sglang.sizing import MOST, splits
from oscar_zoo.errors import NotEnoughMemory, UsageError
from oscar_zoo.models.config_file import ConfigFile
from oscar_zoo.models.other_layers import STATES_PER_REQUEST, OtherLayers, other_layers
from oscar_zoo.models.weight_count import weights_of_config, weights_of_name
from oscar_zoo.registry.catalog import Catalog, recipe_for
from oscar_zoo.serving.fit_gpu import FitReport
from oscar_zoo.serving.memory import estimate_memory, needs_of_recipe

ROOT = Path(__file__).parents[2]
MODELS = ROOT / "docs/figures/models"
GB = 10**9


def test_the_estimate_is_of_the_widths_that_all_artifacts_have() -> None:
    recipe = recipe_for("Qwen3-8B")
    assert recipe is not None
    plain = recipe.serving
    layers = recipe.geometry.num_layers
    four = plain.with_widths(Widths.uniform(layers, k=4, v=4, clip=plain.clip))

    def token_bytes(*serving: ServingRecipe) -> int:
        made = [SimpleNamespace(recipe=one) for one in serving]
        found = estimate_memory(recipe, made, 24 * GB)
        assert found is not None
        return int(found["int2_token_bytes"])

    assert token_bytes() == token_bytes(plain, four) == token_bytes(plain)
    assert token_bytes(four, four) > 1.7 * token_bytes()


def kinds(report: FitReport) -> dict[str, Cache]:
    """The caches by their kind."""
    return {one.kind: one.cache for one in report.caches}


@pytest.mark.parametrize("memory", [24 * GB, 80 * GB])
@pytest.mark.parametrize(
    "name",
    ["Qwen3-8B", "Qwen3-32B", "Qwen3.5-27B", "Qwen3-Next-80B-A3B", "gpt-oss-20b", "LFM2-350M"],
)
def test_it_agrees_with_info(name: str, memory: int) -> None:
    known = estimate_memory(recipe_for(name), (), memory)
    report = fit_gpu(name, memory)
    assert known is not None
    (card,) = known["gpus"]
    assert known["weights_bytes"] == report.weights.nbytes
    assert known["weights_source"] == report.weights.source
    assert (card["gpus"], card["requests"]) == (report.gpus, report.requests)
    for kind in ("int2", "bf16"):
        one = report.of_kind(kind.upper())
        assert card[f"{kind}_tokens"] == one.tokens
        assert card[f"{kind}_requests"] == one.running
        if report.gpus == 1:  # `info` tells what all GPUs hold together
            assert known[f"{kind}_token_bytes"] == one.cache.token
            assert known["state_bytes_per_request"] == one.cache.state
            if kind == "int2":
                assert known["window_bytes_per_request"] == one.cache.request
    assert known["other_layers_unknown"] is None and report.other_layers


@pytest.mark.parametrize("gpus", [1, 2])
def test_the_memory_of_the_host_is_shared_by_all_gpus(gpus: int) -> None:
    report = fit_gpu("Qwen3-8B", 24 * GB, gpus=gpus, host_cache="64GiB")
    assert report.of_kind("INT2").token_bytes == 20_736 // gpus
    each = int((64 << 30) / 1.05 / gpus / GB) * GB
    assert report.host_tokens == each // (20_736 // gpus)
    assert report.host_requests == report.host_tokens // 32_768
    assert report.disk_request_bytes == 20_736 * 32_768 + 64 * 147_456
    assert fit_gpu("Qwen3-8B", 24 * GB).host_tokens == 0
    for model, engine in (("Qwen3-8B", "vllm"), ("gpt-oss-20b", "sglang")):
        with pytest.raises(UsageError, match="--host-cache does not work with"):
            fit_gpu(model, 24 * GB, host_cache="64GiB", engine=engine)


def test_states_and_windows_come_from_the_configuration() -> None:
    hybrid, windows = MODELS / "Qwen3.5-35B-A3B", MODELS / "gpt-oss-20b"
    states = kinds(fit_gpu(str(hybrid), 141 * GB, gpus=1))
    one = 30 * (4 * 32 * 128 * 128 + 2 * 3 * (2 * 16 * 128 + 32 * 128))  # 30 of 40 layers
    assert states["BF16"].request == STATES_PER_REQUEST * one
    assert states["INT2"].request == STATES_PER_REQUEST * one + (256 + 128) * states["BF16"].token
    sliding = kinds(fit_gpu(str(windows), 24 * GB, weights=13 * GB))
    assert [(c.window, c.window_token) for c in sliding.values()] == [
        (128, 2 * 12 * 8 * 128),
        (128, 12 * 8 * 128),
        (128, 2 * 12 * 8 * 128),  # windows stay in BF16
    ]
    assert sliding["INT2"].token < sliding["FP8"].token == 12 * 8 * 128


def test_what_other_layers_keep_in_other_kinds_of_models() -> None:
    nemotron = {
        "hybrid_override_pattern": "M-*E", "mamba_num_heads": 8, "mamba_head_dim": 64,
        "ssm_state_size": 128, "n_groups": 2, "conv_kernel": 4,
    }  # fmt: skip
    state = 4 * 8 * 64 * 128 + 2 * 3 * (8 * 64 + 2 * 2 * 128)
    assert other_layers(ConfigFile(nemotron), [2]) == OtherLayers(state=5 * state)
    short = {
        "layer_types": ["conv", "full_attention", "conv"],
        "hidden_size": 64,
        "conv_L_cache": 3,
    }
    assert other_layers(ConfigFile(short), [1]) == OtherLayers(state=5 * 2 * 2 * 2 * 64)
    assert other_layers(ConfigFile({"layer_types": ["full_attention", "new"]}), [0]) is None
    assert other_layers(ConfigFile({"num_hidden_layers": 2}), [0, 1]) == OtherLayers()


def test_weights_are_those_of_the_files_the_shapes_or_the_name(tmp_path: Path) -> None:
    """Qwen3-30B-A3B has 30.5 billion parameters, as its card says."""
    folder = MODELS / "Qwen3-30B-A3B"
    counted = weights_of_config(ConfigFile.of_folder(folder))
    assert counted is not None and abs(counted / (2 * 30.5e9) - 1) < 0.01
    fp8 = ConfigFile.of_folder(folder).as_written | {"quantization_config": {"quant_method": "fp8"}}
    assert 0.49 < (weights_of_config(ConfigFile(fp8)) or 0) / counted < 0.52
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "config.json").write_text(json.dumps(ConfigFile.of_folder(folder).as_written))
    (mine / "model.safetensors").write_bytes(bytes(1000))
    assert fit_gpu(mine.as_posix(), 80 * GB).weights.nbytes == 1000
    assert fit_gpu("Qwen3-14B", 80 * GB).weights.nbytes == 28 * GB


@pytest.mark.parametrize(("name", "gigabytes", "tokens"), [
    ("AWQ", 6.1, 719_000), ("GPTQ", 6.1, 719_000), ("FP8", 9.4, 558_000), ("NVFP4", 6.4, 704_000),
    ("MXFP4", 13.7, 1_005_000),
])  # fmt: skip
def test_what_fits_beside_weights_in_a_format(
    name: str, gigabytes: float, tokens: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As docs/serving.md has it, with the configurations that the GPU check serves."""
    monkeypatch.syspath_prepend(ROOT / "tests/gpu_check")
    importlib.import_module("cards").write_config(tmp_path / name, name)
    found = fit_gpu((tmp_path / name).as_posix(), 24 << 30)
    assert found.weights.nbytes == pytest.approx(gigabytes * GB, rel=0.01)
    assert found.of_kind("INT2").tokens == pytest.approx(tokens, rel=0.01)


@pytest.mark.parametrize(
    ("words", "gib", "gpus", "source"),
    [
        (("--memory", "24"), 24, 1, "24 GB of a card is read as 24 GiB"),
        (("--gpu-memory", "24 GiB"), 24, 1, "as given"),
        (("--memory", "81559MB"), 81559 / 1024, 1, "81559 MB of a card is read as 81559 MiB"),
        (("--gpu", "RTX 4090"), 24, 1, "RTX 4090: 24 GiB, sm_89, its kernels ran on an H200, not"),
        (("--gpu", "4090 D x2"), 24, 2, "RTX 4090 D: 24 GiB, sm_89"),
        (("--gpu", "2xH100", "--tp", "2"), 80, 2, "H100: 80 GiB, sm_90, measured"),
        (("--gpu", "2 x H20"), 96, 2, "H20: 96 GiB, sm_90, measured on H100 and H200 only"),
        (("--gpu", "4 A100 40GB"), 40, 4, "A100: 40 GiB, sm_80"),
        (("--gpu", "NVIDIA H100 80GB HBM3"), 80, 1, "H100: 80 GiB"),
        (("--gpu", "80000MB"), 80000 / 1024, 1, "80000 MB of a card is read as 80000 MiB"),
        (("--gpu", "2x24GiB"), 24, 2, "as given"),
        (("--gpu", "2x 3090Ti"), 24, 2, "RTX 3090 Ti: 24 GiB, sm_86"),  # no 3,090 TiB
        (("--gpu", "24G"), 24, 1, "24 G of a card is read as 24 GiB"),
        (("--memory", "4090"), 24, 1, "RTX 4090: 24 GiB"),
        (("--gpu", "4060 Ti 16GB"), 16, 1, "RTX 4060 Ti: 16 GiB, sm_89"),
        (("--gpu", "NVIDIA RTX 4000 Ada Generation"), 20, 1, "RTX 4000 Ada: 20 GiB"),
        (("--gpu", "NVIDIA RTX PRO 5000 Blackwell"), 48, 1, "RTX PRO 5000: 48 GiB, sm_120"),
        (("--gpu", "NVIDIA GeForce RTX 4070 Ti SUPER"), 16, 1, "RTX 4070 Ti SUPER: 16 GiB"),
        (("--gpu", "NVIDIA H100 NVL"), 94, 1, "H100 NVL: 94 GiB, sm_90"),
        (("--gpu", "L4"), 22.5, 1, "L4: 22.5 GiB, sm_89"),  # 23,034 MiB, says its driver
        (("--gpu", "NVIDIA DGX Spark"), 120, 1, "DGX Spark: 120 GiB shared with the CPU, sm_121"),
        (("--gpu", "GB10"), 120, 1, "GB10: 120 GiB shared with the CPU, sm_121, compiled only"),
    ],
)
def test_a_gpu_is_what_people_call_it(
    cli: Cli, words: tuple[str, ...], gib: float, gpus: int, source: str
) -> None:
    facts = cli.json(0, "fit-gpu", "Qwen3-8B", *words)
    assert (facts["memory_bytes"], facts["gpus"]) == (gib * 2**30, gpus)
    assert facts["memory_source"].startswith(source)


@pytest.mark.parametrize(("words", "source", "gpus"), [
    (("Qwen3-32B", "--memory", "80GiB"), "of its recipe", 4),
    (("Qwen3-32B", "--memory", "80GiB", "--tp", "2"), "as given", 2),
    (("Qwen3-8B", "--memory", "80GiB"), "by default", 1),
    (("Qwen3-32B", "--gpu", "4090"), "as given", 1),
])  # fmt: skip
def test_it_says_how_many_gpus(cli: Cli, words: tuple[str, ...], source: str, gpus: int) -> None:
    facts = cli.json(0, "fit-gpu", *words)
    assert (facts["gpus"], facts["gpus_source"]) == (gpus, source)


FOUR_K = Widths.uniform(4, k=4, v=2, clip=Clip(k=0.96, v=0.92))
MIXED = "tiny-qwen3-hard/seq512_prompt2_group64_bits3.5"


def test_bits_are_those_of_the_artifact_that_serve_would_take(cli: Cli, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "mixed", artifact_files(artifact=MIXED, widths=FOUR_K))
    plain = write_folder(tmp_path / "plain", artifact_files())
    assert fit_gpu("tiny-qwen3-hard", 24 * GB).bits == 2.5  # groups of 64
    assert fit_gpu(str(plain), 24 * GB).bits == 2.5
    own = fit_gpu(str(folder), 24 * GB)
    assert (own.bits, own.bits_source) == (3.5, f"of {MIXED.replace('/', ':')}")
    hub = f"file:{tmp_path}/hub"
    cli(0, "publish", folder, "--hub", hub, "--create", "--unmeasured")
    cli(0, "pull", "tiny-qwen3-hard", "--hub", hub)
    name = MIXED.replace("/", ":")
    for words in ("tiny-qwen3-hard", name):
        facts = cli.json(0, "fit-gpu", words, "--memory", "1GB")
        assert (facts["bits_per_element"], facts["bits_source"]) == (3.5, f"of {name}")
    assert facts["caches"][-1]["token_bytes"] == own.caches[-1].cache.token
    error = cli.json(3, "fit-gpu", "Qwen3-8B:no", "--memory", "1GB")["error"]
    assert "fit-gpu asks no hub" in error["message"] and "oscar-zoo pull" not in error["hint"]
    assert "Qwen3-8B:seq20000_prompt83_group128" in error["hint"]


def test_bits_that_are_asked_for_count(cli: Cli, tmp_path: Path) -> None:
    def token(*words: str) -> int:
        shown = cli.json(0, "fit-gpu", "Qwen3-8B", "--memory", "24GB", *words)
        return int(shown["caches"][-1]["token_bytes"])

    elements = 36 * 8 * 256
    assert token() == token("--bits", "2") == token("--bits", "2.25") == elements * 2.25 / 8
    assert token("--bits", "2.75") == elements * 2.75 / 8
    assert token("--bits", "4") == token("--bits", "4.25") == elements * 4.25 / 8
    (path := tmp_path / "config.json").write_text(json.dumps(LATENTS))
    told = cli.json(2, "fit-gpu", path.parent, "--memory", "80GB", "--bits", "2.1")["error"]
    assert all(len(number.partition(".")[2]) <= 2 for number in told["hint"].split())
    for end in re.findall(r"[0-9.]+", told["hint"])[-2:]:
        cli(0, "fit-gpu", path.parent, "--memory", "80GB", "--bits", end)


def test_it_says_how_many_requests_serve_runs(cli: Cli) -> None:
    """Where more fit than `serve` lets run by default, the answer has the flag for them."""
    facts = cli.json(0, "fit-gpu", "Qwen3-8B", "--memory", "24GB")
    fitting = facts["caches"][-1]["max_requests"]
    assert (facts["usual_requests"], fitting) == (16, 24)
    shown = cli(0, "fit-gpu", "Qwen3-8B", "--memory", "24GB")
    assert "lets 16 requests run" in shown and f"-- --max-running-requests={fitting}" in shown
    shown = cli(0, "fit-gpu", "Qwen3-8B", "--memory", "24GB", "--requests", 64)
    assert "max-running-requests" not in shown  # which do not fit
    most = cli(0, "fit-gpu", "Qwen3-8B", "--memory", "80GB", "--context", 2048)
    assert f"-- --max-running-requests={MOST}" in most  # `serve` lets no more run


@pytest.mark.parametrize(
    "words",
    [
        ("Qwen3-8B", "--memory", "8GB"),
        ("Qwen3-8B", "--memory", "8GB", "--tp=2"),
        ("Qwen3-8B", "--memory", "24GB", "--requests", "64"),
        ("Qwen3-235B-A22B", "--memory", "24GB"),
        ("Qwen3-14B", "--memory", "8GB"),  # 5 GPUs are enough memory, and cannot share 8 KV heads
    ],
)
def test_it_names_the_smallest_number_of_gpus_that_fits(cli: Cli, words: tuple[str, ...]) -> None:
    enough = (facts := cli.json(0, "fit-gpu", *words))["fitting_gpus"]
    assert not facts["fits"] and enough > facts["gpus"]
    assert f"--tp {enough}" in cli(0, "fit-gpu", *words).splitlines()[0]
    others = [word for word in words if word != "--tp=2"]
    assert cli.json(0, "fit-gpu", *others, "--tp", enough)["fits"]
    assert not cli.json(0, "fit-gpu", *others, "--tp", enough // 2)["fits"]


def test_no_gpus_are_recommended_for_a_context_that_the_model_refuses(cli: Cli) -> None:
    words = ("fit-gpu", "Qwen3-8B", "--memory", "24GB", "--context")
    assert cli(0, *words, 1_000_000).splitlines()[0].endswith("--context 40960")
    facts = cli.json(0, *words, 1_000_000)
    assert (facts["fits"], facts["fitting_gpus"]) == (False, None)
    assert all(one["max_requests"] == 0 < one["max_context"] <= 40_960 for one in facts["caches"])
    assert cli.json(0, *words, 50_000, "--tp", 8)["fits"] is False
    assert cli.json(0, *words, 40_960)["fitting_gpus"] == 1


def test_a_size_is_read_from_a_name_that_says_it_and_from_no_other() -> None:
    for name, size in (
        ("Llama-3.1-70B-Instruct-FP8", 70),
        ("Qwen3-30B-A3B", 60),
        ("Qwen2.5-7B-Instruct-1M", 14),
    ):
        assert weights_of_name(name) == size * GB
    for name in (
        "Llama-4-Scout-17B-16E-Instruct gpt-oss-120b Ministral-3-8B-Instruct-2512"
        " Qwen2.5-7B-Instruct-AWQ Qwen2.5-7B-Instruct-GPTQ-Int4 Llama-3.3-70B-Instruct-FP4"
        " Llama-3.1-8B-Instruct-quantized.w4a16 gemma-3-27b-it-Q4_0-GGUF"
        " Meta-Llama-3.1-8B-bnb-4bit Mixtral-8x7B-Instruct-v0.1"
    ).split():
        assert weights_of_name(name) is None


def test_it_says_what_cannot_be_served(cli: Cli, tmp_path: Path) -> None:
    name, why = "Llama-4-Scout-17B-16E-Instruct", "SGLang masks chunks in its FlashAttention"
    error = cli.json(2, "fit-gpu", name, "--memory", "80GB")["error"]
    assert why in error["message"] and "--weights" in error["hint"]
    assert why in cli(0, "info", name, "--offline")
    words = ("fit-gpu", name, "--memory", "80GB", "--weights", "218GB")
    assert why in cli(0, *words) and why in cli.json(0, *words)["not_served"]
    assert cli.json(0, "fit-gpu", "Qwen3-8B", "--memory", "24GB")["not_served"] is None
    folder = tmp_path / "chunks"
    folder.mkdir()
    config = ConfigFile.of_folder(MODELS / "Qwen3-30B-A3B").as_written
    (folder / "config.json").write_text(json.dumps(config | {"attention_chunk_size": 8192}))
    assert "chunk" in cli.json(0, "fit-gpu", folder, "--memory", "80GB")["not_served"]


def test_no_request_is_longer_than_the_model_allows(cli: Cli) -> None:
    """`max_position_embeddings` of the example model is 2,048."""
    folder = str(MODELS.parents[2] / "examples/models/tiny-qwen3-hard")
    for model in (folder, "tiny-qwen3-hard"):
        facts = cli.json(0, "fit-gpu", model, "--memory", "24GB")
        assert (facts["context"], facts["model_context"]) == (2048, 2048)
        assert {one["max_context"] for one in facts["caches"]} == {2048}
    facts = cli.json(0, "fit-gpu", "Qwen3-8B", "--memory", "141GB", "--requests", 64)
    assert (facts["context"], facts["model_context"]) == (8192, 40960)
    assert facts["caches"][-1]["max_context"] == 40960


def test_the_terms_are_in_its_json(cli: Cli) -> None:
    for words in (("Qwen3-32B", "--tp", "2"), (MODELS / "Qwen3.5-35B-A3B", "--tp", "1")):
        facts = cli.json(0, "fit-gpu", *words, "--memory", "141GB")
        parts = facts["reserved_bytes"] + facts["gpu_weights_bytes"] + facts["cache_bytes"]
        assert parts == facts["memory_bytes"]
        assert facts["gpu_weights_bytes"] == facts["weights_bytes"] // facts["gpus"]
        for one in facts["caches"]:
            beside = one["sink_bytes"] + one["ring_bytes"] + one["state_bytes"]
            assert beside == one["request_bytes"]
            each = one["token_bytes"] * facts["context"] + one["request_bytes"]
            fitting = facts["cache_bytes"] // each
            if one["state_bytes"]:  # which a server does not divide for one context
                assert 0 < one["max_requests"] <= fitting
            else:
                assert one["max_requests"] == fitting
        assert min(one["state_bytes"] for one in facts["caches"]) > 0 or words[0] == "Qwen3-32B"


def test_the_command_answers_for_people_and_programs(cli: Cli) -> None:
    facts = cli.json(0, "fit-gpu", "Qwen3-8B", "--memory", "24GB", "--requests", 16)
    assert facts["schema"] == "oscar-zoo.fit-gpu/1" and facts["estimate"]
    assert [(one["kind"], one["fits"]) for one in facts["caches"]] == [
        ("BF16", False), ("FP8", False), ("INT2", True),
    ]  # fmt: skip
    assert cli.json(0, "fit-gpu", "Qwen3-8B", "--memory", "0.1GB")["fitting_gpus"] is None


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
    monkeypatch.setattr(Catalog, "packaged", lambda: bare)


@pytest.mark.usefixtures("unknown_shapes")
def test_names_whose_states_nobody_knows_get_a_range(cli: Cli) -> None:
    words = ("fit-gpu", "Qwen3.5-4B", "--memory", "24GB")
    first, second, *_ = cli(0, *words).splitlines()
    assert "between 372,000 and 2,760,000 tokens fit with INT2, and between" in first
    assert "hf download Qwen/Qwen3.5-4B config.json" in second
    assert cli.json(0, *words)["fits"] is True
    facts = cli.json(0, *words, "--requests", 64)
    assert not facts["other_layers_counted"] and facts["fits"] is None
    int2 = facts["caches"][-1]
    assert (int2["fits"], int2["max_requests"], int2["running_requests"]) == (None, 0, 0)
    assert int2["most_requests"] > 64 and int2["tokens"] < int2["most_tokens"]
    small = ("fit-gpu", "Qwen3.5-4B", "--memory", "8GB")
    assert cli.json(0, *small)["fits"] is False
    shown = cli(0, *small)
    assert "leave nothing for a cache" in shown and "range" not in shown
    assert "2 GPUs of this size may be enough" in shown.splitlines()[0]
    windows = fit_gpu("gemma-3-12b-it", 80 * GB)
    assert windows.unknown == "the length of the sliding windows"
    assert all(one.tokens == one.most_tokens for one in windows.caches)
    assert windows.caches[-1].requests < windows.caches[-1].most_requests


@pytest.mark.parametrize("name", ["Qwen3.5-35B-A3B", "gemma-4-31B-it", "Qwen3-8B"])
def test_text_and_json_say_the_same(cli: Cli, name: str) -> None:
    words = ("fit-gpu", name, "--memory", "80GB", "--tp", "2")
    lines = cli(0, *words).splitlines()
    for one in cli.json(0, *words)["caches"]:
        (row,) = (line for line in lines if line.startswith(one["kind"]) and " kB " in line)
        told = {*numbers(row.partition(" kB ")[2])}
        assert {one["tokens"], one["max_context"], one["max_requests"]} <= told


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
    assert server.weights_here == report.gpu_weights
    if report.fits:
        check_memory(server, 141 * GB)
    else:
        with pytest.raises(NotEnoughMemory):
            check_memory(server, 141 * GB)


WITHOUT_SIZE = {
    "GLM-4.6", "Llama-4-Maverick-17B-128E-Instruct", "Llama-4-Scout-17B-16E-Instruct",
    "Ministral-3-8B-Instruct-2512",
}  # fmt: skip


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
    assert fit_gpu("tiny-qwen3", GB).weights == fit_gpu("tiny-qwen3-hard", GB).weights


LATENTS = {
    "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "hidden_size": 2048,
    "vocab_size": 102400, "num_hidden_layers": 27, "num_attention_heads": 16, "v_head_dim": 128,
    "num_key_value_heads": 16, "intermediate_size": 10944, "moe_intermediate_size": 1408,
    "n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6,
    "first_k_dense_replace": 1, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128, "q_lora_rank": None, "topk_method": "greedy",
}  # fmt: skip
"""DeepSeek-V2-Lite's shapes, which has 15.7 billion parameters."""


def test_latents_have_one_row_with_codes_and_one_in_16_bits(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LATENTS))
    report = fit_gpu(str(tmp_path), memory="80GiB")
    assert report.weights.nbytes == pytest.approx(2 * 15.706e9, rel=0.002)
    assert {kind: cache.token for kind, cache in kinds(report).items()} == {
        "BF16": 27 * 2 * 576,
        "FP8": 27 * 576,
        "INT2": 27 * (512 // 4 + 4 * 4 + 2 * 64),
    }
    assert kinds(report)["INT2"].ring == 27 * 2 * 576 * 256
    assert report.not_served is None and report.fitting_gpus == 1
    assert fit_gpu(str(tmp_path), memory="80GiB", bits=4).not_served
    more = weights_of_config(ConfigFile({**LATENTS, "q_lora_rank": 1536}))
    assert more is not None
    assert more - report.weights.nbytes == 2 * 27 * (1536 * (2048 + 16 * 192) - 2048 * 16 * 192)
