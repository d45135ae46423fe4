"""How large a server is: its layout over GPUs, the requests that it runs at a time, and SGLang's
flags that launcher and workers share. Needs neither torch nor sglang.

Every request row reserves a ring and two sink blocks in 16 bits, used or not: 57 MB for Qwen3-8B.
SGLang's own default of thousands of rows would leave no memory for tokens. With few rows, requests
wait that could run in the same pass. So rows get a fixed share of the GPU, between two limits.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from oscar_zoo.artifact.specs import Geometry, Windows
from oscar_zoo.errors import UsageError
from oscar_zoo.models import hardware

SHARE = 0.05
"""Share of a GPU's memory that request rows get."""
FEWEST, MOST, STEP = 16, 128, 8
UNKNOWN = 64
"""Number of requests if no driver tells the size of the memory."""
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
STATE_RATIO, SLIDING_RATIO = 0.9, 0.8
"""SGLang's own `--mamba-full-memory-ratio` and `--swa-full-tokens-ratio`."""
ITEMSIZES = {"float32": 4, "float": 4, "float16": 2, "half": 2, "bfloat16": 2}
"""Bytes of one number, by the values of SGLang's `--dtype` and of `torch_dtype` in a
`config.json`."""


SINKS_SHARE = 0.05
"""Of the bytes that the host keeps for pages, for first tokens beside them: without these no
prompt comes back."""


@dataclass(frozen=True)
class Layout:
    tp: int = 1  # GPUs of one tensor-parallel group
    pp: int = 1  # groups that share the layers
    # Whole servers behind one door (`--dp N`); each runs as many requests as the flag says.
    replicas: int = 1
    # Data-parallel workers inside a group (`--enable-dp-attention`), which share them.
    workers: int = 1

    @classmethod
    def make(cls, *, tp: int, pp: int, dp: int, dp_attention: bool, attn_dp: int) -> Layout:
        """From SGLang's settings; `attn_dp` is 1 before 0.5.23."""
        if attn_dp > 1:
            return cls(tp, pp, 1, attn_dp)
        return cls(tp, pp, 1, dp) if dp_attention else cls(tp, pp, dp, 1)

    @classmethod
    def of_arguments(cls, args: Any) -> Layout:
        return cls.make(
            tp=args.tp_size or 1,
            pp=args.pp_size or 1,
            dp=args.dp_size or 1,
            dp_attention=bool(args.enable_dp_attention),
            attn_dp=getattr(args, "attn_dp_size", None) or 1,
        )

    @classmethod
    def of_flags(cls, flags: SizeFlags, *, tp: int) -> Layout:
        return cls.make(
            tp=tp,
            pp=flags.pipeline_parallel,
            dp=flags.data_parallel,
            dp_attention=flags.dp_attention,
            attn_dp=flags.attention_data_parallel,
        )

    @property
    def gpus(self) -> int:
        return self.tp * self.pp * self.replicas

    @property
    def attention_ranks(self) -> int:
        return max(1, self.tp // self.workers)

    def token_bytes(self, *, layers: int, num_kv_heads: int, dims: int, itemsize: int) -> int:
        """Uncompressed bytes of one token on one GPU; `layers` with attention and `num_kv_heads`
        are of the whole model. With more GPUs than heads they are replicated."""
        heads = -(-num_kv_heads // self.attention_ranks)
        return -(-layers // self.pp) * heads * dims * itemsize


def usual_requests(memory: int | None, token: int, windows: Windows, layout: Layout) -> int:
    if memory is None:
        return UNKNOWN * layout.workers
    row = token * max(1, windows.recent + 2 * windows.sink)  # a block for a finished prompt, too
    fit = int(SHARE * memory / max(1, row)) // STEP * STEP
    return min(max(fit, FEWEST), MOST) * layout.workers


def gpu_memory(first: int, number: int, environ: Mapping[str, str] = os.environ) -> int | None:
    """Bytes of the smallest of `number` GPUs from `first` on; `None` when the driver's tool names
    none of them. Parts of a GPU (MIG) are smaller than it says."""
    if "MIG-" in environ.get("CUDA_VISIBLE_DEVICES", ""):
        return None
    seen = hardware.visible(hardware.gpus(environ), environ)
    return min((card.memory for card in seen[first : first + number]), default=None)


def device_flags(device: str) -> dict[str, str]:
    """The engine's flags for `device`, `cpu` or `cuda`; they are the same for every server and
    measurement."""
    return dict(CPU_FLAGS if device == "cpu" else GPU_FLAGS)


def device_switches(device: str) -> tuple[str, ...]:
    return CPU_SWITCHES if device == "cpu" else ()


@dataclass(frozen=True)
class SizeFlags:
    """The engine flags of a user that decide how many GPUs and how much memory a server takes;
    SGLang says what is wrong with a number that is none."""

    tensor_parallel: int | None = None  # GPUs of one group, or `None` without the flag
    pipeline_parallel: int = 1  # groups that share the layers
    data_parallel: int = 1  # whole servers, or with `dp_attention` workers inside a group
    attention_data_parallel: int = 1  # workers inside a group, by a flag of their own
    dp_attention: bool = False  # whether workers share a group
    dtype: str | None = None  # type of the weights in memory, or `None`
    requests: int | None = None  # concurrent requests, or `None`
    memory_fraction: float | None = None  # share of the free memory that SGLang uses, or `None`
    # Whether the files of a model tell how large its weights are in memory.
    weights_known: bool = True


def splits(geometry: Geometry, ranks: int) -> bool:
    """Whether all of `ranks` get as many query heads, and as many KV heads or a copy of one."""
    heads = geometry.num_kv_heads
    return geometry.num_q_heads % ranks == 0 and (heads % ranks == 0 or ranks % heads == 0)


def check_heads(name: str, geometry: Geometry, layout: Layout, *, option: str) -> None:
    ranks = layout.attention_ranks
    if splits(geometry, ranks):
        return
    fewer = next(number for number in range(ranks - 1, 0, -1) if splits(geometry, number))
    heads = f"{geometry.num_q_heads} query heads"
    if not geometry.rotary_key:
        heads += f" and {geometry.num_kv_heads} KV heads"
    raise UsageError(
        f"{ranks} GPUs{'' if layout.workers == 1 else ' of a worker'} cannot share the"
        f" {heads} of {name} evenly.",
        hint=f"choose another number, for example {option.format(fewer * layout.workers)}",
    )
