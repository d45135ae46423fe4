"""The tap sums exactly the rows of prompts, once each, and says which layer it cannot sum."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engines import needs_sglang
from sglang_forks import shared
from torch import Tensor

from oscar_zoo.artifact.specs import Clip, Geometry, ServingRecipe, Windows
from oscar_zoo.compute import estimators
from oscar_zoo.compute.capture import ranks
from oscar_zoo.compute.capture.rank_rows import OwnRows, read_rows
from oscar_zoo.compute.layer_moments import ROW_SUMS, WEIGHTED_SUMS, LayerMoments
from oscar_zoo.engines.sglang import tap
from oscar_zoo.engines.sglang.compat import geometry, radix_attention
from oscar_zoo.engines.sglang.tap_layer import LayerTap
from oscar_zoo.errors import ComputeFailed, IntegrityError, OutputExists, UnsupportedModel
from oscar_zoo.evaluate.simulated_cache import CacheSpec, SimulatedCache
from oscar_zoo.models.softmax import Softmax

Q_HEADS, KV_HEADS, DIM, V_DIM = 4, 2, 8, 4
WIDTHS = ((Q_HEADS, DIM), (KV_HEADS, DIM), (KV_HEADS, V_DIM), (Q_HEADS, V_DIM))


def rows(tokens: int, seed: int = 0) -> list[Tensor]:
    """q, k, v and o, `[tokens, heads, width]`."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(tokens, *shape, generator=generator) for shape in WIDTHS]


def new_tap(outputs: bool = True) -> LayerTap:
    return LayerTap(7, LayerMoments.zeros(KV_HEADS, DIM, V_DIM, heads=[2, 3]), Q_HEADS, outputs)


def direct_sums(blocks: Sequence[Tensor]) -> LayerMoments:
    sums = LayerMoments.zeros(KV_HEADS, DIM, V_DIM, heads=[2, 3])
    query, key, value, output = (x.transpose(0, 1) for x in blocks)
    sums.add(query, key, value, output)
    sums.add_weighted(key, value, estimators.qqt(sums))
    return sums


def assert_same(got: LayerMoments, want: LayerMoments) -> None:
    for name in (*ROW_SUMS, *WEIGHTED_SUMS):
        torch.testing.assert_close(getattr(got, name), getattr(want, name), rtol=1e-12, atol=1e-12)


def run(
    one: LayerTap, data: list[Tensor], lengths: list[int], *, flat: bool = False, padding: int = 0
) -> None:
    """Feed the rows of sequences one after the other, as a model hands them over."""
    start = 0
    for length in lengths:
        block = [x[start : start + length] for x in data]
        block = [torch.cat([x, torch.full((padding, *x.shape[1:]), 1e6)]) for x in block]
        one.observe([x.flatten(1) for x in block] if flat else block, [0], [length])
        start += length


@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize("padding", [0, 5])
def test_sums_are_those_of_the_rows_without_the_padding(flat: bool, padding: int) -> None:
    data, one = rows(30), new_tap()
    run(one, data, [10, 17, 3], flat=flat, padding=padding)
    one.weigh()
    run(one, data, [10, 17, 3], flat=flat, padding=padding)
    assert one.error is None
    assert_same(one.sums, direct_sums(data))
    report = one.report()
    assert report.lengths == report.weighted_lengths == (10, 17, 3)
    assert (report.heads, report.tokens, report.query_rows, report.output_rows) == (
        (2, 3),
        30,
        60,
        60,
    )


def test_a_prompt_may_come_in_pieces_or_with_others() -> None:
    data, one = rows(30), new_tap()
    one.observe([x[:12] for x in data], [0], [12])
    one.observe([x[12:] for x in data], [12, 0], [8, 10])
    one.weigh()
    one.observe(data, [0, 0], [20, 10])
    assert one.error is None
    assert_same(one.sums, direct_sums(data))
    assert one.report().lengths == one.report().weighted_lengths == (20, 10)


