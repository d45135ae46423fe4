"""The steps before a server is ready: they touch nobody's tokens, and compile every kernel that a
prefill will need."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

from cache_oracle import PlainPrefill
from small_caches import CacheShape

from oscar_kernels.decode_attention import tuning
from oscar_zoo.runtime import int2_cache
from oscar_zoo.runtime.dispatch import KERNELS
from oscar_zoo.runtime.int2_cache import steps, warm_up

STORES = ("codes", "affine", "ring_k", "ring_v", "sink_k", "sink_v")
SUPPORT = Path(__file__).resolve().parents[1] / "support"


def test_only_the_padding_row_and_slot_zero_are_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(int2_cache, "SHORT", 4)
    shape = CacheShape(heads=1, rows=3, slots=40, longest=20, piece=16)
    cache = shape.cache(KERNELS, shape.table(), shape.slot_table(), PlainPrefill())
    layer = cache.caches[0]
    stores = [getattr(layer, name) for name in STORES]
    for store in stores:
        store.fill_(7)
    warm_up(cache)
    assert all(bool((store[1:] == 7).all()) for store in stores)
    assert not (layer.affine[0] == 7).all()  # it did write


def test_all_but_the_first_and_the_last_step_are_fused() -> None:
    first, *fused, (most, _, longest) = steps()
    assert first[1] == 0 and most * longest > int2_cache.SHORT
    for requests, prefix, new in fused:
        assert prefix and new <= tuning.FUSED_TOKENS and requests * new <= int2_cache.SHORT
    assert max(requests * new for requests, _, new in fused) > int2_cache.SHORT * 0.95


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


def test_no_later_step_of_a_server_compiles(compiled: tuple[set[str], set[str], set[str]]) -> None:
    _, before, after = compiled
    assert len(before) < 25, "a server compiles too much before it is ready"
    assert after - before == set()


def test_a_rehearsal_finds_exactly_all_of_it(compiled: tuple[set[str], set[str], set[str]]) -> None:
    ahead, before, _ = compiled
    assert ahead == before
