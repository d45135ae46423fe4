"""Which implementation of the ops a worker runs, chosen once per device.

A GPU runs kernels: CUDA C++ where it has the shape, else Triton. A CPU runs the references of the
same ops, in plain PyTorch. A GPU never falls back to a reference.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from oscar_kernels import kv_read, reference, slots
from oscar_kernels.cache import LayerCache, Transforms
from oscar_kernels.decode_attention import dispatch as decode_dispatch
from oscar_kernels.decode_attention import launcher as attention_launcher
from oscar_kernels.kv_write import dispatch as write_dispatch
from oscar_zoo.errors import UnsupportedMachine


@dataclass(frozen=True)
class Ops:
    """The ops of one device. Shapes and types are in `oscar_kernels.reference`."""

    write: Callable[..., Tensor | None]  # `kv_write`: transform, quantize and store new tokens
    decode: Callable[..., Tensor]  # `decode_attention.decode_attention`
    extend: Callable[..., tuple[Tensor, Tensor]]  # `decode_attention.extend_attention`
    materialize: Callable[..., None]  # `kv_read`: read cached tokens back as transformed rows
    pack: Callable[..., None]  # `slots`: copy the slots of requests from a table into one list
    # `(caches)` to `draft_commit`: make accepted drafts of a tree the next tokens.
    make_commit: Callable[[Sequence[LayerCache]], Callable[..., None]]
    # `(cache, num_q_heads, max_batch, drafts, max_extend_tokens)` to the workspace sizes of
    # `decode` and of `extend`, in float32 elements; `drafts` is the most query tokens of a request
    # in a decode or verify step.
    workspace_numel: Callable[[LayerCache, int, int, int, int], tuple[int, int]]
    # Allocates what the first `write` with these transforms would allocate.
    prepare: Callable[[Transforms], None]
    # Type of transformed rows and queries between two ops; `None` for the type of the model.
    rows_dtype: torch.dtype | None


def _kernel_workspaces(
    cache: LayerCache, num_q_heads: int, max_batch: int, drafts: int, max_extend_tokens: int
) -> tuple[int, int]:
    decode = decode_dispatch.decode_workspace_numel(cache, num_q_heads, max_batch, drafts)
    if cache.latent:  # their extends have no kernel
        return decode, 0
    return decode, attention_launcher.extend_workspace_numel(cache, num_q_heads, max_extend_tokens)


KERNELS = Ops(
    write=write_dispatch.write_kv_int2,
    decode=decode_dispatch.decode_attention,
    extend=attention_launcher.extend_attention,
    materialize=kv_read.materialize_prefix,
    pack=slots.pack_slots,
    make_commit=slots.DraftCommit,
    workspace_numel=_kernel_workspaces,
    prepare=write_dispatch.prepare,
    rows_dtype=None,
)
"""The kernels. They also run on a CPU if Triton interprets them, which only tests do."""

REFERENCES = Ops(
    write=reference.write_kv_int2,
    decode=reference.decode_attention,
    extend=reference.extend_attention,
    materialize=reference.materialize_prefix,
    pack=reference.pack_slots,
    make_commit=reference.DraftCommit,
    workspace_numel=lambda *_: (0, 0),
    prepare=lambda _: None,
    rows_dtype=torch.float32,
)
"""The definitions of the kernels. Rows stay float32 until they are stored."""


def choose_ops(device: str | torch.device) -> Ops:
    kind = torch.device(device).type
    if kind == "cuda":
        return KERNELS
    if kind == "cpu":
        return REFERENCES
    raise UnsupportedMachine(f"the INT2 KV cache has no kernels for {kind} devices.")
