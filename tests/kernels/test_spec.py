"""The specification of a row: clip index, groups, bytes, and what is refused."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oscar_kernels.spec import QuantSpec, check_group_size, code_bytes, group_channels, row_bytes


@pytest.mark.parametrize(("head_dim", "ratio", "index"), [
    (128, 0.96, 122), (128, 0.92, 117), (256, 0.96, 245), (256, 0.92, 235), (64, 0.96, 61),
    (64, 0.92, 58), (128, 1.0, 127), (128, 0.001, 0), (128, 0.0, None),
])  # fmt: skip
def test_clip_index(head_dim: int, ratio: float, index: int | None) -> None:
    assert QuantSpec(head_dim, head_dim, ratio).clip_index == index


@given(st.floats(0, 1, exclude_min=True))
def test_the_index_is_the_exact_floor_of_the_product(ratio: float) -> None:
    assert QuantSpec(128, 128, ratio).clip_index == min(int(Fraction(ratio) * 128), 127)


@pytest.mark.parametrize("arguments", [
    (0, 1), (6, 6), (-4, 4), (64, 0), (64, 48), (64, 8), (64, -64), (64, 64, -0.1), (64, 64, 1.1),
    (64, 64, float("nan")), (64, 64, 0.0, "float16", 3), (64, 64, 0.0, "float16", 8),
    (64, 64, 0.5, "float8"),
], ids=str)  # fmt: skip
def test_rows_that_no_kernel_could_store_are_refused(arguments: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=r"head_dim|group|clip_ratio|bits|float8"):
        QuantSpec(*arguments)


@pytest.mark.parametrize(("spec", "codes", "scales"), [
    (QuantSpec(128, 128), 32, 4),
    (QuantSpec(128, 128, 0.9, "bfloat16"), 32, 4),
    (QuantSpec(128, 128, 0.0, "float32"), 32, 8),
    (QuantSpec(128, 32), 32, 16),
    (QuantSpec(256, 128), 64, 8),
    (QuantSpec(192, 96, bits=4), 96, 8),
], ids=str)  # fmt: skip
def test_bytes_of_a_row(spec: QuantSpec, codes: int, scales: int) -> None:
    assert (code_bytes(spec), row_bytes(spec)) == (codes, codes + scales)


@pytest.mark.parametrize(
    ("group_size", "of_k", "of_v"), [(192, 192, 128), (128, 96, 128), (96, 96, 64), (64, 48, 64)]
)
def test_rows_of_two_widths_get_groups_of_near_sizes(group_size: int, of_k: int, of_v: int) -> None:
    check_group_size((192, 128), group_size)
    assert group_channels(192, group_size) == of_k
    assert group_channels(128, group_size) == of_v


@pytest.mark.parametrize(("dims", "group_size"), [((64, 64), 48), ((192, 192), 64), ((64, 64), 0)])
def test_a_size_that_cuts_neither_row_is_refused(dims: tuple[int, int], group_size: int) -> None:
    with pytest.raises(ValueError, match="group"):
        check_group_size(dims, group_size)
