"""Lists of one value for each layer, as text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oscar_zoo.engines.sglang.layer_values import (
    CodeBits,
    layers_text,
    of_layer,
    one_or_text,
    parse_layers,
)

WIDTHS = st.lists(st.sampled_from([2, 4]), min_size=1, max_size=40).map(tuple)


@pytest.mark.parametrize(
    ("text", "values"),
    [("2", (2,)), ("4,2x3", (4, 2, 2, 2)), (" 4 , 2 ", (4, 2)), ("4x1", (4,))],
)
def test_a_list_may_repeat_entries(text: str, values: tuple[int, ...]) -> None:
    assert parse_layers(text, int) == values


@given(k=WIDTHS, v=WIDTHS)
def test_bits_come_back_from_their_text(k: tuple[int, ...], v: tuple[int, ...]) -> None:
    bits = CodeBits(k, v)
    assert CodeBits.parse(str(bits)) == bits
    assert bits.narrow == (set(k + v) == {2})


@given(st.lists(st.sampled_from([0.0, 0.9, 0.92, 0.965]), min_size=1, max_size=40))
def test_ratios_come_back_from_their_text(ratios: list[float]) -> None:
    assert parse_layers(layers_text(ratios), float) == tuple(ratios)


def test_one_value_is_that_of_every_layer() -> None:
    assert [of_layer((4,), layer) for layer in range(3)] == [4, 4, 4]
    assert [of_layer((4, 2, 2), layer) for layer in range(3)] == [4, 2, 2]
    assert (one_or_text((0.9,)), one_or_text((0.0, 0.9, 0.9))) == (0.9, "0,0.9x2")
    assert str(CodeBits((4,), (4,))) == "4"
