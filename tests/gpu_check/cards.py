"""The steps of the GPU check for cards that are not here: code of older chips, and weights in
formats that fit 24 GB."""

from __future__ import annotations

import csv
import json
import re
import subprocess
from dataclasses import replace
from typing import Any

from steps import PARALLEL, ROOT, Check, CheckFailed, NotTried, run_tests

from oscar_kernels.chips import CHIPS, OLDER_CODE, RAN_ELSEWHERE
from oscar_zoo.evaluate.bench.sides import written_config
from oscar_zoo.registry.targets import choose_model

OLDER = {"sm{}{}".format(*one): chip for one, chip in CHIPS.items() if one in RAN_ELSEWHERE}
"""Chips whose code a Hopper GPU runs: what NVRTC and Triton make for them, translated by its
driver."""
TESTS = (
    "tests/kernels/test_cuda_decode.py",
    "tests/kernels/test_dispatch.py",
    "tests/kernels/test_extend_attention.py",
    "tests/kernels/test_kv_read.py",
    "tests/kernels/test_kv_write.py",
    "tests/kernels/test_slots.py",
    "tests/runtime/test_executor_gpu.py",
)
SOME = "not test_shapes and not blocks_of_stage_2 and not learned_sinks"
"""Less what compiles most: of shapes these tests have enough others."""
ROOM = 128 << 10
WITHOUT_ROOM = "not ((test_cuda_decode or test_dispatch) and 256)"
"""In blocks with less shared memory decode of 256 channels runs in Triton."""
BATCHES = {"1x8192": "1 x 8,192", "16x30000": "16 x 30,000"}

MODEL, CARD, CONTEXT = "Qwen3-8B", "RTX 4090", 8000
MXFP4 = ROOT / "docs/figures/models/gpt-oss-20b/config.json"
FP4 = {"num_bits": 4, "type": "float", "group_size": 16, "dynamic": False}
FORMATS: dict[str, dict[str, Any]] = {
    "AWQ": {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True,
            "version": "gemm", "modules_to_not_convert": None},
    "GPTQ": {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True,
             "lm_head": False},
    "FP8": {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3",
            "weight_block_size": [128, 128]},
    "NVFP4": {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"],
              "producer": {"name": "modelopt", "version": "0.33.0"}, "config_groups": {
                  "group_0": {"input_activations": FP4, "weights": FP4, "targets": ["Linear"]}}},
    "MXFP4": {},
}  # fmt: skip
"""`quantization_config` as checkpoints of the format have it; MXFP4 has a model of its own."""


def older_chip_tests(check: Check) -> str:
    """Tests of decode in CUDA C++ and of all ops in Triton, of code for older chips."""
    _need_gpu(check)
    found = list[str]()
    for name, chip in OLDER.items():
        some = SOME if chip.shared_bytes > ROOM else f"{SOME} and {WITHOUT_ROOM}"
        chosen = ("-m", "gpu", "-k", some, *PARALLEL, *TESTS)
        found.append(f"{name}: {run_tests(check, *chosen, **{OLDER_CODE: name})}")
    return "; ".join(found)


def older_chip_speed(check: Check) -> str:
    """Microseconds of a layer's decode on this GPU, by its own code and by that of older chips."""
    _need_gpu(check)
    found = {chip: _decode_times(check, chip) for chip in ("", *OLDER)}
    return "; ".join(
        f"decode {words}: "
        + ", ".join(
            f"{times[batch]:.1f} us {f'as {chip}' if chip else 'as it is'}"
            for chip, times in found.items()
        )
        for batch, words in BATCHES.items()
    )


def _decode_times(check: Check, chip: str) -> dict[str, float]:
    command = [check.python, "contrib/kernel_bench/run.py", "--quick", "--only", "decode"]
    done = subprocess.run(
        [*command, "--decode", ",".join(BATCHES)],
        cwd=ROOT,
        env=check.visible() | ({OLDER_CODE: chip} if chip else {}),
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise CheckFailed(f"{chip}: {done.stderr.strip()[-300:]}")
    rows = csv.DictReader(done.stdout.splitlines())
    found = {row["case"]: float(row["microseconds"]) for row in rows if row["kernel"] == "cuda"}
    return {batch: found[batch.replace("x", " x ")] for batch in BATCHES}


def serve_quantized(check: Check, name: str) -> str:
    """`bench serve` of INT2 alone with random weights in a format, and what `fit-gpu` says of
    them."""
    _need_gpu(check)
    own = replace(check, work=check.work / f"weights-{name}")
    model = own.work / name
    model.mkdir(parents=True)
    recipe = choose_model(MODEL).recipe
    assert recipe is not None
    config = written_config(recipe) | {"quantization_config": FORMATS[name]}
    config = config if FORMATS[name] else json.loads(MXFP4.read_bytes())
    (model / "config.json").write_text(json.dumps(config))
    fits = own.zoo("fit-gpu", f"./{name}", "--gpu", CARD)
    tokens = {cache["kind"]: cache["tokens"] for cache in fits["caches"]}
    case = ("--batch", "1", "--context", str(CONTEXT), "--new-tokens", "48", "--repeats", "1")
    small = (
        f"--max-total-tokens={2 * CONTEXT}",
        "--max-running-requests=16",
        "--cuda-graph-max-bs=2",
    )
    line = ("bench", "serve", "--dummy-weights", f"./{name}", "--caches", "int2", *case)
    facts = own.zoo(*line, "--", "--dtype=bfloat16", *small, *check.engine_flags)
    (side,) = facts["sides"]
    log = next((own.work / "state").rglob("bench-int2.log")).read_text(errors="replace")
    loaded = re.search(r"mem usage=([0-9.]+) GB", log)
    weights = (
        f"{loaded[1] if loaded else '?'} GiB, {fits['weights_bytes'] / 2**30:.2f} by `fit-gpu`"
    )
    return (
        f"ready after {side['start_s']:.0f} s; a decode step at {CONTEXT:,} tokens"
        f" {side['cases'][0]['ms_per_token']:.2f} ms; weights of {weights}, by which"
        f" {tokens['INT2']:,} tokens fit a card of 24 GB, and {tokens['BF16']:,} with BF16"
    )


def _need_gpu(check: Check) -> None:
    if check.device != "cuda":
        raise NotTried("this needs a GPU")
