"""SGLang's command-line flags that several of our modules read or set. Pure.

Both the launcher and the workers need them, and the workers import nothing of `launch/`.
"""

from __future__ import annotations

from dataclasses import dataclass

GPU_FLAGS = {"--cuda-graph-backend-prefill": "disabled"}
"""On a GPU the kernels decode under CUDA graphs. Prefill runs without them: its attention reads
lengths on the host, and it was measured this way."""
CPU_FLAGS = {
    "--device": "cpu",
    "--dtype": "float32",
    "--cuda-graph-backend-decode": "disabled",
    "--cuda-graph-backend-prefill": "disabled",
    "--mem-fraction-static": "0.5",
    "--max-total-tokens": "16384",
    "--max-running-requests": "16",
    "--watchdog-timeout": "3600",
}
"""On a CPU the server computes in 32 bits, without CUDA graphs, with a small pool and a long
watchdog."""
CPU_SWITCHES = ("--sleep-on-idle",)
"""On a CPU a server without requests waits for some. By default SGLang asks for them all the time,
which keeps a core busy."""
ITEMSIZES = {"float32": 4, "float": 4, "float16": 2, "half": 2, "bfloat16": 2}
"""Bytes of one number, by the values of SGLang's `--dtype` and of `torch_dtype` in a
`config.json`."""


def device_flags(device: str) -> dict[str, str]:
    """The engine's flags for `device`, `cpu` or `cuda`; they are the same for every server and
    measurement."""
    return dict(CPU_FLAGS if device == "cpu" else GPU_FLAGS)


def device_switches(device: str) -> tuple[str, ...]:
    """The engine's flags without a value for `device`; see `device_flags`."""
    return CPU_SWITCHES if device == "cpu" else ()


@dataclass(frozen=True)
class SizeFlags:
    """The engine flags of a user that decide how many GPUs and how much memory a server takes;
    SGLang says what is wrong with a number that is none.

    Attributes:
        tensor_parallel: GPUs of one group, or `None` without the flag.
        pipeline_parallel: groups that share the layers.
        data_parallel: whole servers, or with `dp_attention` workers inside a group.
        attention_data_parallel: workers inside a group, by a flag of their own.
        dp_attention: whether workers share a group.
        dtype: type of the weights in memory, or `None`.
        requests: concurrent requests, or `None`.
        memory_fraction: share of the free memory that SGLang uses, or `None`.
        weights_known: whether the files of a model tell how large its weights are in memory.
    """

    tensor_parallel: int | None = None
    pipeline_parallel: int = 1
    data_parallel: int = 1
    attention_data_parallel: int = 1
    dp_attention: bool = False
    dtype: str | None = None
    requests: int | None = None
    memory_fraction: float | None = None
    weights_known: bool = True
