"""Flags of SGLang, as users write them."""

from __future__ import annotations

import pytest

from oscar_zoo.engines.sglang.flags import TENSOR_PARALLEL, SizeFlags, flag_value
from oscar_zoo.errors import UsageError


def test_values_of_flags_in_every_spelling() -> None:
    assert flag_value(["--tp", "2", "--tp-size=4"], *TENSOR_PARALLEL) == "4"
    assert flag_value(["--tensor_parallel_size=8"], *TENSOR_PARALLEL) == "8"
    assert flag_value([], "--tp") is None and flag_value(["--tp"], "--tp") is None


def test_the_number_of_gpus() -> None:
    assert SizeFlags.parse(["--tp=2"]).tensor_parallel == 2
    assert SizeFlags.parse(["--page-size=16"]) == SizeFlags()
    for flags in (["--tp=two"], ["--tp=0"]):
        with pytest.raises(UsageError, match="is not a number of GPUs"):
            SizeFlags.parse(flags)


def test_numbers_that_are_none_are_left_to_sglang() -> None:
    words = ["--mem-fraction-static=half", "--max-running-requests=many", "--dp=x", "--pp=0"]
    flags = SizeFlags.parse(words)
    assert (flags.memory_fraction, flags.requests) == (1.0, None)
    assert (flags.data_parallel, flags.pipeline_parallel) == (1, 1)
    assert SizeFlags.parse(["--mem-fraction-static", "1.5"]).memory_fraction == 1.0
