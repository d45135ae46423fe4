"""The SGLang engine that calibrates: which program to start, and how it runs its sequences."""

from __future__ import annotations

import sys
from collections.abc import Mapping

from oscar_zoo.compute.capture.engine_job import Scalar
from oscar_zoo.compute.capture.engine_session import EngineProgram
from oscar_zoo.engines.sglang import capture_process
from oscar_zoo.errors import UsageError

ROOM = 512
"""Tokens of context and cache beyond the longest sequence. SGLang needs a few for itself, and it
allocates whole pages of up to 128 tokens."""


def capture_program(environment: Mapping[str, str]) -> EngineProgram:
    """The program for `compute`.

    Args:
        environment: of a server; see `launch.environment.child_environment`.
    """
    variables = {
        "SGLANG_PLUGINS": "oscar",
        # a sequence may be as long as the context of the model, and `ROOM` comes on top
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
    }
    return EngineProgram(
        engine="sglang",
        title="SGLang",
        command=(sys.executable, "-P", "-m", capture_process.__name__),
        environment={**environment, **variables},
        arguments=engine_arguments,
    )


def engine_arguments(
    model: str, longest: int, tensor_parallel: int, given: Mapping[str, Scalar]
) -> dict[str, Scalar]:
    """Arguments of `sglang.Engine`: every sequence alone, in one piece, without graphs or caches.

    Args:
        model: folder or Hugging Face id.
        longest: tokens of the longest sequence.
        tensor_parallel: number of ranks.
        given: further arguments, such as `device`, `dtype`, `revision`, `mem_fraction_static`.

    Raises:
        UsageError: `given` sets an argument that the capture must decide.
    """
    fixed: dict[str, Scalar] = {
        "model_path": model,
        "tp_size": tensor_parallel,
        "skip_tokenizer_init": True,
        "trust_remote_code": False,
        "kv_cache_dtype": "auto",
        "disable_cuda_graph": True,
        "disable_radix_cache": True,
        "disable_overlap_schedule": True,
        "sleep_on_idle": True,  # fits are made and measured between its jobs
        "chunked_prefill_size": longest + ROOM,
        "max_prefill_tokens": longest + ROOM,
        "max_total_tokens": longest + ROOM,
        "max_running_requests": 1,
        "context_length": longest + ROOM,
        "log_level": "info",
    }
    if refused := sorted(fixed.keys() & given.keys()):
        raise UsageError(
            f"calibration sets {refused[0]} of the engine itself.", hint="leave it out"
        )
    return {"random_seed": 0, "watchdog_timeout": 3600, **fixed, **given}
