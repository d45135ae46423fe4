"""Memory before a start: a lower bound, whose advice is enough, and which never refuses what would
have fitted."""

import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import write_config
from hypothesis import given
from hypothesis import strategies as st
from tiny_artifacts import cache_shape

from oscar_zoo.artifact.specs import Windows
from oscar_zoo.engines.sglang import refusals
from oscar_zoo.engines.sglang.compat import releases
from oscar_zoo.engines.sglang.launch import preflight
from oscar_zoo.engines.sglang.launch.preflight import CORES, check_devices
from oscar_zoo.engines.sglang.launch.user_flags import UserFlags
from oscar_zoo.engines.sglang.sizing import Layout
from oscar_zoo.errors import (
    InvalidModel,
    NotEnoughMemory,
    UnsupportedMachine,
    UnsupportedModel,
    UsageError,
)
from oscar_zoo.models import config_file
from oscar_zoo.models.geometry import model_block
from oscar_zoo.models.weight_files import stored_weights
from oscar_zoo.runtime.stores import WindowShape

GB = 10**9
read = config_file.ConfigFile.of_folder
QWEN3_8B = cache_shape(36, heads=32, kv_heads=8, dim=128)
SERVER = preflight.ServerDemand(
    "Qwen3-8B", QWEN3_8B, Windows(sink=64, recent=256), 16 * GB, 2, "cuda"
)


def refused(server: preflight.ServerDemand, free: int) -> NotEnoughMemory:
    with pytest.raises(NotEnoughMemory) as caught:
        preflight.check_memory(server, free)
    assert "\n" not in caught.value.message and caught.value.hint
    return caught.value


