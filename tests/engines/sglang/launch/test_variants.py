"""Which servers a sweep starts, and with which flags."""

import itertools
from dataclasses import astuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oscar_zoo.engines.sglang.launch.user_flags import UserFlags
from oscar_zoo.engines.sglang.launch.variants import ServerVariant, check_flags, variants
from oscar_zoo.errors import UsageError

CHUNKS, PAGES, RADIX = (512, 8192), (1, 16), (True, False)


@given(
    st.lists(st.sampled_from([16, 32, 64]), min_size=1, unique=True),
    st.lists(st.sampled_from([1, 2, 16]), min_size=1, unique=True),
    st.lists(st.booleans(), min_size=1, unique=True),
    st.lists(st.sampled_from([1, 2]), min_size=1, unique=True),
)
@settings(max_examples=20, deadline=None)
def test_every_pair_of_values_has_a_server_and_no_server_comes_twice(
    chunks: list[int], pages: list[int], radix: list[bool], tps: list[int]
) -> None:
    found = [astuple(one) for one in variants(chunks, pages, radix, tps)]
    every = variants(chunks, pages, radix, tps, full=True)
    assert len(set(every)) == len(every) == len(chunks) * len(pages) * len(radix) * len(tps)
    assert len(set(found)) == len(found) <= len(every)
    assert found[0] == (chunks[0], pages[0], radix[0], tps[0])
    for i, j in itertools.combinations(range(4), 2):
        values = (chunks, pages, radix, tps)
        assert {(one[i], one[j]) for one in found} == set(itertools.product(values[i], values[j]))


def test_a_sweep_needs_few_servers() -> None:
    assert len(variants(CHUNKS, PAGES, RADIX, (1,))) == 4
    assert len(variants(CHUNKS, PAGES, RADIX, (1, 2))) <= 6
    assert variants((512,), (1,), (True,), (1,)) == (ServerVariant(),)


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(UsageError, match="chunks of 100 tokens are not whole pages of 16"):
        variants((100,), (1, 16), RADIX, (1,))
    with pytest.raises(UsageError, match="128 combinations are more than 64"):
        variants(range(16, 32), (1,), RADIX, (1, 2, 4, 8))


def test_flags_say_everything_that_differs() -> None:
    assert ServerVariant(512, 16, False, 2).flags == (
        "--chunked-prefill-size=512",
        "--page-size=16",
        "--tp-size=2",
        "--disable-radix-cache",
    )
    assert "--disable-radix-cache" not in ServerVariant().flags
    assert ServerVariant(tp=2).environment("cpu") == {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
    assert ServerVariant(tp=2).environment("cuda") == ServerVariant().environment("cpu") == {}


@pytest.mark.parametrize(
    "flag", ["--tp=2", "--page-size", "--chunked_prefill_size=1", "--disable-radix", "--dtype=auto"]
)
def test_flags_of_a_variant_are_not_given_twice(flag: str) -> None:
    with pytest.raises(UsageError, match="is not allowed after --"):
        check_flags(UserFlags(["--mem-fraction-static=0.5", flag]))
