"""SGLang's command-line flags that several of our modules read or set. Pure.

Both the launcher and the workers need them, and the workers import nothing of `launch/`.
"""

from __future__ import annotations

from collections.abc import Sequence

from oscar_zoo.errors import UsageError

SERVED_NAME = "--served-model-name"
TENSOR_PARALLEL = ("--tp", "--tp-size", "--tensor-parallel-size")
"""The names of one flag."""
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
ITEMSIZES = {"float32": 4, "float": 4, "float16": 2, "half": 2, "bfloat16": 2}
"""Bytes of one number, by the values of SGLang's `--dtype` and of `torch_dtype` in a
`config.json`."""


def flag_value(extra: Sequence[str], *names: str) -> str | None:
    """The value of an engine flag in `extra`, under any of its `names`.

    The value stands after `=` or after a space. When the flag is given several times, the last
    one wins.
    """
    found = None
    for place, token in enumerate(extra):
        name, equals, value = token.partition("=")
        if name.replace("_", "-") in names:
            found = value if equals else next(iter(extra[place + 1 :]), None)
    return found


def device_flags(device: str) -> dict[str, str]:
    """The engine's flags for `device`, `cpu` or `cuda`; they are the same for every server and
    measurement."""
    return dict(CPU_FLAGS if device == "cpu" else GPU_FLAGS)


def tensor_parallel(extra: Sequence[str]) -> int | None:
    """The number of GPUs that the user's flags ask for, or `None`.

    Raises:
        UsageError: the value is not a positive number.
    """
    text = flag_value(extra, *TENSOR_PARALLEL)
    if text is not None and not (text.isdecimal() and int(text) > 0):
        raise UsageError(f"--tp {text!r} is not a number of GPUs.", hint="for example -- --tp=2")
    return None if text is None else int(text)
