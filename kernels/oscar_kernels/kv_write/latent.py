"""Writes of a few latents (MLA), as of a decode step: two products in plain torch, which are spread
over the GPU, and one kernel in CUDA C++ for all else, a warp for each token. With feedback the
kernels in Triton go through the channels of 64 tokens one after the other."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch
from torch import Tensor

from oscar_kernels import _triton, nvrtc
from oscar_kernels.cache import LayerCache, TokenTargets, Transforms, WindowState
from oscar_kernels.chips import Target
from oscar_kernels.kv_write.launcher import check, clip_rank
from oscar_kernels.reference import Parts

SOURCE = nvrtc.CudaSource(__name__.rpartition(".")[0], "latent.cu")
MOST_TOKENS = 256
"""More are a prompt's, of which the kernels in Triton have enough for every multiprocessor. Where
the two cross was not timed."""
LATENTS = 128, 256, 512
THREADS = 32


def misfit(
    key: Tensor,
    value: Tensor,
    cache: LayerCache,
    targets: TokenTargets,
    *,
    parts: Parts = "all",
    rows_out: tuple[Tensor, Tensor] | None = None,
    **_: Any,
) -> str | None:
    """Why these are not for this kernel, in one line; `None` if they are. Options as of
    `reference.write_kv_int2`."""
    spec, rotary = cache.k_spec, cache.v_spec.head_dim
    if not cache.latent or spec.head_dim not in LATENTS or spec.num_groups not in (1, 2, 4):
        return f"rows of {spec.head_dim} channels in {spec.num_groups} groups"
    if spec.bits != 2 or clip_rank(spec) or rotary % 2 or cache.affine.dtype != torch.float16:
        return f"codes of {spec.bits} bits with {cache.affine.dtype} scales, or a clip"
    stores = {x.dtype for x in (key, value, *cache.stores[2:])}
    if stores != {torch.bfloat16} or value.stride(0) % 2 or value.data_ptr() % 4:
        return "rows that are not bfloat16, or not aligned to 4 bytes"
    if len(key) > MOST_TOKENS or parts != "all" or rows_out is not None:
        return "a prompt"
    wrong = (x.dtype for x in vars(targets).values() if x.dtype not in _triton.INTEGERS)
    return next((f"{dtype} targets" for dtype in wrong), None)


def unsupported(key: Tensor, *others: Any, **options: Any) -> str | None:
    """As `misfit`, and for a device that cannot run it."""
    return _triton.without_cuda(key.device) or misfit(key, *others, **options)


def unbuildable(key: Tensor, made: dict[str, str | int]) -> str | None:
    """Why it cannot be compiled and loaded, in one line; `None` once it is."""
    return _failure(tuple(made.items()), key.device)


@cache
def _failure(made: tuple[tuple[str, str | int], ...], device: torch.device) -> str | None:
    return nvrtc.failure(lambda: _load(made, device))


def write_kv_int2(
    key: Tensor,
    value: Tensor,
    cache: LayerCache,
    transforms: Transforms,
    targets: TokenTargets,
    *,
    windows: WindowState,
    query: Tensor | None = None,
    query_out: Tensor | None = None,
    **_: Any,
) -> Tensor | None:
    """As `reference.write_kv_int2`, of what is supported. Rows in float32 are allocated."""
    check(key, value, cache, transforms, targets, query, None)
    if query is not None:
        query_out = transformed_query(query, query_out, transforms)
    if len(key):
        rows = transformed(key, transforms)
        given = arguments(rows, value, cache, transforms, targets, windows)
        kernel = _load(tuple(flags(cache, transforms, targets).items()), key.device)
        stream = torch.cuda.current_stream(key.device).cuda_stream
        kernel.launch((len(key), 1), given, stream)
    return query_out


def transformed(key: Tensor, transforms: Transforms) -> Tensor:
    """Latents `[T, 1, D]` in the basis of the codes, float32 `[T, D]`."""
    centred = key[:, 0].float()
    if transforms.k_mean is not None:
        centred = centred - transforms.k_mean[0]
    return centred @ transforms.k_forward[0]


def transformed_query(query: Tensor, out: Tensor | None, transforms: Transforms) -> Tensor:
    """Queries with their latent part in the basis of the codes."""
    out = torch.empty_like(query, memory_format=torch.contiguous_format) if out is None else out
    width = transforms.q_partner.shape[-1]
    out[..., :width] = query[..., :width].float() @ transforms.q_partner[0]
    out[..., width:] = query[..., width:]
    return out


def flags(cache: LayerCache, transforms: Transforms, targets: TokenTargets) -> dict[str, str | int]:
    """What is compiled in."""
    integers = (_triton.INTEGERS[x.dtype] for x in vars(targets).values())
    return {
        "D": cache.k_spec.head_dim,
        "ROPE": cache.v_spec.head_dim,
        "GROUPS": cache.k_spec.num_groups,
        "FEEDBACK": int(transforms.k_feedback is not None),
        **dict(zip(("SLOT_T", "ROW_T", "POSITION_T", "END_T"), integers, strict=True)),
    }


def build(made: dict[str, str | int], target: Target) -> nvrtc.Build:
    """How it is compiled for a GPU."""
    return nvrtc.Build.of(SOURCE, made, target.arch, target.driver)


@cache
def _load(made: tuple[tuple[str, str | int], ...], device: torch.device) -> nvrtc.Kernel:
    code = build(dict(made), _triton.target(device)).code()
    with torch.cuda.device(device):
        torch.cuda.current_stream()
        return nvrtc.load(code, {"oscar_write_latents": THREADS})[0]


class Params(ctypes.Structure):
    """`Params` of latent.cu."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in (
            "rows", "rotary", "feedback", "codes", "affine", "sink_latent", "sink_rotary",
            "ring_latent", "ring_rotary", "slots", "places", "positions", "ends", "sink_block",
        )),
        ("rotary_token", ctypes.c_longlong),
        *((name, ctypes.c_int) for name in ("tokens", "sink", "recent", "ring")),
    )  # fmt: skip


def arguments(
    rows: Tensor, value: Tensor, cache: LayerCache, transforms: Transforms, targets: TokenTargets,
    windows: WindowState,
) -> Params:  # fmt: skip
    """What a launch is given; `rows` as of `transformed`."""
    tensors = (
        cache.codes, cache.affine, cache.sink_k, cache.sink_v, cache.ring_k, cache.ring_v,
        *vars(targets).values(), windows.sink_block,
    )  # fmt: skip
    feedback = transforms.k_feedback
    return Params(
        rows.data_ptr(), value.data_ptr(), None if feedback is None else feedback.data_ptr(),
        *(x.data_ptr() for x in tensors), 2 * value.stride(0), len(rows), cache.sink, cache.recent,
        max(1, cache.ring_rows),
    )  # fmt: skip
