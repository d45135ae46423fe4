"""Requests at a time: by the memory of the GPUs that a real executable called nvidia-smi names."""

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
from engines import MODEL
from hypothesis import given
from hypothesis import strategies as st
from tiny_artifacts import cache_shape, payload, write_folder

from oscar_zoo.artifact.specs import Geometry, Windows
from oscar_zoo.engines.sglang import sizing, worker
from oscar_zoo.engines.sglang.hooks import server_args
from oscar_zoo.engines.sglang.launch.user_flags import UserFlags
from oscar_zoo.engines.sglang.sizing import Layout, check_heads, splits
from oscar_zoo.errors import UsageError

ROWS = ("0, GPU-aa, NVIDIA H200, 143771, 140000", "1, GPU-bb, NVIDIA L40S, 46068, 40000")
WINDOWS = Windows(sink=64, recent=256)
QWEN3_8B = {"layers": 36, "num_kv_heads": 8, "dims": 256, "itemsize": 2}
QWEN3_32B = QWEN3_8B | {"layers": 64}
UNSET = {
    "speculative_algorithm": None,
    "speculative_num_draft_tokens": None,
    "speculative_draft_attention_backend": None,
    "kv_cache_dtype": "int2",
    "attention_backend": None,
    "prefill_attention_backend": None,
    "decode_attention_backend": None,
    "max_running_requests": None,
    "cuda_graph_backend_prefill": None,
    "cuda_graph_config": None,
    "device": None,
    "tp_size": 1,
    "pp_size": 1,
    "dp_size": 1,
    "enable_dp_attention": False,
    "base_gpu_id": 0,
    "model_path": "someone/a-model",
    "dtype": "auto",
    "enable_hierarchical_cache": False,
    "page_size": None,
}


def usual(mib: int, model: dict[str, int] = QWEN3_8B, layout: Layout = Layout()) -> int:  # noqa: B008
    return sizing.usual_requests(mib << 20, layout.token_bytes(**model), WINDOWS, layout)