def test_outputs_are_summed_on_request_only() -> None:
    one = new_tap(outputs=False)
    run(one, rows(9), [9])
    assert one.error is None and one.report().output_rows == 0 and not one.sums.oo.any()


@pytest.mark.parametrize("prefix", [4, 11, 20])
def test_a_gap_or_a_repeated_token_ends_the_sums(prefix: int) -> None:
    data, one = rows(20), new_tap()
    one.observe([x[:10] for x in data], [0], [10])
    before = one.sums.kk.clone()
    one.observe([x[10:] for x in data], [prefix], [10])
    one.observe([x[10:] for x in data], [0], [10])
    assert isinstance(one.error, ComputeFailed)
    assert f"layer 7 got tokens from position {prefix} on, after [10] tokens" in one.error.message
    assert torch.equal(one.sums.kk, before) and one.report().tokens == 10


def test_a_cache_hit_at_the_start_of_a_prompt_is_found() -> None:
    one = new_tap()
    one.observe(rows(10), [5], [10])
    assert isinstance(one.error, ComputeFailed)


@pytest.mark.parametrize(
    ("index", "value"),
    [
        (1, None),
        (3, (torch.zeros(9, 24), torch.zeros(9))),
        (2, torch.zeros(9, 13)),
        (0, rows(3)[0]),
    ],
)
def test_attention_of_another_shape_is_refused_by_layer(index: int, value: Any) -> None:
    data: list[Any] = rows(9)
    data[index] = value
    one = new_tap()
    one.observe(data, [0], [9])
    assert isinstance(one.error, UnsupportedModel) and "layer 7" in one.error.message


def test_a_second_pass_needs_a_first() -> None:
    with pytest.raises(ComputeFailed, match="layer 7 was never reached"):
        new_tap().weigh()


def batch(tokens: int, mode: str = "EXTEND") -> Any:
    return SimpleNamespace(
        forward_mode=SimpleNamespace(name=mode),
        extend_prefix_lens_cpu=[0],
        extend_seq_lens_cpu=[tokens],
    )


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A worker that is not recording a graph; `capturing` can be changed."""
    state = SimpleNamespace(capturing=False)
    monkeypatch.setattr(radix_attention, "capturing", lambda: state.capturing)
    return state


def layer(tapped: LayerTap | None = None, **changes: Any) -> Any:
    """SGLang's module of an attention layer, as far as the tap reads it."""
    heads = {"tp_q_head_num": Q_HEADS, "tp_k_head_num": KV_HEADS, "tp_v_head_num": KV_HEADS}
    widths = {"qk_head_dim": DIM, "v_head_dim": V_DIM, "scaling": 0.3}
    plain = {"logit_cap": 0.0, "sliding_window_size": -1}
    found = SimpleNamespace(**{**heads, **widths, **plain, **changes})
    if tapped is not None:
        found.oscar_tap = tapped
    return found


def call(layer: Any, data: list[Tensor], forward_batch: Any, **kwargs: Any) -> Any:
    """Attention of a layer whose result is o."""
    return tap.attention(lambda *_, **__: data[3], layer, *data[:3], forward_batch, **kwargs)


def test_the_hook_returns_what_attention_returns(eager: SimpleNamespace) -> None:
    data = rows(5)
    assert call(layer(), data, batch(5)) is data[3]
    one = layer(new_tap())
    assert call(one, data, batch(5), save_kv_cache=False, sinks=None) is data[3]
    assert one.oscar_tap.report().lengths == (5,)


