"""The steps of the GPU check for cards that are not here: code of older chips, and weights in
formats that fit 24 GB."""

import json
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from steps import ROOT, Check, NotTried, run_tests

from oscar_kernels.chips import CHIPS, OLDER_CODE, RAN_ELSEWHERE
from oscar_zoo.evaluate.bench.sides import written_config
from oscar_zoo.registry.targets import choose_model

OLDER = {"sm{}{}".format(*one): chip for one, chip in CHIPS.items() if one in RAN_ELSEWHERE}
"""Chips whose code a Hopper GPU runs: what NVRTC and Triton make for them, translated by its
driver."""
SOME = (
    "(test_dispatch or test_kv_read or (test_extend_attention and new0)"
    " or (test_kv_write and not True)"
    " or (test_cuda_decode and (logit_cap or draft or graph or errors_beside))"
    " or (test_latent_decode and (5- or graph)) or (test_latent_write and (16- or 256-)))"
)
"""Each op and its shapes, without what compiles most."""
ROOM = 128 << 10
WITHOUT_ROOM = "not different_widths and not ((test_cuda_decode or test_dispatch) and 256)"
"""In blocks with less shared memory decode of 256 channels and of keys with 4 bits is Triton's."""

MODEL, CARD, CONTEXT = "Qwen3-8B", "RTX 4090", 8000
GPT_OSS = ROOT / "docs/figures/models/gpt-oss-20b/config.json"
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
    "MXFP4": {"quant_method": "mxfp4", "modules_to_not_convert": [
        "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]},
}  # fmt: skip
"""`quantization_config` as checkpoints of the format have it; MXFP4 is that of gpt-oss."""
SERVED = ("AWQ", "FP8")
"""Before Blackwell SGLang 0.5.17 runs GPTQ and NVFP4 with the kernels of AWQ (Marlin)."""


def older_chip_tests(check: Check) -> str:
    """Tests of decode in CUDA C++ and of ops in Triton, of code for older chips, side by side."""
    _need_gpu(check)

    def tests(name: str) -> str:
        small = OLDER[name].shared_bytes < ROOM
        some = f"{SOME} and {WITHOUT_ROOM}" if small else SOME
        chosen = ("-m", "gpu", "-k", some, "-n", "4", "tests/kernels")
        return f"{name}: {run_tests(check, *chosen, **{OLDER_CODE: name})}"

    with ThreadPoolExecutor() as pool:
        return "; ".join(pool.map(tests, OLDER))


def write_config(folder: Path, name: str) -> None:
    """The `config.json` of a model with weights in a format, of Qwen3-8B or for MXFP4 of
    gpt-oss-20b."""
    recipe = choose_model(MODEL).recipe
    assert recipe is not None
    config = json.loads(GPT_OSS.read_bytes()) if name == "MXFP4" else written_config(recipe)
    folder.mkdir(parents=True, exist_ok=True)  # a check that goes on
    text = json.dumps(config | {"quantization_config": FORMATS[name]})
    (folder / "config.json").write_text(text, "utf-8")


def serve_quantized(check: Check, name: str) -> str:
    """`bench serve` of INT2 alone with random weights in a format, and what `fit-gpu` says of
    them."""
    _need_gpu(check)
    own = replace(check, work=check.work / f"weights-{name}")
    write_config(own.work / name, name)
    fits = own.zoo("fit-gpu", f"./{name}", "--gpu", CARD)
    case = ("--batch", "1", "--context", str(CONTEXT), "--new-tokens", "48", "--repeats", "1")
    line = ("bench", "serve", "--dummy-weights", f"./{name}", "--caches", "int2", *case)
    small = (f"--max-total-tokens={2 * CONTEXT}", "--max-running-requests=16")
    flags = (*small, "--cuda-graph-max-bs-decode=2", "--dtype=bfloat16", *check.engine_flags)
    (side,) = own.zoo(*line, "--", *flags)["sides"]
    log = next((own.work / "state").rglob("bench-int2.log")).read_text(errors="replace")
    (loaded, *_) = re.findall(r"mem usage=([0-9.]+) GB", log.partition("Load weight end")[2])
    return (
        f"ready after {side['start_s']:.0f} s; a decode step at {CONTEXT:,} tokens"
        f" {side['cases'][0]['ms_per_token']:.2f} ms; weights of {loaded} GiB,"
        f" {fits['weights_bytes'] / 2**30:.2f} by `fit-gpu`"
    )


def _need_gpu(check: Check) -> None:
    if check.device != "cuda":
        raise NotTried("this needs a GPU")
