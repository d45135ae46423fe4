"""Which path decode attention takes, and what it says about it."""

import logging

import pytest
import torch
from random_caches import assert_as_good_as_torch, random_cache

from oscar_kernels import reference
from oscar_kernels.decode_attention import dispatch
from oscar_kernels.decode_attention.launcher import Workspace
from oscar_kernels.spec import QuantSpec


@pytest.fixture(autouse=True)
def untold() -> None:
    dispatch._tell.cache_clear()


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [x.getMessage() for x in caplog.records if x.name == dispatch.__name__]


@pytest.mark.parametrize(("head_dim", "times"), [(128, 1), (512, 0)])
def test_the_reason_is_told_once_but_not_where_there_is_one_path(
    head_dim: int, times: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    spec = QuantSpec(head_dim, 128)
    filling = random_cache([5], spec, sink=4, recent=4, dtype=torch.bfloat16)
    query = torch.zeros(1, 4, head_dim, dtype=torch.bfloat16)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"cpu|triton"):
            dispatch.decode_attention(query, filling.cache, filling.batch, sm_scale=1.0)
    assert len(told(caplog)) == times
    assert all("needs an NVIDIA GPU, the tensors are on cpu" in line for line in told(caplog))


@pytest.mark.gpu
@pytest.mark.parametrize("learned_sinks", [False, True])
@pytest.mark.parametrize("head_dim", [128, 96, 256])
def test_both_paths_are_right_in_one_workspace(
    head_dim: int, learned_sinks: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    made = random_cache(
        [1000, 3, 400], QuantSpec(head_dim, head_dim), dtype=torch.bfloat16, device="cuda"
    )
    query = torch.randn(3, 8, head_dim, device="cuda").bfloat16()
    workspace = Workspace.allocate(dispatch.decode_workspace_numel(made.cache, 8, 3), "cuda")
    sinks = torch.randn(8, device="cuda").expand(3, -1) if learned_sinks else None
    options = {"sm_scale": 0.1, "sink_logits": sinks}
    out = dispatch.decode_attention(query, made.cache, made.batch, workspace=workspace, **options)
    assert_as_good_as_torch(
        out, lambda q: reference.decode_attention(q, made.cache, made.batch, **options), [query]
    )
    assert len(told(caplog)) == (head_dim == 96)
