"""The steps before a server is ready: they touch nobody's tokens, and compile every kernel that a
prefill will need."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from cache_oracle import PlainPrefill, general_set

from oscar_kernels.decode_attention import tuning
from oscar_kernels.spec import QuantSpec
from oscar_zoo.runtime import int2_cache
from oscar_zoo.runtime.dispatch import KERNELS
from oscar_zoo.runtime.engine import CacheConfig, SlotTable, Softmax
from oscar_zoo.runtime.int2_cache import Int2Cache, steps, warm_up
from oscar_zoo.runtime.stores import SlotShape, SlotStore, WindowShape, WindowStore
from oscar_zoo.runtime.transforms import TransformTable

SUPPORT = Path(__file__).resolve().parents[1] / "support"


def test_only_the_padding_row_and_slot_zero_are_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(int2_cache, "SHORT", 4)
    heads, dim = 1, 32
    spec = QuantSpec(dim, dim, 0.9, "float16")
    slots = SlotStore(SlotShape.alike(1, 40, heads, spec, spec), "cpu")
    windows = WindowStore(WindowShape(1, 3, heads, dim, dim, 4, 8, torch.float32), "cpu")
    sets = [general_set(role, 1, heads, dim, seed=1) for role in ("k", "v")]
    table = TransformTable.build(*sets, range(1), kv_heads=range(1), device="cpu")
    config = CacheConfig((0,), 2, Softmax(0.2), 2, 20, 16, "cpu")
    source = SlotTable(torch.zeros(3, 20, dtype=torch.int32), KERNELS.pack)
    cache = Int2Cache(config, slots, windows, table, source, ops=KERNELS, prefill=PlainPrefill())
    stores = (
        slots.codes[0],
        slots.affine[0],
        windows.ring_k[0],
        windows.ring_v[0],
        windows.sink_k[0],
        windows.sink_v[0],
    )
    for store in stores:
        store.fill_(7)
    warm_up(cache)
    assert all(bool((store[1:] == 7).all()) for store in stores)
    assert not (slots.affine[0][0] == 7).all()  # it did write


def test_all_but_the_first_and_the_last_step_are_fused() -> None:
    first, *fused, last = steps()
    assert first.prefix == 0
    for step in fused:
        assert (
            step.prefix
            and step.new <= tuning.FUSED_TOKENS
            and step.requests * step.new <= int2_cache.SHORT
        )
    assert max(step.requests * step.new for step in fused) > int2_cache.SHORT * 0.95
    assert last.requests * last.new > int2_cache.SHORT


@pytest.fixture(scope="module")
def compiled() -> tuple[set[str], set[str], set[str]]:
    """What is compiled ahead, before a server is ready, and after it."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = str(SUPPORT)
    ran = subprocess.run(
        [sys.executable, str(SUPPORT / "compiled_child.py")],
        env=env,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    ahead, before, after = (set(line.split("\t")) for line in ran.stdout.splitlines())
    return ahead, before, after


def test_no_step_of_a_server_compiles_anything_after_it(
    compiled: tuple[set[str], set[str], set[str]],
) -> None:
    _, before, after = compiled
    assert len(before) < 25, "a server compiles too much before it is ready"
    assert after - before == set()


def test_a_rehearsal_finds_all_of_it_and_no_more(
    compiled: tuple[set[str], set[str], set[str]],
) -> None:
    ahead, before, _ = compiled
    assert ahead == before