@pytest.fixture(autouse=True)
def own_environment() -> Iterator[None]:
    """`set_defaults` tells the workers their model by a variable; later tests must not see it."""
    with patch.dict(os.environ):
        yield


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\n" + "".join(f"echo '{row}'\n" for row in ROWS))
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An artifact with the shapes of Qwen3-8B, without a manifest."""
    shape = cache_shape(36, heads=32, kv_heads=8, dim=128)
    write_folder(tmp_path / "rotation", payload(geometry=shape))
    monkeypatch.setenv("OSCAR_INT2_ROTATION_PATH", str(tmp_path / "rotation"))
    yield
    worker.served.cache_clear()


def defaults(**given: object) -> SimpleNamespace:
    args = SimpleNamespace(**UNSET | given)
    server_args.set_defaults(args)
    return args


DRAFTS = {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 32}


@pytest.mark.parametrize(
    ("given", "requests"),
    [
        ({}, 128),
        ({"tp_size": 2}, 80),  # the L40S, half of the heads
        ({"base_gpu_id": 1}, 40),
        ({"dp_size": 2}, 40),  # of each replica
        # Two workers with all heads share them.
        ({"tp_size": 2, "dp_size": 2, "enable_dp_attention": True}, 80),
        ({"tp_size": 2, "attn_dp_size": 2}, 80),
        ({"pp_size": 2}, 80),
        ({"dtype": "float32"}, 64),
        ({"device": "cpu"}, 64),
        ({"base_gpu_id": 7}, 64),
        ({"max_running_requests": 5}, 5),
        ({"base_gpu_id": 1, **DRAFTS}, 32),  # rings have room for the drafts
        # A folder says its heads: two in place of the usual eight, so four times as many fit.
        ({"base_gpu_id": 1, "model_path": str(MODEL)}, 128),
    ],
)
def test_the_smallest_gpu_of_a_server_decides(
    machine: None, served: None, given: dict[str, object], requests: int
) -> None:
    assert defaults(**given).max_running_requests == requests


@pytest.mark.parametrize(
    ("algorithm", "chosen", "backend"),
    [
        (None, None, None),
        ("NGRAM", None, None),
        ("eagle3", None, "flashinfer"),
        ("STANDALONE", "fa3", "fa3"),
    ],
)
def test_a_draft_model_gets_a_backend_of_sglang(
    machine: None, served: None, algorithm: str | None, chosen: str | None, backend: str | None
) -> None:
    name = "speculative_draft_attention_backend"
    args = defaults(speculative_algorithm=algorithm, **{name: chosen})
    assert getattr(args, name) == backend


def test_unreadable_artifacts_are_told_late(machine: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OSCAR_INT2_ROTATION_PATH", "/nowhere")
    assert defaults().max_running_requests == 64


def test_gpus_that_a_server_cannot_see(machine: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert sizing.gpu_memory(0, 2) == 46068 << 20
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-aa")
    assert sizing.gpu_memory(0, 1) is None
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setenv("PATH", "/nowhere")
    assert sizing.gpu_memory(0, 2) is None


@pytest.mark.parametrize(
    ("mib", "requests", "larger"),
    [(23034, 16, 16), (46068, 40, 16), (81559, 72, 40), (143771, 128, 72)],
)
def test_gpus_of_today(mib: int, requests: int, larger: int) -> None:
    """An L4, L40S, H100 and H200, as their driver names their memory; Qwen3-8B and Qwen3-32B."""
    assert (usual(mib), usual(mib, QWEN3_32B)) == (requests, larger)


def test_flags_say_how_a_server_is_spread() -> None:
    def layout(*flags: str, tp: int = 4) -> Layout:
        return Layout.of_flags(UserFlags(flags).sizes(), tp=tp)

    spread = ("--dp-size", "4", "--pp=2", "--attention-backend=x")
    assert layout(*spread) == Layout(tp=4, pp=2, replicas=4) and layout(*spread).gpus == 32
    assert layout(*spread, "--enable-dp-attention") == Layout(tp=4, pp=2, workers=4)
    assert layout("--attn-dp-size=2") == Layout(tp=4, workers=2)
    assert layout("--dp=x", "--pp=0", tp=1) == Layout()


@given(st.integers(0, 1 << 20), st.integers(0, 1 << 20))
def test_a_larger_gpu_never_runs_fewer(less: int, more: int) -> None:
    assert 16 <= usual(less) <= usual(less + more) <= 128


def heads(query: int, kv: int) -> Geometry:
    sizes = {"num_q_heads": query, "num_kv_heads": kv, "head_dim": 64, "v_head_dim": 64}
    return Geometry(num_layers=1, attention_layers=(0,), **sizes)


@pytest.mark.parametrize(
    ("geometry", "numbers"),
    [
        (heads(40, 8), [1, 2, 4, 8, 40]),  # Qwen3-14B
        (heads(24, 8), [1, 2, 4, 8, 24]),  # Llama-3.2-3B
        (heads(64, 4), [1, 2, 4, 8, 16, 32, 64]),  # Qwen3-235B-A22B
        (heads(16, 2), [1, 2, 4, 8, 16]),  # Qwen3.5-35B-A3B
        (heads(28, 4), [1, 2, 4, 28]),  # Qwen2.5-7B
        (heads(6, 1), [1, 2, 3, 6]),
    ],
)
def test_each_rank_has_as_many_heads_or_a_copy(geometry: Geometry, numbers: list[int]) -> None:
    assert [number for number in range(1, 70) if splits(geometry, number)] == numbers


def test_the_workers_of_dp_attention_each_split_all_heads() -> None:
    check_heads("M", heads(40, 8), Layout(tp=10, workers=5), option="--tp {}")
    with pytest.raises(UsageError, match="5 GPUs of a worker cannot share the 40 query") as error:
        check_heads("M", heads(40, 8), Layout(tp=10, workers=2), option="--tp {}")
    assert str(error.value.hint).endswith("--tp 8")
    # Replicas and groups do not split heads.
    check_heads("M", heads(40, 8), Layout(tp=8, pp=5, replicas=3), option="--tp {}")


@pytest.mark.parametrize(("given", "size"), [(None, 64), (16, 16)])
def test_pages_on_the_host_are_copied_by_numbers_on_the_host(given: int | None, size: int) -> None:
    args = defaults(enable_hierarchical_cache=True, page_size=given, device="cpu")
    assert (args.hicache_io_backend, args.hicache_mem_layout) == ("direct", "page_first_direct")
    assert args.page_size == size
    assert defaults(page_size=given, device="cpu").page_size == given
