"""Flags of SGLang, as users write them."""

from __future__ import annotations

import pytest

from oscar_zoo.engines.sglang.flags import TENSOR_PARALLEL, flag_value, tensor_parallel
from oscar_zoo.errors import UsageError


def test_values_of_flags_in_every_spelling() -> None:
    assert flag_value(["--tp", "2", "--tp-size=4"], *TENSOR_PARALLEL) == "4"
    assert flag_value(["--tensor_parallel_size=8"], *TENSOR_PARALLEL) == "8"
    assert flag_value([], "--tp") is None and flag_value(["--tp"], "--tp") is None


def test_the_number_of_gpus() -> None:
    assert tensor_parallel(["--tp=2"]) == 2 and tensor_parallel(["--page-size=16"]) is None
    for flags in (["--tp=two"], ["--tp=0"]):
        with pytest.raises(UsageError, match="is not a number of GPUs"):
            tensor_parallel(flags)