@pytest.mark.parametrize("parallel", [1, 2, 8, 16])
def test_windows_are_those_of_the_window_store(parallel: int) -> None:
    """But for a few bytes per row that are no windows."""
    need = replace(SERVER, tensor_parallel=parallel)
    heads = -(-8 // parallel)
    store = WindowShape(36, need.requests + 1, heads, 128, 128, 64, 256, torch.bfloat16)
    assert need.all_windows == store.nbytes - 12 * store.num_rows and need.requests == 64
    assert need.weights_here == 16 * GB // parallel


@pytest.mark.parametrize(
    ("extra", "free", "advice"),
    [
        ((), 18 * GB, "--max-running-requests="),
        ((), 12 * GB, "--tp=2"),
        (("--max-running-requests=1000",), 40 * GB, "--max-running-requests="),
        (("--tp=1", "--dtype", "float32"), 30 * GB, "--tp=2"),
    ],
)
def test_what_the_error_advises_is_enough(extra: tuple[str, ...], free: int, advice: str) -> None:
    server = replace(SERVER, flags=UserFlags(extra).sizes())
    error = refused(server, free)
    assert re.search(r"Qwen3-8B needs about \d+ GB on cuda:0, \d+ GB are free", error.message)
    flag = re.search(r"-- (--[a-z-]+=\S+)", str(error.hint))
    assert flag is not None and flag[1].startswith(advice)
    size = UserFlags((*extra, flag[1])).sizes()
    better = replace(server, flags=size, tensor_parallel=size.tensor_parallel or 1)
    preflight.check_memory(better, free)


def test_gpus_that_cannot_share_the_heads_are_not_advised() -> None:
    geometry = QWEN3_8B.model_copy(update={"num_q_heads": 28, "num_kv_heads": 4})
    server = replace(SERVER, geometry=geometry, weights=100 * GB)
    assert "--tp=4" in str(refused(server, 40 * GB).hint)
    assert "--tp" not in str(refused(server, 20 * GB).hint)  # 8 GPUs would be enough memory


def test_a_cpu_is_asked_for_half_of_what_is_free() -> None:
    cpu = replace(SERVER, device="cpu")
    assert cpu.weights_here == 32 * GB and cpu.requests == 16  # numbers of 32 bits
    preflight.check_memory(cpu, 80 * GB)
    assert "smaller model" in str(refused(cpu, 8 * GB).hint)
    alone = replace(cpu, flags=UserFlags(["--max-running-requests=1"]).sizes())
    assert "the windows of 1 request;" in str(refused(alone, 8 * GB).hint)


def test_a_small_gpu_runs_fewer_requests_unless_told() -> None:
    small = replace(SERVER, memory=23034 << 20)

    def told(*words: str) -> preflight.ServerDemand:
        size = UserFlags(words).sizes()
        return replace(small, flags=size, tensor_parallel=size.tensor_parallel or 1)

    assert (small.requests, replace(SERVER, memory=143771 << 20).requests) == (16, 128)
    assert told("--max-running-requests=5").requests == 5
    assert told("--dp=4").requests == 16  # of every replica
    words = ("--max-running-requests=40", "--tp=4", "--dp=4")
    assert told(*words).requests == 40
    shared = told(*words, "--enable-dp-attention")
    assert shared.requests == 10 and shared.row == small.row  # every worker has all heads
    preflight.check_memory(small, 18 * GB)
    refused(SERVER, 18 * GB)


@given(st.integers(1, 300), st.integers(1, 300))
def test_more_memory_never_hurts(less: int, more: int) -> None:
    try:
        preflight.check_memory(SERVER, less * GB)
    except NotEnoughMemory:
        return
    preflight.check_memory(SERVER, (less + more) * GB)


@pytest.mark.parametrize(
    "flag", ["--quantization=fp8", "--load-format=dummy", "--cpu-offload-gb=10", "--pp-size=2"]
)
def test_weights_that_cannot_be_told_are_not_counted(flag: str) -> None:
    assert replace(SERVER, flags=UserFlags([flag]).sizes()).weights_here == 0
    assert replace(SERVER, weights=None).weights_here == 0
    preflight.check_memory(SERVER, None)


def test_quantized_weights_keep_their_size(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    os.truncate(tmp_path / "model.safetensors", 8 * GB)
    for config, kind in (
        ('{"torch_dtype": "float32"}', "float32"),
        ('{"text_config": {"dtype": "bfloat16"}}', "bfloat16"),
        ('{"torch_dtype": "bfloat16", "quantization_config": {"quant_method": "fp8"}}', None),
    ):
        (tmp_path / config_file.NAME).write_text(config)
        assert stored_weights(tmp_path, read(tmp_path)) == (8 * GB, kind)
    assert replace(SERVER, weights=8 * GB, itemsize=None).weights_here == 8 * GB
    assert replace(SERVER, weights=32 * GB, itemsize=4).weights_here == 16 * GB


def test_a_configuration_read_as_it_is_written_and_as_transformers_reads_it(tmp_path: Path) -> None:
    from oscar_zoo.models.model_source import inspect_model

    example = Path(__file__).resolve().parents[4] / "examples/models/tiny-qwen3-hard"
    assert config_file.describe(read(example), "x").geometry == inspect_model(str(example)).geometry
    said = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}
    said |= {"sliding_window": 4096, "use_sliding_window": False, "num_key_value_heads": 2}
    for kind, same in (("qwen2", True), ("qwen3", False)):  # which has a head size of its own
        (tmp_path / "config.json").write_text(json.dumps(said | {"model_type": kind}))
        written = config_file.describe(read(tmp_path), "x").geometry
        assert written.attention_layers == (0, 1) and config_file.says_all(read(tmp_path)) == same
        assert (written == inspect_model(str(tmp_path)).geometry) == same


def test_a_number_without_limit_does_not_make_a_configuration_unreadable(tmp_path: Path) -> None:
    """Nemotron-H and other models with Mamba layers are published with one."""
    written = tmp_path / "config.json"
    written.write_text('{"time_step_limit": [0.0, Infinity], "hidden_size": 64}')
    assert config_file.read_config(tmp_path)["time_step_limit"] == [0.0, float("inf")]
    written.write_text('{"hidden_size": NaN}')
    with pytest.raises(InvalidModel, match="NaN"):
        config_file.read_config(tmp_path)


@pytest.mark.parametrize(
    "said",
    [
        {"hybrid_override_pattern": "M-M*-EM*"},
        {"layers_block_type": ["mamba", "moe", "mamba", "attention"] + ["moe"] * 3 + ["attention"]},
    ],
)
def test_layers_that_a_file_describes_in_other_words(said: dict[str, Any], tmp_path: Path) -> None:
    """Configurations of Nemotron-H, before a class of transformers has read them."""
    shape = {"num_hidden_layers": 8, "num_attention_heads": 4, "num_key_value_heads": 2}
    written = {"model_type": "nemotron_h", "head_dim": 16} | shape | said
    (tmp_path / "config.json").write_text(json.dumps(written))
    assert config_file.describe(read(tmp_path), "x").attention_layers == (3, 7)


LAYERS, CONTEXT = ["sliding_attention", "full_attention"], "max_position_embeddings"


@pytest.mark.parametrize(
    ("name", "change", "refused"),
    [
        ("exaone4", {}, None),
        ("exaone4", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, "1000000"),
        ("exaone_moe", {"rope_parameters": None, "rope_theta": 5e6}, "1000000"),
        ("qwen3_next", {}, None),
        ("qwen3_next", {"rope_parameters": {"rope_theta": 1e7}}, "rope_theta"),
        ("qwen3_next", {"rope_parameters": {"rope_theta": 1e7}, "rope_theta": 1e7}, None),
        ("qwen3_next", {"rope_parameters": None, "rope_theta": 1e7}, None),
        ("qwen3_next", {"full_attention_interval": None}, "full_attention_interval"),
        ("qwen3_5", {}, None),
        ("qwen3_5", {"full_attention_interval": None}, "full_attention_interval"),
        ("gpt_oss", {}, None),
        ("gpt_oss", {"swiglu_limit": None}, "swiglu_limit"),
    ],
)
def test_what_sglang_would_read_otherwise_is_refused(
    tmp_path: Path, name: str, change: dict[str, Any], refused: str | None
) -> None:
    """These releases take a default or fail after the weights were read."""
    written = write_config(name, tmp_path) / "config.json"
    values = json.loads(written.read_bytes())
    values |= {"architectures": ["ItsClass"]}
    values.get("text_config", values).update(change)
    written.write_text(json.dumps(values))
    config = config_file.ConfigFile.of_folder(tmp_path)
    if refused is None:
        refusals.check_config(config, "x")
    else:
        with pytest.raises(UnsupportedModel, match=refused):
            refusals.check_config(config, "x")


@pytest.mark.parametrize(
    ("window", "context", "more", "layers"),
    [
        (262144, 131072, {}, (0, 1)),  # Phi-4-mini, Phi-3-128k
        (4096, 4096, {}, (0, 1)),
        (131072, 131072, {"layer_types": LAYERS}, (0, 1)),
        (4096, 32768, {"use_sliding_window": False}, (0, 1)),
        (None, 32768, {}, (0, 1)),
        (4096, 32768, {"layer_types": LAYERS[1:] * 2}, (0, 1)),
        (2047, 4096, {}, None),  # Phi-3-4k
        (4096, 32768, {}, None),
        (4096, 32768, {"use_sliding_window": True}, None),
        (4096, None, {}, None),
        (4096, 32768, {"layer_types": LAYERS}, (1,)),
    ],
)
def test_a_window_counts_when_it_is_shorter_than_the_context(
    window: int | None, context: int | None, more: dict[str, Any], layers: tuple[int, ...] | None
) -> None:
    """Compute, evaluation and servers need at least one full-attention layer."""
    shape = {
        "architectures": ["Phi3ForCausalLM"],
        "model_type": "phi3",
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 4,
    }
    said = {"sliding_window": window, "max_position_embeddings": context} | more
    config = config_file.ConfigFile(
        shape | {name: value for name, value in said.items() if (name, value) != (CONTEXT, None)}
    )
    if layers is not None:
        block = model_block(config, model_id="x", revision=None, config_sha256="0" * 64)
        assert block.attention_layers == layers
        refusals.check_config(config, "x")
        return
    with pytest.raises(UnsupportedModel, match="every layer has a sliding window"):
        model_block(config, model_id="x", revision=None, config_sha256="0" * 64)
    with pytest.raises(UnsupportedModel, match="every layer has a sliding window"):
        refusals.check_config(config, "x")


def machine(
    folder: Path, *, free: tuple[int, ...] = (), cpulists: tuple[str, ...] = ("0-3",)
) -> Path:
    """A folder with the driver's tool, for GPUs with so many MiB free, and the kernel's list of
    NUMA nodes."""
    tool = folder / "nvidia-smi"
    rows = [f"{i}, GPU-{i}, NVIDIA H200, 143771, {left}" for i, left in enumerate(free)]
    tool.write_text("#!/bin/sh\n" + "".join(f"echo '{row}'\n" for row in rows))
    tool.chmod(0o755)
    for number, cores in enumerate(cpulists):
        (folder / f"node{number}").mkdir()
        (folder / f"node{number}" / "cpulist").write_text(cores + "\n")
    return folder


def check(folder: Path, layout: Layout, device: str, gpu: int = 0, cores: str = "") -> None:
    environ = {"PATH": f"{folder}:{os.environ['PATH']}"} | ({CORES: cores} if cores else {})
    check_devices(layout, device, gpu, environ=environ, nodes=folder)


def test_a_rank_on_a_cpu_needs_a_numa_node(tmp_path: Path) -> None:
    folder = machine(tmp_path, cpulists=("0-1", "2-3", ""))  # the last one has memory only
    check(folder, Layout(tp=2), "cpu")
    with pytest.raises(UnsupportedMachine) as caught:
        check(folder, Layout(tp=4), "cpu")
    assert "its NUMA nodes are enough for 2 of 4 ranks" in caught.value.message
    assert f"{CORES}='0|1|2|3'" in str(caught.value.hint)
    check(folder, Layout(tp=4), "cpu", cores="0|1|2|3")
    with pytest.raises(UnsupportedMachine, match="names 3 of 4 ranks"):
        check(folder, Layout(tp=4), "cpu", cores="0|1|2")


def test_ranks_count_on_a_cpu_as_in_sglang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang 0.5.17 gives only the ranks of one group a part of the CPU, and replicas none. What is
    told are all GPUs."""
    folder, told = machine(tmp_path), {"sglang": "0.5.17"}
    monkeypatch.setattr(releases, "version", told.__getitem__)
    check(folder, Layout(replicas=2), "cpu")
    with pytest.raises(UnsupportedMachine, match=r"need 4 GPUs.* 1 of 2 ranks"):
        check(folder, Layout(tp=2, pp=2), "cpu")
    told["sglang"] = "0.5.21"
    check(folder, Layout(workers=2), "cpu")
    for layout, gpus in ((Layout(replicas=2), 2), (Layout(tp=2, pp=2), 4)):
        with pytest.raises(UnsupportedMachine, match=rf"need {gpus} GPUs.* 1 of {gpus} ranks"):
            check(folder, layout, "cpu")


def test_all_ranks_count_on_gpus(tmp_path: Path) -> None:
    folder = machine(tmp_path, free=(140000,) * 4)
    for fits in (Layout(tp=4), Layout(tp=2, pp=2), Layout(tp=4, workers=4)):
        check(folder, fits, "cuda")
    with pytest.raises(UnsupportedMachine, match="8 GPUs are wanted, 4 are here") as caught:
        check(folder, Layout(tp=2, pp=2, replicas=2), "cuda")
    assert "--dp need no more than 4 together" in str(caught.value.hint)
    with pytest.raises(UnsupportedMachine, match="4 GPUs are wanted from cuda:1 on") as caught:
        check(folder, Layout(tp=4), "cuda", 1)
    assert caught.value.hint == "spread the model over fewer: -- --tp=3"


def test_the_fullest_gpu_counts_and_unknown_ones_are_left_to_sglang(tmp_path: Path) -> None:
    environ = {"PATH": f"{machine(tmp_path, free=(140000, 1000))}:{os.environ['PATH']}"}
    assert preflight.free_memory("cuda", 0, 1, environ) == 140000 << 20
    assert preflight.free_memory("cuda", 0, 2, environ) == 1000 << 20
    with pytest.raises(UnsupportedMachine, match="4 GPUs are wanted, 2 are here"):
        preflight.free_memory("cuda", 0, 4, environ)
    assert preflight.free_memory("cuda", 0, 1, {"PATH": "/nowhere"}) is None
    (tmp_path / "none").mkdir()
    check(machine(tmp_path / "none"), Layout(tp=4), "cuda")


def test_a_cache_on_the_host_is_shared_by_all_gpus() -> None:
    """SGLang counts whole GB of each; first tokens have their part of what was given."""
    for layout, each in ((Layout(), 65), (Layout(tp=8), 8), (Layout(tp=2, replicas=2), 16)):
        assert preflight.host_cache_flag(64 << 30, layout, None) == f"--hicache-size={each}"
    with pytest.raises(UsageError) as small:
        preflight.host_cache_flag(8 << 29, Layout(tp=8), None)
    advised = int(re.findall(r"(\d+)GiB", str(small.value.hint))[0])
    assert preflight.host_cache_flag(advised << 30, Layout(tp=8), None)
    with pytest.raises(NotEnoughMemory) as large:
        preflight.host_cache_flag(64 << 30, Layout(), 64 << 30)
    advised = int(re.findall(r"(\d+)GiB", str(large.value.hint))[0])
    assert preflight.host_cache_flag(advised << 30, Layout(), 64 << 30)
    with pytest.raises(NotEnoughMemory) as large:
        preflight.check_host_size(60, Layout(), 64 * 10**9)
    advised = int(str(large.value.hint).partition("=")[2])
    preflight.check_host_size(advised, Layout(), 64 * 10**9)