@pytest.mark.parametrize("changes", [{"logit_cap": 0.5}, {"sliding_window_size": 2}, {}])
def test_a_cpu_computes_caps_windows_and_sinks_here(
    eager: SimpleNamespace, changes: dict[str, Any]
) -> None:
    """SGLang's backend of a CPU knows no cap and no sinks: its result is not asked for."""
    data, one = rows(7), layer(new_tap(), **changes)
    sinks = None if changes else torch.tensor([0.5, -1.0, 2.0, 0.0])
    found = call(one, data, batch(7), sinks=sinks)
    query, key, value = (x.transpose(0, 1).double() for x in data[:3])
    logits = 0.3 * query @ key.repeat_interleave(2, 0).mT
    if "logit_cap" in changes:
        logits = 0.5 * (logits / 0.5).tanh()
    places = torch.arange(7)
    seen = (places <= places[:, None]) & (
        places >= places[:, None] - changes.get("sliding_window_size", 7)
    )
    logits = logits.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        column = sinks.double()[:, None, None].expand(-1, 7, 1)
        weights = torch.cat([logits, column], -1).softmax(-1)[..., :-1]
    else:
        weights = logits.softmax(-1)
    wanted = (weights @ value.repeat_interleave(2, 0)).transpose(0, 1).flatten(1)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-6)
    assert one.oscar_tap.error is None
    torch.testing.assert_close(
        one.oscar_tap.sums.oo[0].tril(),
        sum(x.T @ x for x in wanted.unflatten(1, (Q_HEADS, -1)).unbind(1)[:2]).tril(),
        rtol=1e-5,
        atol=1e-5,
    )


def test_rows_of_a_whole_sequence_are_kept_for_the_parent(
    eager: SimpleNamespace, tmp_path: Path
) -> None:
    """Two ranks with heads of their own, joined."""
    sinks = [torch.tensor([0.1, 0.2, 0.3, 0.4]), torch.tensor([0.5, 0.6, 0.7, 0.8])]
    parts = [rows(6, seed) for seed in (0, 1)]
    for rank, (data, own) in enumerate(zip(parts, sinks, strict=True)):
        one = new_tap()
        one.summing = False
        q_heads = range(4 * rank, 4 * rank + 4)
        one.keep = OwnRows(tmp_path, f"tp{rank}", q_heads, [2 * rank, 2 * rank + 1]).write
        call(layer(one, logit_cap=9.0), data, batch(6), sinks=own)
        assert one.error is None and one.report().lengths == ()
    found = read_rows(tmp_path, 7)
    assert found.query is not None
    for place, name in enumerate(("query", "key", "value")):
        wanted = torch.cat([data[place] for data in parts], 1).transpose(0, 1)
        assert torch.equal(getattr(found, name), wanted)
    assert (found.softmax.scaling, found.softmax.cap) == (0.3, 9.0)
    assert found.softmax.sinks is not None
    assert torch.equal(found.softmax.sinks, torch.cat(sinks))
    (tmp_path / "layer-0007.tp0").unlink()
    with pytest.raises(ComputeFailed, match="layer 7 has sinks rows of heads"):
        read_rows(tmp_path, 7)


@pytest.mark.parametrize("lengths", [[4, 2], [6]])
def test_rows_of_pieces_or_several_sequences_are_not_kept(
    tmp_path: Path, lengths: list[int]
) -> None:
    one = new_tap()
    one.summing, one.keep = False, OwnRows(tmp_path, "tp0", range(4), [2, 3]).write
    one.observe(rows(6), [0] * (len(lengths) - 1) + [5], lengths, lambda: Softmax(0.3))
    assert isinstance(one.error, ComputeFailed) and not list(tmp_path.iterdir())


@pytest.mark.parametrize("padding", [0, 3])
def test_a_cache_stands_in_the_place_of_attention(eager: SimpleNamespace, padding: int) -> None:
    recipe = ServingRecipe(group_size=2, clip=Clip(k=0.9, v=0.9), windows=Windows(sink=2, recent=3))
    shape = Geometry(
        num_layers=8,
        num_q_heads=Q_HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=DIM,
        v_head_dim=V_DIM,
        attention_layers=(7,),
    )
    cache = SimulatedCache(CacheSpec(None, None, recipe), shape, torch.device("cpu"))
    data, one = rows(12), layer(new_tap())
    one.oscar_tap.cache, one.oscar_tap.summing = cache, False
    wide = [torch.nn.functional.pad(x, (0, 0, 0, 0, 0, padding)) for x in data]
    found = call(one, wide, batch(12))
    query, key, value = (x.transpose(0, 1)[None] for x in data[:3])
    wanted = cache(7, query, key, value, Softmax(0.3))[0].transpose(0, 1).flatten(1)
    assert found.shape == (12 + padding, Q_HEADS * V_DIM)
    assert torch.equal(found[:12], wanted)
    assert one.oscar_tap.error is None and one.oscar_tap.report().lengths == ()


