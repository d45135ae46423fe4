"""The quantizer against its rules written a second time, value by value in plain Python."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oscar_kernels import quantizer
from oscar_kernels.kv_write.launcher import quantize_rows
from oscar_kernels.spec import PLAIN, QuantSpec, code_bytes, row_bytes

SPECS = [
    QuantSpec(16, 16),
    QuantSpec(16, 16, 0.9),
    QuantSpec(64, 64, 0.96),
    QuantSpec(64, 32, 0.92),
    QuantSpec(128, 32, 0.96, "bfloat16"),
    QuantSpec(128, 128, 0.92, "float32"),
    QuantSpec(64, 64, bits=4),
    QuantSpec(128, 32, 0.99, bits=4),
    QuantSpec(24, 12, scale_dtype="float32", bits=4),
]


def oracle(
    row: list[float], spec: QuantSpec
) -> tuple[list[int], list[tuple[float, float]], list[float]]:
    """Codes, (scale, offset) and distance to the nearest rounding tie, in double precision."""
    if spec.clip_ratio > 0:
        rank = min(math.floor(spec.clip_ratio * len(row)), len(row) - 1)
        limit = sorted(abs(x) for x in row)[rank]
        row = [min(max(x, -limit), limit) for x in row]
    codes, affine, margins = [], [], []
    for start in range(0, len(row), spec.group_size):
        group = row[start : start + spec.group_size]
        scale, offset = max(max(group) - min(group), 1e-8) / (2**spec.bits - 1), min(group)
        affine.append((scale, offset))
        for x in group:
            y = (x - offset) / scale + 0.5
            codes.append(min(max(math.floor(y), 0), 2**spec.bits - 1))
            margins.append(abs(y - round(y)))
    return codes, affine, margins


def gaussian(rows: int, d: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, d, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_codes_scales_and_offsets_follow_the_rules(spec: QuantSpec) -> None:
    x = gaussian(200, spec.head_dim) * torch.logspace(-3, 3, 200)[:, None]
    codes, affine = quantizer.quantize_codes(x, spec)
    for row, got, stored in zip(x.tolist(), codes.tolist(), affine.float().tolist(), strict=True):
        want, want_affine, margins = oracle(row, spec)
        wrong = [m for a, b, m in zip(got, want, margins, strict=True) if a != b]
        assert all(m < 1e-5 for m in wrong)  # float32 may decide a tie the other way
        for a, b in zip(stored, want_affine, strict=True):
            assert a == pytest.approx(b, rel=2**-7 if spec.scale_dtype == "bfloat16" else 2**-10)


def test_at_128_the_clip_saturates_5_and_10_values() -> None:
    x = gaussian(50, 128)
    for ratio, count in ((0.96, 5), (0.92, 10)):
        clipped = quantizer.clip_rows(x, QuantSpec(128, 128, ratio))
        assert ((clipped != x).sum(-1) == count).all()
        limit = clipped.abs().amax(-1, keepdim=True)
        assert torch.equal(clipped, x.clamp(-limit, limit))
    assert torch.equal(quantizer.clip_rows(x, QuantSpec(128, 128, 1.0)), x)
    assert torch.equal(quantizer.clip_rows(x, QuantSpec(128, 128, 0.0)), x)


def test_the_clip_looks_at_the_whole_row_whatever_the_groups() -> None:
    x = gaussian(20, 128) * torch.cat([torch.full((64,), 10.0), torch.ones(64)])
    whole, halves = QuantSpec(128, 128, 0.92), QuantSpec(128, 64, 0.92)
    assert torch.equal(quantizer.clip_rows(x, whole), quantizer.clip_rows(x, halves))


@pytest.mark.parametrize("value", [0.0, 1.0, -1.0, 1e-6, -3e4, 6e4])
@pytest.mark.parametrize("ratio", [0.0, 0.96])
def test_constant_rows_come_back(value: float, ratio: float) -> None:
    spec = QuantSpec(64, 64, ratio)
    x = torch.full((3, 64), value)
    assert torch.equal(quantizer.fake_quantize(x, spec), x.half().float())


def test_the_scale_of_a_constant_row_is_a_third_of_1e_8_and_never_zero() -> None:
    scale, offset = quantizer.affine_parameters(torch.full((1, 16), 2.5), QuantSpec(16, 16))
    assert float(scale) == pytest.approx(1e-8 / 3)
    assert float(offset) == 2.5
    smaller = torch.linspace(0, 3e-9, 16)[None]
    codes, _ = quantizer.quantize_codes(smaller, QuantSpec(16, 16))
    assert codes.max() == 1  # 3e-9 of a range of 1e-8 is not the top code


def test_float16_saturates_and_float32_does_not() -> None:
    x = torch.zeros(1, 16)
    x[0, 0], x[0, 1] = -1e6, 1e6
    _, affine = quantizer.quantize_codes(x, QuantSpec(16, 16))
    assert affine.tolist() == [[[65504.0, -65504.0]]]
    assert torch.isfinite(quantizer.fake_quantize(x, QuantSpec(16, 16))).all()
    exact = quantizer.fake_quantize(x, QuantSpec(16, 16, scale_dtype="float32"))
    assert exact[0, :2].tolist() == pytest.approx([-1e6, 1e6])


def test_two_values_per_group_come_back_exactly() -> None:
    low_high = torch.tensor([[-1.5, 3.0] * 8 + [0.25, 1.0] * 8])
    assert torch.equal(quantizer.fake_quantize(low_high, QuantSpec(32, 16)), low_high)


@pytest.mark.parametrize(
    "spec", [s for s in SPECS if s.scale_dtype == "float32" or s.clip_ratio == 0], ids=str
)
def test_the_error_stays_below_half_a_step(spec: QuantSpec) -> None:
    x = gaussian(500, spec.head_dim, seed=3)
    clipped = quantizer.clip_rows(x, spec)
    scale, _ = quantizer.affine_parameters(clipped, spec)
    step = scale.repeat_interleave(spec.group_size, -1)
    assert ((quantizer.fake_quantize(x, spec) - clipped).abs() <= 0.5 * step + 4e-3 * step).all()


def test_storage_types_cost_little() -> None:
    """Squared error on Gaussian rows at ratio 0.96: 16-bit scales are no worse than float32 to
    three digits."""
    x = gaussian(20_000, 128, seed=1)

    def error(dtype: str) -> float:
        stored = quantizer.fake_quantize(x, QuantSpec(128, 128, 0.96, dtype))
        return float((stored - x).square().mean())

    assert error("float32") == pytest.approx(0.1563, abs=1e-3)
    assert error("float16") == pytest.approx(error("float32"), rel=1e-4)
    assert error("bfloat16") == pytest.approx(error("float32"), rel=1e-3)


def test_channels_may_be_permuted_when_a_row_is_one_group() -> None:
    x, order = gaussian(100, 64), torch.randperm(64, generator=torch.Generator().manual_seed(2))
    for ratio in (0.0, 0.92):
        one = QuantSpec(64, 64, ratio)
        assert torch.equal(
            quantizer.fake_quantize(x[:, order], one), quantizer.fake_quantize(x, one)[:, order]
        )
    groups = QuantSpec(64, 16)
    assert not torch.equal(
        quantizer.fake_quantize(x[:, order], groups), quantizer.fake_quantize(x, groups)[:, order]
    )


def test_a_row_without_codes_is_stored_in_bfloat16() -> None:
    rows, spec = torch.randn(3, 2, 32), QuantSpec(32, 32, bits=PLAIN)
    packed, affine = quantizer.quantize(rows, spec)
    assert packed.shape == (3, 2, code_bytes(spec)) and affine.numel() == spec.num_groups == 0
    assert row_bytes(spec) == code_bytes(spec) == 64
    assert torch.equal(quantizer.dequantize(packed, affine, spec), rows.bfloat16().float())


def test_rows_are_independent_and_any_shape_or_stride_is_taken() -> None:
    spec = QuantSpec(32, 16, 0.9)
    x = gaussian(2 * 3 * 5, 32).reshape(2, 3, 5, 32)
    whole = quantizer.quantize(x, spec)
    assert whole[0].shape == (2, 3, 5, 8)
    assert whole[1].shape == (2, 3, 5, 2, 2)
    one = quantizer.quantize(x[1, 2, 4], spec)
    assert torch.equal(whole[0][1, 2, 4], one[0])
    assert torch.equal(whole[1][1, 2, 4], one[1])
    strided = x.permute(2, 0, 1, 3)
    assert torch.equal(quantizer.quantize(strided, spec)[0], whole[0].permute(2, 0, 1, 3))
    assert quantizer.quantize(x[:0], spec)[0].shape == (0, 3, 5, 8)


def test_the_input_is_not_modified_and_half_types_are_taken() -> None:
    x = gaussian(10, 64).bfloat16()
    before = x.clone()
    spec = QuantSpec(64, 64, 0.92)
    assert torch.equal(quantizer.fake_quantize(x, spec), quantizer.fake_quantize(x.float(), spec))
    assert torch.equal(x, before)


def rows_of_codes(top: int) -> st.SearchStrategy[list[int]]:
    return st.integers(1, 16).flatmap(
        lambda n: st.lists(st.integers(0, top), min_size=4 * n, max_size=4 * n)
    )


@given(rows_of_codes(3))
def test_packing_comes_back_in_the_documented_order(codes: list[int]) -> None:
    quarter = len(codes) // 4
    packed = quantizer.pack(torch.tensor(codes, dtype=torch.uint8))
    assert packed.tolist() == [
        sum(codes[j + i * quarter] << (2 * i) for i in range(4)) for j in range(quarter)
    ]
    assert quantizer.unpack(packed).tolist() == codes


@given(rows_of_codes(15))
def test_codes_of_4_bits_are_packed_half_by_half(codes: list[int]) -> None:
    quarter = len(codes) // 4
    packed = quantizer.pack(torch.tensor(codes, dtype=torch.uint8), 4)
    assert packed.tolist() == [
        codes[first + j] | codes[first + quarter + j] << 4
        for first in (0, 2 * quarter)
        for j in range(quarter)
    ]
    assert quantizer.unpack(packed, 4).tolist() == codes


@given(st.binary(min_size=1, max_size=32))
def test_every_byte_unpacks_and_packs_again(data: bytes) -> None:
    packed = torch.tensor(list(data), dtype=torch.uint8)
    assert torch.equal(quantizer.pack(quantizer.unpack(packed)), packed)


@settings(max_examples=200)
@given(
    st.lists(st.floats(-1e4, 1e4, width=32), min_size=16, max_size=16),
    st.sampled_from([0.0, 0.5, 0.92, 1.0]),
    st.sampled_from([4, 8, 16]),
)
def test_whatever_the_row_the_result_is_finite_and_inside_its_range(
    row: list[float], ratio: float, group_size: int
) -> None:
    spec = QuantSpec(16, group_size, ratio, "float32")
    x = torch.tensor([row])
    result = quantizer.dequantize(*quantizer.quantize(x, spec), spec)
    slack = 1e-5 * max(1e-3, float(x.abs().max()))
    clipped = quantizer.clip_rows(x, spec)
    assert torch.isfinite(result).all()
    assert float(result.min()) >= float(clipped.min()) - slack
    assert float(result.max()) <= float(clipped.max()) + slack
    assert torch.equal(result, quantizer.fake_quantize(x, spec))


def test_float64_arithmetic_gives_the_same_codes_up_to_ties() -> None:
    x = gaussian(4000, 128, seed=5)
    spec = QuantSpec(128, 128, 0.96)
    codes, _ = quantizer.quantize_codes(x, spec)
    exact = np.sort(np.abs(x.double().numpy()), -1)[:, 122:123]
    clipped = np.clip(x.double().numpy(), -exact, exact)
    low, high = clipped.min(-1, keepdims=True), clipped.max(-1, keepdims=True)
    want = np.clip(np.floor((clipped - low) / ((high - low) / 3) + 0.5), 0, 3)
    assert int((want != codes.numpy()).sum()) <= 2  # of 512,000


def weighted(error: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    return torch.einsum("htd,hde,hte->h", error.double(), seen, error.double())


@pytest.mark.parametrize(("d", "group", "bits"), [(16, 8, 2), (128, 32, 2), (128, 128, 4)])
def test_feedback_lowers_the_error_that_its_weights_see(d: int, group: int, bits: int) -> None:
    """`seen = (I + U) D (I + U)^T` in the order of rounding, with U strictly upper, and
    `W = (I + U)^-1`."""
    draw = torch.Generator().manual_seed(5)
    root = torch.randn(3, d, d, generator=draw, dtype=torch.float64) * torch.logspace(0, -1.5, d)
    order = list(quantizer.rounding_order(d))
    seen = root @ root.mT + 0.1 * torch.eye(d)
    upper = torch.linalg.cholesky(seen[:, order][:, :, order].flip(-1, -2)).flip(-1, -2)
    upper = torch.linalg.inv(upper / upper.diagonal(dim1=-2, dim2=-1)[:, None])
    x, spec = torch.randn(3, 200, d, generator=draw), QuantSpec(d, group, bits=bits)
    carried, nearest = (quantizer.fake_quantize(x, spec, u) - x for u in (upper.half(), None))
    assert bool((weighted(carried, seen) < 0.8 * weighted(nearest, seen)).all())
    assert torch.equal(
        quantizer.quantize_codes(x, spec, upper.half())[1], quantizer.quantize_codes(x, spec)[1]
    )


def test_feedback_is_carried_on_channel_by_channel() -> None:
    """Against the definition, one row and channel at a time, in float64; half a unit of a code is
    far from any tie of these rows."""
    d, spec = 8, QuantSpec(8, 4, 0.9)
    draw = torch.Generator().manual_seed(1)
    x, u = torch.randn(2, 3, d, generator=draw), torch.randn(2, d, d, generator=draw).half()
    codes, _ = quantizer.quantize_codes(x, spec, u)
    scale, offset = quantizer.affine_parameters(quantizer.clip_rows(x, spec), spec)
    for head in range(2):
        for row in range(3):
            left: list[float] = []
            for at, channel in enumerate(quantizer.rounding_order(d)):
                s, o = (float(one[head, row, channel // 4]) for one in (scale, offset))
                y = float(x[head, row, channel])
                target = y + sum(r * float(u[head, j, at]) for j, r in enumerate(left))
                code = min(max(math.floor((target - o) / s + 0.5), 0), 3)
                left.append(code * s + o - target)
                assert int(codes[head, row, channel]) == code


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("spec", [QuantSpec(16, 8, 0.9), QuantSpec(128, 32, bits=4)], ids=str)
def test_rows_with_feedback_in_one_launch(spec: QuantSpec, device: str) -> None:
    if device == "cpu" and torch.cuda.is_available():
        pytest.skip("Triton does not interpret where there is a GPU")
    d, draw = spec.head_dim, torch.Generator().manual_seed(3)
    x, u = torch.randn(2, 3, 37, d, generator=draw), torch.randn(3, d, d, generator=draw).triu(1)
    got = quantize_rows(x.to(device), spec, u.half().to(device) / 5, torch.float16)
    want = quantizer.quantize(x, spec, u.half() / 5)
    assert all(torch.equal(one.cpu(), other) for one, other in zip(got, want, strict=True))
