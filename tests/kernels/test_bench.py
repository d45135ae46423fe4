"""The bytes of every op, counted by hand, and the scripts that measure against them."""

from __future__ import annotations

import csv
import importlib.util
import io
import math
import os
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from torch import Tensor

from oscar_kernels.bench import baselines, cases, checks, results, roofline, search
from oscar_kernels.bench.roofline import Heads
from oscar_kernels.bench.timing import Timing
from oscar_kernels.cache import Drafts
from oscar_kernels.decode_attention import reference
from oscar_kernels.kv_write.cuda.launcher import SOURCE
from oscar_kernels.nvrtc import compile as nvrtc
from oscar_kernels.spec import QuantSpec

HEADS = Heads(QuantSpec(128, 128), QuantSpec(128, 128), num_kv_heads=8, group=4)
SCRIPTS = Path(__file__).resolve().parents[2] / "kernels" / "benchmarks"
SUPPORT = Path(__file__).resolve().parents[1] / "support"


@dataclass(frozen=True)
class Pair:
    """Tiles of two fields."""

    a: int
    b: int


def test_a_token_takes_72_bytes_per_head_in_int2_and_512_in_16_bits() -> None:
    assert (HEADS.record, HEADS.rows, HEADS.query, HEADS.output) == (
        8 * 72,
        8 * 512,
        32 * 256,
        32 * 256,
    )
    wide = Heads(QuantSpec(192, 96), QuantSpec(128, 64), num_kv_heads=2, group=3)
    assert (wide.record, wide.rows) == (2 * (48 + 8 + 32 + 8), 2 * 640)
    assert (wide.query, wide.output) == (6 * 384, 6 * 256)


def test_a_write_reads_rows_and_matrices_and_writes_records() -> None:
    one = 128 * 128 * 4
    assert roofline.write(HEADS, 10) == 10 * (4096 + 576 + 8) + 2 * one
    assert (
        roofline.write(HEADS, 10, slots=False, window_rows=4)
        == 10 * (4096 + 8) + 4 * 4096 + 2 * one
    )
    assert (
        roofline.write(HEADS, 1, query=True, per_head=True)
        == 4096 + 576 + 8 + 2 * 8192 + 3 * 8 * one
    )


def test_every_cached_token_is_read_once_from_where_it_lies() -> None:
    assert roofline.cached(HEADS, [320]) == 320 * 4096
    assert roofline.cached(HEADS, [321, 1]) == 321 * 4096 + 576 + 4
    assert roofline.cached(replace(HEADS, sink=0, recent=0), [100]) == 100 * 580


def test_what_an_op_adds_to_the_cached_tokens() -> None:
    cached = roofline.cached(HEADS, [1000, 5])
    assert roofline.read(HEADS, [1000, 5]) == cached + 1005 * 4096
    assert roofline.decode(HEADS, [1000, 5]) == cached + 2 * 2 * 8192
    assert roofline.extend(HEADS, [1000, 5], 3) == cached + 6 * (4096 + 2 * 8192)
    assert roofline.attend_rows(HEADS, [1000, 5]) == 1005 * 4100 + 2 * 2 * 8192
    assert roofline.attend_rows(HEADS, [9], element_bytes=1) == 9 * 2052 + 2 * 8192


def test_a_share_is_of_the_measured_bandwidth() -> None:
    assert roofline.share(4_000_000, 1e-6, 4e12) == pytest.approx(1.0)


def test_rows_say_where_they_were_measured() -> None:
    out = io.StringIO()
    timing = Timing(12.346e-6, 11e-6, 13e-6)
    results.write_rows([results.row("write", "8192", "triton", timing, 24_690_000, 4e12)], out)
    [line] = csv.DictReader(io.StringIO(out.getvalue()))
    assert (line["microseconds"], line["p20"], line["p80"], line["share"]) == (
        "12.35",
        "11.00",
        "13.00",
        "0.500",
    )
    assert all(line.values())


def test_a_search_changes_one_field_at_a_time_and_keeps_what_is_clearly_faster() -> None:
    cost = {(1, 1): 10.0, (2, 1): 9.95, (4, 1): 5.0, (4, 2): math.inf, (4, 4): 4.0, (1, 4): 1.0}
    trials: list[str] = []
    found = search.descend(
        Pair(1, 1),
        {"a": (1, 2, 4), "b": (2, 4)},
        lambda x: cost.get((x.a, x.b), 20.0),
        note=trials.append,
    )
    assert found == (Pair(1, 4), 1.0, 10.0)  # by a = 4, b = 4, and then a = 1
    assert len(trials) == len(set(trials))


def test_a_case_has_as_many_layers_as_its_bytes_ask_for() -> None:
    assert [cases.layers(moved, 36) for moved in (1, 100 << 20, 2 << 30)] == [36, 11, 4]
    assert cases.layers(1, 2) == 2


@pytest.mark.parametrize("factor", [0.97, float("nan")])
def test_a_wrong_kernel_is_not_timed(factor: float) -> None:
    checks.decode(cases.TINY, reference.decode_attention)
    with pytest.raises(AssertionError, match="error"):
        checks.decode(
            cases.TINY,
            lambda *args, **options: factor * reference.decode_attention(*args, **options),
        )


def test_drafts_lie_behind_the_cached_tokens_of_their_request() -> None:
    job = cases.attention_layers(cases.TINY, [20, 5], 2, drafts=3)
    assert len(job.query) == 6
    assert job.batch.kv_indptr.tolist() == [0, 23, 31]
    assert sorted(job.batch.kv_indices.tolist()) == list(range(1, 32))
    assert {(x.recent, x.ring_rows, len(x.codes)) for x in job.caches} == {(8, 10, 32)}