@pytest.mark.parametrize("mode", ["DECODE", "IDLE", "MIXED", "TARGET_VERIFY"])
def test_only_prefill_is_summed(eager: SimpleNamespace, mode: str) -> None:
    one = layer(new_tap())
    call(one, rows(5), batch(5, mode))
    assert one.oscar_tap.report().lengths == ()


def test_a_recorded_graph_is_not_summed(eager: SimpleNamespace) -> None:
    one = layer(new_tap())
    eager.capturing = True
    call(one, rows(5), batch(5))
    assert one.oscar_tap.report().lengths == ()


def test_attention_that_is_more_than_softmax_is_refused(eager: SimpleNamespace) -> None:
    one = layer(new_tap())
    call(one, rows(5), batch(5), k_rope=torch.zeros(4))
    assert isinstance(one.oscar_tap.error, UnsupportedModel)
    assert "layer 7 takes k_rope" in one.oscar_tap.error.message
    assert one.oscar_tap.report().lengths == ()


def test_a_failure_is_raised_by_the_next_call_and_left_for_the_parent(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    one = new_tap()
    one.observe(rows(10), [5], [10])
    monkeypatch.setattr(
        radix_attention, "attention_layers", lambda _: [SimpleNamespace(oscar_tap=one)]
    )
    monkeypatch.setattr(geometry, "rank_name", lambda: "pp0-tp1")
    scheduler = SimpleNamespace(tp_worker=SimpleNamespace(model_runner=SimpleNamespace(model=None)))
    for step, options in (("check", {}), ("weigh", {}), ("save", {"place": str(tmp_path)})):
        with pytest.raises(ComputeFailed, match="from position 5"):
            tap.METHODS[f"oscar_tap_{step}"](scheduler, str(tmp_path), **options)
    with pytest.raises(ComputeFailed, match="from position 5"):
        ranks.raise_failure(tmp_path)


LENGTHS = [4, 9]


@dataclass
class Worker:
    """A scheduler of one layer, as the methods of the tap see it."""

    tap: LayerTap
    weight: Tensor = field(default_factory=lambda: torch.ones(3, 5))

    def call(self, monkeypatch: pytest.MonkeyPatch, step: str, place: Path) -> None:
        config = SimpleNamespace(
            dtype=torch.float32,
            num_hidden_layers=8,
            num_attention_heads=8,
            get_total_num_kv_heads=lambda: 4,
            head_dim=DIM,
            v_head_dim=V_DIM,
        )
        model = SimpleNamespace(parameters=lambda: iter([self.weight]))
        monkeypatch.setattr(
            radix_attention, "attention_layers", lambda _: [SimpleNamespace(oscar_tap=self.tap)]
        )
        monkeypatch.setattr(geometry, "rank_name", lambda: "pp0-tp1")
        runner = SimpleNamespace(model=model, model_config=config)
        scheduler = SimpleNamespace(tp_worker=SimpleNamespace(model_runner=runner))
        place.mkdir(exist_ok=True)
        tap.METHODS[f"oscar_tap_{step}"](scheduler, str(place.parent), place=str(place))


@pytest.mark.parametrize("stopped", ["in the first pass", "between", "in the second pass"])
def test_a_worker_goes_on_with_the_same_bits(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, stopped: str
) -> None:
    data = rows(sum(LENGTHS))
    parts = ([x[:4] for x in data], [4]), ([x[4:] for x in data], [9])
    one, other = Worker(new_tap()), Worker(new_tap())
    steps = [*parts, None, *parts]  # None begins the second pass
    done = {"in the first pass": 1, "between": 2, "in the second pass": 4}[stopped]

    def do(worker: Worker, some: Sequence[Any]) -> None:
        for step in some:
            worker.tap.weigh() if step is None else run(worker.tap, *step)

    do(one, steps[:done])
    one.call(monkeypatch, "save", tmp_path / "sums-1")
    other.call(monkeypatch, "load", tmp_path / "sums-1")
    do(one, steps[done:])
    do(other, [*([None] if stopped == "in the second pass" else []), *steps[done:]])
    assert other.tap.report() == one.tap.report()
    assert other.tap.report().weighted_lengths == tuple(LENGTHS)
    for name in (*ROW_SUMS, *WEIGHTED_SUMS):
        assert torch.equal(getattr(other.tap.sums, name), getattr(one.tap.sums, name)), name


def test_a_worker_goes_on_only_with_its_own_weights_and_heads(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    one = Worker(new_tap())
    run(one.tap, rows(4), [4])
    one.call(monkeypatch, "save", tmp_path / "sums-1")
    other = Worker(new_tap(), weight=torch.full((3, 5), 2.0))
    with pytest.raises(OutputExists, match="a capture with weights"):
        other.call(monkeypatch, "load", tmp_path / "sums-1")
    heads = Worker(
        LayerTap(7, LayerMoments.zeros(KV_HEADS, DIM, V_DIM, heads=[0, 1]), Q_HEADS, True)
    )
    with pytest.raises(IntegrityError, match="other layers or heads"):
        heads.call(monkeypatch, "load", tmp_path / "sums-1")
    (tmp_path / "sums-1/pp0-tp1/layer-0007.safetensors").unlink()
    with pytest.raises(IntegrityError, match="left no sums in layer-0007"):
        one.call(monkeypatch, "load", tmp_path / "sums-1")


def test_sums_that_are_not_finite_are_not_saved(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    one, data = Worker(new_tap()), rows(4)
    data[1][2, 0, 0] = torch.nan
    run(one.tap, data, [4])
    with pytest.raises(ComputeFailed, match="layer 7: kk has NaN"):
        one.call(monkeypatch, "save", tmp_path / "sums-1")
    assert not list((tmp_path / "sums-1").iterdir())


@pytest.fixture(scope="module")
def child(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What `tap_child` found in a process that was not asked for a tap."""
    out = tmp_path_factory.mktemp("tap") / "out.json"
    log = out.with_suffix(".log")
    assert shared().call("tap_child:try_layers", out.parent, log, out=str(out)) == 0, (
        log.read_text()[-4000:]
    )
    found: dict[str, Any] = json.loads(out.read_text())
    return found


@pytest.mark.sglang
@needs_sglang
def test_nothing_is_installed_unless_the_environment_asks(child: dict[str, Any]) -> None:
    assert ranks.VARIABLE not in os.environ
    assert (child["hooked"], child["methods"]) == (False, [])


@pytest.mark.sglang
@needs_sglang
@pytest.mark.parametrize(
    ("case", "text"),
    [
        ("mla", "unsupported.model: MLA does not work with an INT2 KV cache"),
        ("window", "unsupported.model: layer 1: sliding_window_size does not work"),
        ("twice", "unsupported.model: one decoder layer has several attention layers"),
        (
            "cache",
            "compute: the KV cache holds torch.float8_e4m3fn, the model computes in torch.bfloat16",
        ),
        ("o_proj", "layer 5: 0 linear layers of ModuleList could be o_proj"),
    ],
)
def test_what_cannot_be_calibrated_is_refused_by_name(
    child: dict[str, Any], case: str, text: str
) -> None:
    assert text in child["refused"][case]
