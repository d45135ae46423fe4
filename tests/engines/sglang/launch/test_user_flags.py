"""Flags of SGLang, as users write them."""

from __future__ import annotations

import pytest

from oscar_zoo.engines.sglang.flags import SizeFlags
from oscar_zoo.engines.sglang.launch.user_flags import TENSOR_PARALLEL, UserFlags
from oscar_zoo.errors import UsageError


def test_values_of_flags_in_every_spelling() -> None:
    assert UserFlags(["--tp", "2", "--tp-size=4"]).text(*TENSOR_PARALLEL) == "4"
    assert UserFlags(["--tensor_parallel_size=8"]).text(*TENSOR_PARALLEL) == "8"
    assert UserFlags([]).text("--tp") is None and UserFlags(["--tp"]).text("--tp") is None


def test_a_switch_has_no_value() -> None:
    given = UserFlags(["--enable-metrics", "--tp", "2", "--name=--x", "--last"]).given
    assert [(flag.name, flag.value) for flag in given] == [
        ("--enable-metrics", None),
        ("--tp", "2"),
        ("--name", "--x"),
        ("--last", None),
    ]


def test_flags_that_serve_refuses_are_no_user_flags() -> None:
    with pytest.raises(UsageError, match="--host is not allowed"):
        UserFlags(["--tp=2", "--host=0.0.0.0"])
    with pytest.raises(UsageError, match="--trust-remote-code is not allowed"):
        UserFlags(["--tp=2"]).after("--trust-remote-code")
    assert UserFlags(["--tp=2"]).after("--dtype=half").words == ("--dtype=half", "--tp=2")


def test_the_number_of_gpus() -> None:
    assert UserFlags(["--tp=2"]).sizes().tensor_parallel == 2
    assert UserFlags(["--page-size=16"]).sizes() == SizeFlags()
    for flags in (["--tp=two"], ["--tp=0"]):
        with pytest.raises(UsageError, match="is not a number of GPUs"):
            UserFlags(flags).sizes()


def test_workers_share_a_group_in_every_spelling() -> None:
    for flag in ("--enable-dp-attention", "--enable_dp_attention"):
        assert UserFlags([flag]).sizes().dp_attention


def test_numbers_that_are_none_are_left_to_sglang() -> None:
    words = ["--mem-fraction-static=half", "--max-running-requests=many", "--dp=x", "--pp=0"]
    flags = UserFlags(words).sizes()
    assert (flags.memory_fraction, flags.requests) == (1.0, None)
    assert (flags.data_parallel, flags.pipeline_parallel) == (1, 1)
    assert UserFlags(["--mem-fraction-static", "1.5"]).sizes().memory_fraction == 1.0
