"""Parts of one softmax are merged by FlashInfer for any number of heads."""

import pytest
import torch
from cache_oracle import PlainPrefill

from oscar_kernels.cache import BatchView, TokenTargets, WindowState
from oscar_zoo.runtime.batch import Batch
from oscar_zoo.runtime.engine import Softmax
from oscar_zoo.runtime.prefill import FlashInferPrefill, heads_of_a_block, modules

THREADS, VECTOR = 1024, 8
"""Limit of a block on every NVIDIA GPU, and the 16-bit numbers that a thread of the merge reads."""


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("num_heads", [1, 7, 12, 32, 40, 64, 96, 101, 128])
def test_a_block_holds_whole_shares_of_the_heads(num_heads: int, head_dim: int) -> None:
    heads = heads_of_a_block(num_heads, head_dim)
    assert num_heads % heads == 0
    assert heads * head_dim // VECTOR <= THREADS
    larger = [n for n in range(heads + 1, num_heads + 1) if num_heads % n == 0]
    assert all(n * head_dim // VECTOR > THREADS // 2 for n in larger)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("num_heads", "head_dim"), [(8, 128), (64, 128), (96, 128), (101, 64), (64, 256)]
)
def test_two_parts_merge_as_one_softmax(num_heads: int, head_dim: int) -> None:
    prefill = FlashInferPrefill(
        num_q_heads=num_heads,
        num_kv_heads=1,
        head_dims=(head_dim, head_dim),
        softmax=Softmax(head_dim**-0.5),
        dtype=torch.bfloat16,
        device="cuda",
    )

    def part() -> tuple[torch.Tensor, torch.Tensor]:
        out = torch.randn(5, num_heads, head_dim, device="cuda").bfloat16()
        return out, 4 * torch.randn(5, num_heads, device="cuda")

    one, other = part(), part()
    out, lse = prefill.merge(one, other)
    want, want_lse = PlainPrefill().merge(one, other)
    torch.testing.assert_close(out.float(), want.float(), atol=2e-2, rtol=1e-2)
    torch.testing.assert_close(lse, want_lse, atol=1e-4, rtol=0)


@pytest.mark.gpu
def test_everything_that_it_compiles_is_known_ahead() -> None:
    """`modules` names what a process has compiled or loaded after every step of a prefill."""
    from flashinfer.jit.core import jit_spec_registry

    shape = {"head_dims": (128, 128), "dtype": torch.bfloat16}
    before = set(jit_spec_registry.get_all_specs())
    prefill = FlashInferPrefill(
        num_q_heads=4, num_kv_heads=2, softmax=Softmax(0.1), device="cuda", **shape
    )
    q, k, v = (torch.randn(8, heads, 128, device="cuda").bfloat16() for heads in (4, 2, 2))
    empty = torch.zeros(0, device="cuda").int()
    view = BatchView(empty, empty, empty, WindowState(empty, empty, empty))
    ends = torch.tensor([0, 3, 8], device="cuda").int()
    batch = Batch("extend", view, TokenTargets(empty, empty, empty, empty), qo_indptr=ends)
    prefill.begin(batch)
    prefill.merge(prefill.chunk(q, k, v, batch, Softmax(0.1)), prefill.whole(q, k, v, Softmax(0.1)))
    used = set(jit_spec_registry.get_all_specs()) - before
    known = modules(**shape, capped=False, device=torch.device("cuda", 0))
    assert used <= {x.name for x in known}
    assert all(x.is_aot or x.jit_library_path.exists() for x in known)
