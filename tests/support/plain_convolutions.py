"""SGLang's short convolutions in PyTorch, in the place of its Triton kernels, which are not ours.

Triton's interpreter needs a millisecond for every token of every layer, more than half of the time
of a model with convolutions. Whatever only drafts ask for still runs in the kernels.
`test_stock_code.py` compares both.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import conv1d, silu

Op = Callable[..., Tensor]


def replacements() -> list[tuple[Op, Op]]:
    """Each function of this SGLang that starts a kernel, and what takes its place."""
    from sglang.kernels.ops.mamba import causal_conv1d_triton as kernels

    return [
        (kernels.causal_conv1d_fn, _prefill(kernels.causal_conv1d_fn)),
        (kernels.causal_conv1d_update, _decode(kernels.causal_conv1d_update)),
    ]


def _prefill(kernel: Op) -> Op:
    def causal_conv1d_fn(
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        conv_states: Tensor | None,
        query_start_loc: Tensor,
        seq_lens_cpu: Sequence[int],
        cache_indices: Tensor | None = None,
        has_initial_state: Tensor | None = None,
        activation: str | None = "silu",
        pad_slot_id: int = -1,
        **more: Any,
    ) -> Tensor:
        """`[channels, tokens]` of all sequences, one behind the other; see the kernel."""
        given = (conv_states, cache_indices, has_initial_state)
        if any(one is None for one in given) or any(one is not None for one in more.values()):
            own = (cache_indices, has_initial_state, activation, pad_slot_id)
            return kernel(x, weight, bias, conv_states, query_start_loc, seq_lens_cpu, *own, **more)
        assert conv_states is not None and cache_indices is not None
        assert has_initial_state is not None
        out, begins = torch.empty_like(x), query_start_loc.tolist()
        for index, slot in enumerate(cache_indices.tolist()):
            if slot != pad_slot_id:
                part = slice(*begins[index : index + 2])
                state = conv_states[slot, :, : weight.shape[1] - 1]
                before = state if has_initial_state[index] else torch.zeros_like(state)
                out[:, part] = _step(x[None, :, part], before[None], state[None], weight, bias)[0]
        return out if activation is None else silu(out)

    return causal_conv1d_fn


def _decode(kernel: Op) -> Op:
    def causal_conv1d_update(
        x: Tensor,
        conv_state: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | bool | None = None,
        cache_seqlens: Tensor | None = None,
        conv_state_indices: Tensor | None = None,
        *drafts: Any,
        pad_slot_id: int = -1,
        **more: Any,
    ) -> Tensor:
        """`[requests, channels]`, a token of each; see the kernel."""
        asked = (cache_seqlens, *drafts, *more.values())
        if x.dim() != 2 or conv_state_indices is None or any(one is not None for one in asked):
            own = (bias, activation, cache_seqlens, conv_state_indices, *drafts)
            return kernel(x, conv_state, weight, *own, pad_slot_id=pad_slot_id, **more)
        out, real = torch.empty_like(x), conv_state_indices != pad_slot_id
        slots = conv_state_indices[real].long()
        state = conv_state[slots, :, : weight.shape[1] - 1]
        out[real] = _step(x[real][..., None], state, state, weight, bias)[..., 0]
        conv_state[slots, :, : weight.shape[1] - 1] = state
        return silu(out) if activation else out

    return causal_conv1d_update


def _step(x: Tensor, before: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Outputs `[requests, channels, tokens]`; the last inputs are written to `state`."""
    whole = torch.cat([before.to(x.dtype), x], -1)
    state.copy_(whole[..., whole.shape[-1] - state.shape[-1] :])
    return conv1d(whole, weight[:, None], bias, groups=len(weight))


def compare(out: str) -> None:
    """Largest differences between the kernels and these functions, of outputs and of states, by the
    name of a case; JSON in the file `out`."""
    kernels = [kernel for kernel, _ in _replaced]
    draw = torch.Generator().manual_seed(0)
    found: dict[str, float] = {}
    for width in (3, 4):
        states = torch.randn(6, 300, width - 1, generator=draw)
        weight, bias = (torch.randn(300, *n, generator=draw) for n in ((width,), ()))
        x = torch.randn(300, 32, generator=draw)
        begins = torch.tensor([0, 1, 3, 20, 24, 32], dtype=torch.int32)
        slots = torch.tensor([4, 0, 2, -1, 5], dtype=torch.int32)
        known = torch.tensor([True, True, False, True, False])
        of_slots = {"cache_indices": slots, "has_initial_state": known}
        for act in (None, "silu"):
            args = (x, weight, bias, begins, begins.diff().tolist())
            results = []
            for op in (kernels[0], _prefill(kernels[0])):
                own = states.clone()
                got = op(args[0], args[1], args[2], own, *args[3:], activation=act, **of_slots)
                got[:, 20:24] = 0  # of the padding
                results.append((got, own))
            found[f"prefill {width} {act}"] = _apart(*results)
            results = []
            for op in (kernels[1], _decode(kernels[1])):
                own = states.clone()
                got = op(x.T[:5].contiguous(), own, weight, bias, act, conv_state_indices=slots)
                got[3] = 0
                results.append((got, own))
            found[f"decode {width} {act}"] = _apart(*results)
    Path(out).write_text(json.dumps(found))


def _apart(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(one, other, strict=True))


_replaced: list[tuple[Op, Op]] = []


def install(replace: Callable[[dict[int, Op]], None]) -> None:
    """Put them in the place of the kernels, wherever those are bound."""
    _replaced[:] = replacements()
    replace({id(was): now for was, now in _replaced})
