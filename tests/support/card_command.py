"""The launch command of the model cards and of the README that were published with the SGLang
fork."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tiny_artifacts import K_NAME, V_NAME

VARIABLES = {
    "SGLANG_ENABLE_MIXED_KV_WINDOWS": "1",
    "SGLANG_OSCAR_K_CLIP_RATIO": "0.96",
    "SGLANG_OSCAR_V_CLIP_RATIO": "0.92",
    "SGLANG_OSCAR_ABSORB_V_ROTATION": "1",
    "SGLANG_MIXED_KV_PREFIX_TOKENS": "64",
    "SGLANG_MIXED_KV_RECENT_TOKENS": "256",
    "SGLANG_MIXED_KV_HP_MAX_SPLITS": "8",
    "SGLANG_MIXED_KV_HP_DTYPE": "bfloat16",
    "SGLANG_MIXED_KV_SCALE_DTYPE": "float32",
    "SGLANG_LLOYD_MAX": "0",
    "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
    "HADAMARD_ORDER": "64",
}
NOTED = (
    "HADAMARD_ORDER",
    "SGLANG_MIXED_KV_HP_MAX_SPLITS",
    "SGLANG_MIXED_KV_SCALE_DTYPE",
    "SGLANG_OSCAR_ABSORB_V_ROTATION",
)
"""Variables that mean nothing here, or something slightly else: one note each."""
FLAGS = (
    "--kv-cache-dtype",
    "int2",
    "--kv-cache-quant-group-size",
    "64",
    "--prefill-attention-backend",
    "fa3",
    "--decode-attention-backend",
    "triton",
    "--mem-fraction-static",
    "0.5",
    "--max-running-requests",
    "8",
    "--enable-cache-report",
    "--disable-radix-cache",
    "--disable-custom-all-reduce",
    "--trust-remote-code",
)


def card(model: Path, pair: Path, *more: str, **variables: str) -> dict[str, Any]:
    """A case of `server_args_child`, for the rotation files in `pair`; `more` flags come last."""
    files = {
        "SGLANG_OSCAR_K_ROTATION_PATH": str(pair / K_NAME),
        "SGLANG_OSCAR_V_ROTATION_PATH": str(pair / V_NAME),
    }
    argv = ["--model-path", str(model), *FLAGS, "--device", "cpu", *more]
    return {"argv": argv, "env": {**VARIABLES, **files, **variables}}
