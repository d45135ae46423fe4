"""Short extends with Triton against the reference: on a GPU where there is one, else interpreted in
float32."""

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from random_caches import assert_as_good_as_torch, poison, poisoned_allocations, random_cache

from oscar_kernels import reference
from oscar_kernels.decode_attention import launcher, tuning
from oscar_kernels.decode_attention.launcher import Workspace
from oscar_kernels.spec import QuantSpec

pytest.importorskip("triton")
ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
DTYPE = torch.bfloat16 if ON_GPU else torch.float32


def check(
    prefixes: list[int],
    new: list[int],
    k_spec: QuantSpec,
    v_spec: QuantSpec,
    *,
    group: int = 4,
    cap: float = 0.0,
    padding: int = 0,
    **cache: int | None,
) -> None:
    """Outputs and lse of a random batch, with poisoned scratch; tokens after the last cut are left
    alone."""
    filling = random_cache(prefixes, k_spec, v_spec, dtype=DTYPE, device=DEVICE, **cache)  # type: ignore[arg-type]
    heads, tokens = filling.cache.num_kv_heads, sum(new) + padding
    query, key, value = (
        torch.randn(tokens, h, spec.head_dim, device=DEVICE, dtype=DTYPE)
        for h, spec in ((heads * group, k_spec), (heads, k_spec), (heads, v_spec))
    )
    qo_indptr = torch.tensor([0, *new], device=DEVICE).cumsum(0).int()
    out = torch.full((tokens, heads * group, v_spec.head_dim), 7.0, device=DEVICE, dtype=DTYPE)
    options = {"qo_indptr": qo_indptr, "sm_scale": k_spec.head_dim**-0.5, "logit_cap": cap}
    with poisoned_allocations():
        got, lse = launcher.extend_attention(
            query, key, value, filling.cache, filling.batch, out=out, **options
        )
    kept, used = slice(sum(new), None), slice(0, sum(new))
    assert (got[kept] == 7).all()

    def op(index: int):  # type: ignore[no-untyped-def]
        return lambda q, k, v: reference.extend_attention(
            q, k, v, filling.cache, filling.batch, **options
        )[index][used]

    assert_as_good_as_torch(got[used], op(0), [query, key, value], atol=4e-6)
    assert_as_good_as_torch(lse[used], op(1), [query, key, value], atol=4e-6)


@pytest.mark.parametrize(("dk", "dv", "gk", "gv"), [
    (64, 64, 64, 64), (128, 128, 32, 64), (96, 64, 96, 16), (512, 512, 128, 256),
])  # fmt: skip
def test_head_dims_and_group_sizes(dk: int, dv: int, gk: int, gv: int) -> None:
    check([70, 3], [2, 5], QuantSpec(dk, gk, 0.96), QuantSpec(dv, gv, 0.92), sink=5, recent=9)


@pytest.mark.parametrize(("bk", "bv"), [(4, 2), (2, 4), (4, 4)])
def test_codes_of_4_bits(bk: int, bv: int) -> None:
    k, v = QuantSpec(96, 48, 0.98, bits=bk), QuantSpec(64, 16, bits=bv)
    check([70, 3], [2, 5], k, v, sink=5, recent=9)


@pytest.mark.parametrize("group", [1, 5, 6, 12, 16])
def test_gqa_groups(group: int) -> None:
    check([40], [6], QuantSpec(16, 16), QuantSpec(16, 16), group=group, sink=4, recent=8)


def test_requests_without_prefix_or_new_tokens_and_padding_tokens() -> None:
    spec = QuantSpec(16, 16)
    check([0, 30, 1, 0], [3, 0, 1, 18], spec, spec, padding=2, sink=4, recent=8)


@settings(
    max_examples=40 if ON_GPU else 4, deadline=None, derandomize=True, phases=[Phase.generate]
)
@given(data=st.data())
def test_random_shapes(data: st.DataObject) -> None:
    draw = data.draw
    requests = draw(st.integers(1, 3))
    check(
        draw(st.lists(st.integers(0, 150), min_size=requests, max_size=requests)),
        draw(st.lists(st.integers(0, 20), min_size=requests, max_size=requests)),
        QuantSpec(16, draw(st.sampled_from([8, 16]))),
        QuantSpec(24, draw(st.sampled_from([6, 24])), 0.92),
        group=draw(st.sampled_from([2, 4, 7])),
        cap=draw(st.sampled_from([0.0, 2.0])),
        padding=draw(st.integers(0, 2)),
        sink=draw(st.sampled_from([0, 16])),
        recent=draw(st.sampled_from([0, 20])),
        seed=draw(st.integers(0, 9)),
    )


@pytest.mark.parametrize(("rows", "warps"), [(32, 1), (64, 4), (128, 4)])
def test_any_number_of_query_rows(rows: int, warps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def tiles(*, group: int, **_: int) -> tuning.AttentionTiles:
        return tuning.AttentionTiles(2, 1, 64, 16, rows, rows // group, warps, 2)

    monkeypatch.setattr(tuning, "extend_tiles", tiles)
    check(
        [150, 9], [21, 40], QuantSpec(128, 128, 0.96), QuantSpec(128, 64), group=3, sink=5, recent=9
    )


def test_a_workspace_of_the_announced_size_is_enough() -> None:
    spec = QuantSpec(16, 16)
    made = random_cache([20, 9, 5], spec, sink=4, recent=8, dtype=DTYPE, device=DEVICE)
    workspace = Workspace.allocate(launcher.extend_workspace_numel(made.cache, 4, 9), DEVICE)
    query, key, value = (torch.randn(9, h, 16, device=DEVICE, dtype=DTYPE) for h in (4, 2, 2))
    for qo_indptr in ([0, 9], [0, 3, 9], [0, 1, 2, 9]):
        poison(workspace.scratch)
        bounds = torch.tensor(qo_indptr, device=DEVICE)
        options = {"qo_indptr": bounds, "sm_scale": 0.2, "workspace": workspace}
        got, _ = launcher.extend_attention(query, key, value, made.cache, made.batch, **options)
        assert got.isfinite().all()


@pytest.mark.gpu
@pytest.mark.parametrize("group", [4, 5, 8, 12])
@pytest.mark.parametrize("new", [[256], [2] * 64, [1, 200, 17, 30]])
def test_long_prefixes(group: int, new: list[int]) -> None:
    spec = QuantSpec(128, 128, 0.96)
    check([3000 + 100 * i for i in range(len(new))], new, spec, spec, group=group, num_kv_heads=4)
