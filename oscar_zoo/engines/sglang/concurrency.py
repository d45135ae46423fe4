"""The default number of requests that an INT2 server runs at a time, and how its workers share
them.

Every request row reserves a ring and two sink blocks in 16 bits, used or not: 57 MB for Qwen3-8B.
SGLang's own default of thousands of rows would leave no memory for tokens. With few rows, requests
wait that could run in the same pass. So rows get a fixed share of the GPU, between two limits.
Needs neither torch nor sglang.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from oscar_zoo.artifact.specs import Windows
from oscar_zoo.engines.sglang.flags import SizeFlags
from oscar_zoo.models import hardware

SHARE = 0.05
"""Share of a GPU's memory that request rows get."""
FEWEST, MOST, STEP = 16, 128, 8
UNKNOWN = 64
"""Number of requests if no driver tells the size of the memory."""


@dataclass(frozen=True)
class Layout:
    """How a server is spread over GPUs.

    Attributes:
        tp: GPUs of one tensor-parallel group.
        pp: groups that share the layers.
        replicas: whole servers behind one door (`--dp N`); each runs as many requests as the flag
            says.
        workers: data-parallel workers inside a group (`--enable-dp-attention`), which share them.
    """

    tp: int = 1
    pp: int = 1
    replicas: int = 1
    workers: int = 1

    @classmethod
    def make(cls, *, tp: int, pp: int, dp: int, dp_attention: bool, attn_dp: int) -> Layout:
        """From SGLang's settings; `attn_dp` is 1 before 0.5.23."""
        if attn_dp > 1:
            return cls(tp, pp, 1, attn_dp)
        return cls(tp, pp, 1, dp) if dp_attention else cls(tp, pp, dp, 1)

    @classmethod
    def of_flags(cls, flags: SizeFlags, *, tp: int) -> Layout:
        """From engine flags of the user, on `tp` GPUs per group."""
        return cls.make(
            tp=tp,
            pp=flags.pipeline_parallel,
            dp=flags.data_parallel,
            dp_attention=flags.dp_attention,
            attn_dp=flags.attention_data_parallel,
        )

    @property
    def gpus(self) -> int:
        """Number of GPUs that the server takes."""
        return self.tp * self.pp * self.replicas

    @property
    def attention_ranks(self) -> int:
        """GPUs that share the heads of a model."""
        return max(1, self.tp // self.workers)

    def token_bytes(self, *, layers: int, num_kv_heads: int, dims: int, itemsize: int) -> int:
        """Uncompressed bytes of one token on one GPU.

        Args:
            layers: with attention, of the whole model.
            num_kv_heads: of the whole model; with more GPUs than heads they are replicated.
            itemsize: bytes of one number.
        """
        heads = -(-num_kv_heads // self.attention_ranks)
        return -(-layers // self.pp) * heads * dims * itemsize


def usual_requests(memory: int | None, token: int, windows: Windows, layout: Layout) -> int:
    """`--max-running-requests` of a server.

    Args:
        memory: bytes of the smallest GPU it runs on; `None` on a CPU, or when nobody knows.
        token: see `Layout.token_bytes`.
        windows: whose tokens are uncompressed.
    """
    if memory is None:
        return UNKNOWN * layout.workers
    row = token * max(1, windows.recent + 2 * windows.sink)  # a block for a finished prompt, too
    fit = int(SHARE * memory / max(1, row)) // STEP * STEP
    return min(max(fit, FEWEST), MOST) * layout.workers


def gpu_memory(first: int, number: int, environ: Mapping[str, str] = os.environ) -> int | None:
    """Bytes of the smallest of `number` GPUs from `first` on; `None` when the driver's tool names
    none of them.

    Parts of a GPU (MIG) are smaller than it says.
    """
    if "MIG-" in environ.get("CUDA_VISIBLE_DEVICES", ""):
        return None
    seen = hardware.visible(hardware.gpus(environ), environ)
    return min((card.memory for card in seen[first : first + number]), default=None)
