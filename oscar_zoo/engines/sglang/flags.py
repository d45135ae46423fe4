"""SGLang's command-line flags that several of our modules read or set. Pure.

Both the launcher and the workers need them, and the workers import nothing of `launch/`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from oscar_zoo.errors import UsageError

SERVED_NAME = "--served-model-name"
TENSOR_PARALLEL = ("--tp", "--tp-size", "--tensor-parallel-size")
"""The names of one flag."""
DATA_PARALLEL = ("--dp", "--dp-size", "--data-parallel-size")
PIPELINE_PARALLEL = ("--pp", "--pp-size", "--pipeline-parallel-size")
ATTENTION_DATA_PARALLEL = ("--attn-dp-size", "--attention-data-parallel-size")
UNKNOWN_WEIGHTS = (
    "--quantization",
    "--cpu-offload-gb",
    "--load-format",
    "--pp",
    "--pp-size",
    "--json-model-override-args",
)
"""Flags with which the size of the weights cannot be told from the files of a model."""
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


@dataclass(frozen=True)
class SizeFlags:
    """The engine flags of a user that decide how many GPUs and how much memory a server takes. They
    are read once. SGLang says what is wrong with a number that is none.

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

    @classmethod
    def parse(cls, extra: Sequence[str]) -> SizeFlags:
        """Read them from all flags of the user.

        Raises:
            UsageError: the number of GPUs is not a positive number.
        """
        requests = flag_value(extra, "--max-running-requests") or ""
        return cls(
            tensor_parallel=_tensor_parallel(flag_value(extra, *TENSOR_PARALLEL)),
            pipeline_parallel=_number(flag_value(extra, *PIPELINE_PARALLEL)),
            data_parallel=_number(flag_value(extra, *DATA_PARALLEL)),
            attention_data_parallel=_number(flag_value(extra, *ATTENTION_DATA_PARALLEL)),
            dp_attention="--enable-dp-attention" in extra,
            dtype=flag_value(extra, "--dtype"),
            requests=int(requests) if requests.isdecimal() else None,
            memory_fraction=_fraction(flag_value(extra, "--mem-fraction-static")),
            weights_known=all(flag_value(extra, name) is None for name in UNKNOWN_WEIGHTS),
        )


def _tensor_parallel(text: str | None) -> int | None:
    if text is not None and not (text.isdecimal() and int(text) > 0):
        raise UsageError(f"--tp {text!r} is not a number of GPUs.", hint="for example -- --tp=2")
    return None if text is None else int(text)


def _number(text: str | None) -> int:
    return max(1, int(text)) if text is not None and text.isdecimal() else 1


def _fraction(text: str | None) -> float | None:
    try:
        return None if text is None else min(1.0, float(text))
    except ValueError:
        return 1.0
