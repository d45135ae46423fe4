"""Calibration through stock SGLang: the sums of one process, of two ranks, and of ranks that share
a KV head.

What tensor parallelism can promise: the sums of all ranks together are those of the rows that the
ranks saw, to 1e-10 and better. The rows themselves are those of one process only as far as the
engine's arithmetic goes: o_proj and down_proj add their halves in another order, so from the second
layer on rows differ by float32 rounding, and sums by about 1e-7. The model of `write_exact_model`
has weights for which these additions do not round: on it, two ranks must give the sums of one
process to 1e-10 in every layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import sglang_forks
import torch
from architectures import write_architecture
from capture_models import first, softmax_attention
from capture_runs import LENGTHS, Captured, Measured, Run, forked, prompts
from engines import needs_sglang
from random_qwen3 import write_model
from tap_child import recorded_rows, site_for_shared_heads, write_exact_model
from torch import Tensor

from oscar_zoo.artifact.specs import Geometry
from oscar_zoo.compute import estimators
from oscar_zoo.compute.capture.engine import discard
from oscar_zoo.compute.capture.running import InProcess
from oscar_zoo.compute.layer_moments import ROW_SUMS, WEIGHTED_SUMS, LayerMoments
from oscar_zoo.compute.moments import Moments
from oscar_zoo.models.attention import attention_scope
from oscar_zoo.models.loading import load_model
from oscar_zoo.models.softmax import Softmax

# An engine starts in 15 to 25 seconds on two idle cores, and in minutes on busy ones.
pytestmark = [pytest.mark.sglang, pytest.mark.timeout(900), needs_sglang]

SUMS = (*ROW_SUMS, *WEIGHTED_SUMS, "wo")
FAMILIES = {"gemma3_text": 1e-5, "lfm2": 1e-5, "gpt_oss": 1e-4}
"""Windows, a convolution, and windows beside learned sinks; and how far sums may be from those of
transformers. SGLang keeps the sinks of gpt-oss in bfloat16."""
WIDE = "gemma4"
"""Heads of two widths, in a model with images. SGLang counts its positions from 1."""


@dataclass(frozen=True)
class Runs:
    """All captures of this module; `one` as users run it, beside the others, which are forked."""

    by_name: dict[str, Run]
    results: dict[str, Future[Captured]]
    rows: Path

    def moments(self, name: str) -> Moments:
        return self.results[name].result().moments


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    folder = tmp_path_factory.mktemp("captures")
    exact = write_exact_model(folder / "exact")
    shared = write_model(folder / "shared", kv_heads=1)
    site = site_for_shared_heads(folder / "site", folder / "rows")
    by_name = {name: Run(str(exact), str(folder / name)) for name in ("killed", "one")}
    by_name["two"] = Run(str(exact), str(folder / "two"), 2, measure=True)
    by_name["triton"] = Run(
        str(exact), str(folder / "triton"), flags=("--attention-backend=triton",)
    )
    for family in FAMILIES:
        model = write_architecture(family, folder / f"{family}-model", dtype="float32")
        by_name[family] = Run(str(model), str(folder / family), measure=True)
    wide = write_architecture(WIDE, folder / f"{WIDE}-model", dtype="float32")
    by_name[WIDE] = Run(str(wide), str(folder / WIDE))
    by_name["shared"] = Run(str(shared), str(folder / "of-shared"), 2, str(site))
    for run in by_name.values():
        Path(run.work).mkdir()
    with ThreadPoolExecutor(1) as pool, ThreadPoolExecutor(1) as other:
        results = {"one": other.submit(by_name["one"].here)}
        others = [(name, ()) for name in ("two", "shared", "triton", WIDE, *FAMILIES)]
        for name, kills in (("killed", (1, 2)), *others):
            results[name] = pool.submit(forked, by_name[name], kills)
        yield Runs(by_name, results, folder / "rows")
        pool.shutdown(wait=False, cancel_futures=True)
        sglang_forks.shared().kill()


def transformers_sums(model: Path, start: int = 0) -> dict[int, LayerMoments]:
    """The same sums from transformers, with attention in float64 and positions from `start` on."""
    loaded = load_model(str(model), dtype="float32")
    sums, calls = {}, []
    for layer in loaded.block.attention_layers:
        sums[layer] = LayerMoments.zeros(
            loaded.block.num_kv_heads, loaded.block.head_dim, loaded.block.v_head_dim
        )
        module = loaded.model.get_decoder().layers[layer].self_attn
        sums[layer].set_weights(first(module, "o_proj", "out_proj").weight.detach())

    def seen(layer: int, query: Tensor, key: Tensor, value: Tensor, softmax: Softmax) -> Tensor:
        output = softmax_attention(query[0], key[0], value[0], softmax).to(query.dtype)
        sums[layer].add(query[0], key[0], value[0], output)
        calls.append((layer, key[0], value[0]))
        return output[None]

    with torch.inference_mode(), attention_scope(loaded, seen):
        for ids in prompts():
            places = torch.arange(start, start + len(ids))[None]
            loaded.model.base_model(
                input_ids=torch.tensor([ids]), position_ids=places, use_cache=False
            )
        for layer, key, value in calls:
            sums[layer].add_weighted(key, value, estimators.qqt(sums[layer]))
    return sums


def assert_close(
    got: LayerMoments, want: LayerMoments, relative: float, names: tuple[str, ...] = SUMS
) -> None:
    """Every sum, relative to its largest entry."""
    for name in names:
        one, other = getattr(got, name), getattr(want, name)
        error = float((one - other).abs().max() / other.abs().max())
        assert error <= relative, f"{name} differs by {error:.1e}"
    counts = ("tokens", "query_rows", "output_rows", "weighted_tokens")
    assert [getattr(got, name) for name in counts] == [getattr(want, name) for name in counts]


@pytest.mark.parametrize(("name", "relative"), [("one", 1e-5), ("shared", 1e-5), *FAMILIES.items()])
def test_sums_are_those_of_transformers(runs: Runs, name: str, relative: float) -> None:
    """Two engines with kernels of their own, in float32. Of hybrids, the full-attention layers."""
    wanted = transformers_sums(Path(runs.by_name[name].model))
    got = runs.moments(name)
    assert got.layers.keys() == wanted.keys()
    for layer, sums in wanted.items():
        assert_close(got.layers[layer], sums, relative)


def test_sums_of_heads_of_two_widths_are_those_of_transformers(runs: Runs) -> None:
    wanted = transformers_sums(Path(runs.by_name[WIDE].model), start=1)
    got = runs.moments(WIDE)
    assert runs.results[WIDE].result().facts.geometry.head_dims == (128, 128)
    assert got.layers.keys() == wanted.keys() == {1, 3}
    for layer, sums in wanted.items():
        assert_close(got.layers[layer], sums, 1e-5)


@pytest.mark.parametrize(("name", "relative"), [("two", 1e-5), *FAMILIES.items()])
def test_what_is_measured_is_what_transformers_measures(
    runs: Runs, name: str, relative: float
) -> None:
    """The perplexity without a cache, with INT2, and without one again; rows, o_proj and softmax.
    INT2 rounds a few rows the other way where the engines differ in the last bits."""
    got = runs.results[name].result().measured
    wanted = Measured.of(InProcess(load_model(runs.by_name[name].model, dtype="float32")))
    assert got is not None
    assert got.perplexities[0] == got.perplexities[2]
    assert got.perplexities[0] == pytest.approx(wanted.perplexities[0], rel=1e-4)
    assert got.perplexities[1] == pytest.approx(wanted.perplexities[1], rel=2e-3)
    assert got.perplexities[1] != pytest.approx(got.perplexities[0], rel=4e-3)
    mine, theirs = got.rows, wanted.rows
    assert (mine.softmax.scaling, mine.softmax.cap) == pytest.approx(
        (theirs.softmax.scaling, theirs.softmax.cap)
    )
    assert (mine.softmax.sinks is None) is (theirs.softmax.sinks is None)
    if mine.softmax.sinks is not None:  # which SGLang keeps in bfloat16
        torch.testing.assert_close(mine.softmax.sinks, theirs.softmax.sinks, rtol=4e-3, atol=0)
    pairs = [(mine.o_proj, theirs.o_proj)]
    for one, other in zip(mine.sequences, theirs.sequences, strict=True):
        pairs += [(getattr(one, side), getattr(other, side)) for side in ("key", "value")]
        pairs += [(one.even.rows, other.even.rows), (one.focused.rows, other.focused.rows)]
    for ours, want in pairs:
        assert float((ours - want).abs().max() / want.abs().max()) < 10 * relative


def test_two_ranks_give_the_sums_of_one_process(runs: Runs) -> None:
    one, two = runs.moments("one"), runs.moments("two")
    assert two.layers.keys() == one.layers.keys() == {0, 1, 2, 3}
    for layer, sums in one.layers.items():
        assert two.layers[layer].heads == (0, 1)
        assert_close(two.layers[layer], sums, 1e-10)


def test_sums_do_not_depend_on_the_attention_backend(runs: Runs) -> None:
    """Taps get rows before a backend does. Its rounding reaches its outputs and later layers."""
    usual, other = runs.moments("one"), runs.moments("triton")
    assert not torch.equal(other.layers[0].oo, usual.layers[0].oo)  # it did run
    before = tuple(name for name in SUMS if name != "oo")
    assert_close(other.layers[0], usual.layers[0], 0.0, before)
    for layer, sums in usual.layers.items():
        assert_close(other.layers[layer], sums, 1e-6)


def test_ranks_that_share_a_kv_head_give_the_sums_of_all_their_rows(runs: Runs) -> None:
    """One KV head on both ranks, which hold different query heads; both passes of the weighted sums
    see all of them."""
    got = runs.moments("shared")
    seen: dict[int, list[Any]] = {0: [], 1: []}
    for layer, rows in recorded_rows(runs.rows, len(seen)):
        seen[layer].append(rows)
    for layer, calls in seen.items():
        assert len(calls) == 2 * len(LENGTHS)
        first, second = calls[: len(LENGTHS)], calls[len(LENGTHS) :]
        query, output = (
            torch.cat(
                [
                    torch.cat([a[name], b[name]]).double()
                    for a, b in zip(first, second, strict=True)
                ],
                1,
            )
            for name in ("query", "output")
        )
        assert query.shape == (4, sum(LENGTHS), 16)
        for a, b in zip(first, second, strict=True):
            assert torch.equal(a["key"], b["key"]) and torch.equal(a["value"], b["value"])
            assert not torch.equal(a["query"], b["query"])
        key, value = (torch.cat([a[name][0] for a in first]).double() for name in ("key", "value"))
        qq, oo = (torch.einsum("jti,jtk->ik", x, x) for x in (query, output))
        weight = torch.einsum("ti,ik,tk->t", key, qq / query[..., 0].numel(), key)
        want = {
            "qq": qq,
            "oo": oo,
            "kk": key.T @ key,
            "vv": value.T @ value,
            "k_sum": key.sum(0),
            "v_sum": value.sum(0),
            "sst_num": torch.einsum("t,ti,tk->ik", weight, value, value),
            "sst_den": weight.sum(),
        }
        for name, matrix in want.items():
            error = (getattr(got.layers[layer], name)[0] - matrix).abs().max() / matrix.abs().max()
            assert error <= 1e-10, f"layer {layer}: {name} differs by {error:.1e}"


def test_a_capture_killed_in_each_pass_ends_with_the_same_bits(runs: Runs) -> None:
    got, wanted = runs.moments("killed"), runs.moments("one")
    for layer, sums in wanted.layers.items():
        assert_close(got.layers[layer], sums, 0.0)
    done, total, where = runs.results["killed"].result().progress[0]
    assert done == (sum(LENGTHS) + LENGTHS[0]) // 2
    assert (total, where) == (sum(LENGTHS), "engine start")


def test_facts_say_how_it_was_done(runs: Runs) -> None:
    facts = runs.results["two"].result().facts
    assert facts.tensor_parallel == 2
    assert facts.geometry == Geometry(
        num_layers=4,
        num_q_heads=4,
        num_kv_heads=2,
        head_dim=64,
        v_head_dim=64,
        attention_layers=(0, 1, 2, 3),
    )
    numerics = facts.numerics
    assert (numerics.forward_dtype, numerics.accumulate, numerics.device) == (
        "float32",
        "float64",
        "cpu",
    )
    assert numerics.engine.name == "sglang" and numerics.engine.version


def test_progress_counts_both_passes(runs: Runs) -> None:
    runs.moments("one")
    total = sum(LENGTHS)
    done = [0, *(int(sum(LENGTHS[:n]) + p * total) // 2 for p in (0, 1) for n in (1, 2, 3))]
    phases = ["engine start", *["pass 1 of 2"] * 3, *["pass 2 of 2"] * 3]
    assert runs.results["one"].result().progress == [
        (n, total, phase) for n, phase in zip(done, phases, strict=True)
    ]


def test_nothing_is_left_behind(runs: Runs) -> None:
    for name, run in runs.by_name.items():
        runs.moments(name)
        private = Path(run.work)
        discard(private)
        assert not (private / "ranks").exists()
        assert not list(private.glob(".tmp.*"))