def test_an_op_that_forgets_the_mask_of_drafts_is_not_timed() -> None:
    def forgetful(*args: Tensor, drafts: Drafts, **options: object) -> Tensor:
        return reference.decode_attention(*args, drafts=Drafts(drafts.count), **options)

    checks.verify(cases.TINY, reference.decode_attention, 3)
    with pytest.raises(AssertionError, match="error"):
        checks.verify(cases.TINY, forgetful, 3)


@pytest.mark.gpu
def test_flashinfer_computes_what_the_reference_does() -> None:
    pytest.importorskip("flashinfer")
    baseline = baselines.available()
    assert baseline.name == "flashinfer-bf16"
    baselines.check_decode(cases.QWEN3_8B, baseline)
    baselines.check_extend(cases.QWEN3_8B, baseline)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["flashinfer-fp8", "xqa-bf16", "xqa-fp8"])
def test_every_baseline_computes_what_the_reference_does(name: str) -> None:
    pytest.importorskip("flashinfer")
    found = {one.name: one for one in baselines.decoders()}
    baselines.check_decode(cases.QWEN3_8B, found[name])


def test_the_fastest_kernel_of_a_case_is_named() -> None:
    def measured(case: str, kernel: str, microseconds: float) -> results.ResultRow:
        timing = Timing(microseconds / 1e6, 0.0, 0.0)
        return results.row("decode", case, kernel, timing, 100, 1e12)

    rows = [
        measured("1 x 8", "cuda", 10.0),
        measured("1 x 8", "triton", 5.0),
        measured("1 x 8", "flashinfer-bf16", 20.0),
        measured("1 x 8", "xqa-fp8", 2.0),
        measured("9 x 9", "cuda", 1.0),
    ]
    assert results.winners(rows) == [
        "decode 1 x 8: xqa-fp8 wins with 2.0 us, triton takes 5.0 us (2.50x)"
    ]
    assert results.winners(rows[:3]) == [
        "decode 1 x 8: triton wins with 5.0 us, flashinfer-bf16 takes 20.0 us (4.00x)"
    ]


FAST = """
import os, runpy, sys
sys.path.append(sys.argv[1])
import triton_interpreter
triton_interpreter.patch_once()
del sys.argv[:2]
sys.path[0] = os.path.dirname(sys.argv[0])
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""As `python SCRIPT ...`."""


def script(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A script of kernels/benchmarks, run as a user does, from elsewhere; without a GPU in half the
    time."""
    fast = ("-c", FAST, str(SUPPORT)) if os.environ.get("TRITON_INTERPRET") == "1" else ()
    command = [sys.executable, *fast, str(SCRIPTS / name), *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command, capture_output=True, text=True, timeout=600, env=environment, cwd="/"
    )


def test_a_dry_run_measures_every_op_with_checks() -> None:
    done = script("run.py", "--dry-run")
    assert done.returncode == 0, done.stderr
    lines = list(csv.DictReader(io.StringIO(done.stdout)))
    assert {line["op"] for line in lines} == {"decode", "extend", "write", "read"}
    assert {line["kernel"] for line in lines} >= {"triton"}
    assert len({line["kernel"] for line in lines if line["op"] == "decode"}) >= 2
    assert all(int(line["bytes"]) > 0 and float(line["microseconds"]) > 0 for line in lines)


def test_a_dry_run_of_the_variants_measures_where_a_fused_extend_stops_to_pay() -> None:
    done = script("run.py", "--variants", "--dry-run")
    assert done.returncode == 0, done.stderr
    lines = list(csv.DictReader(io.StringIO(done.stdout)))
    assert {(line["op"], line["kernel"]) for line in lines} >= {
        ("crossover", "fused"),
        ("crossover", "materialised"),
    }
    in_step = {line["kernel"] for line in lines if line["op"] == "in step"}
    assert in_step >= {"triton write", "triton attention", "triton both"} and len(in_step) >= 4


def test_tuning_prints_a_table_to_paste() -> None:
    done = script("tune.py", "--dry-run", "--only", "read")
    assert done.returncode == 0, done.stderr
    table = [line for line in done.stdout.splitlines() if line.startswith("return ")]
    assert len(table) == 1 and table[0].startswith("return ReadTiles(block_m=")
    assert "(in use)" in done.stderr


def test_the_kernel_of_the_tensor_cores_has_what_it_is_said_to_time() -> None:
    spec = importlib.util.spec_from_file_location("tensor_cores", SCRIPTS / "tensor_cores.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    machine = SOURCE.files()["machine.cuh"]

    def size(instruction: str) -> int:
        files = {"machine.cuh": machine, "contend.cu": module.source(instruction)}
        return len(nvrtc.compile_source(files, "contend.cu", ["-arch=sm_90a"]))

    try:
        nothing = size(";")
    except nvrtc.CompilerMissing as error:
        pytest.skip(str(error))
    for name, instruction in module.INSTRUCTIONS.items():
        assert abs(size(instruction) - nothing - 16 * module.UNROLLED) < 1024, (
            f"{name}: an instruction has 16 bytes"
        )


@pytest.mark.gpu
def test_the_tensor_cores_are_measured() -> None:
    done = script("tensor_cores.py")
    assert done.returncode == 0, done.stderr
    lines = list(csv.DictReader(io.StringIO(done.stdout)))
    assert len(lines) == 3 and all(float(line["alone"]) >= 1 for line in lines)


@pytest.mark.parametrize("name", ["run.py", "tune.py"])
def test_an_unknown_op_is_named(name: str) -> None:
    done = script(name, "--only", "decode,wirte")
    assert done.returncode == 2 and "wirte" in done.stderr and "write" in done.stderr
