"""Errors of attention: the definitions against a plain loop in float64, and what must hold whatever
the rows."""

import math
from dataclasses import astuple, dataclass, replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from attention_rows import WINDOWS, paired, plain, random_rows
from tiny_models import EXAMPLE
from torch import Tensor

from oscar_kernels.quantizer import fake_quantize
from oscar_zoo.artifact.specs import Clip, ServingRecipe, Windows
from oscar_zoo.compute.capture.rows import LayerRows
from oscar_zoo.compute.capture.transformers import capture
from oscar_zoo.compute.data.calibration import load_calibration
from oscar_zoo.compute.methods.base import fit
from oscar_zoo.compute.methods.table import METHODS
from oscar_zoo.compute.select.attention_errors import LayerBench
from oscar_zoo.errors import ComputeFailed
from oscar_zoo.evaluate.measure import measure
from oscar_zoo.evaluate.questions import Perplexity
from oscar_zoo.evaluate.simulated_cache import CacheSpec, Side
from oscar_zoo.models.attention import Softmax
from oscar_zoo.models.loading import load_model


def cached(side: Side, x: Tensor) -> Tensor:
    """Rows that went through the cache, in the model's own basis, float64."""
    stored = fake_quantize(side.rows(x), side.spec).double()
    if side.partner is not None:
        stored = stored @ side.partner.double().mT
    return stored if side.mean is None else stored + side.mean.double()


def capped(products: list[Tensor], rows: LayerRows) -> Tensor:
    cap = rows.softmax.cap
    logits = torch.stack(products)
    return logits if cap is None else torch.tanh(logits / cap) * cap


def weights(logits: Tensor, rows: LayerRows, head: int) -> tuple[Tensor, float]:
    """Of the rows, and of the sink of a query head."""
    if rows.softmax.sinks is None:
        return logits.softmax(0), 0.0
    whole = torch.cat([logits, rows.softmax.sinks[head : head + 1].double()]).softmax(0)
    return whole[:-1], float(whole[-1])


def by_hand(
    rows: LayerRows, windows: Windows, k: Side | None, v: Side | None, *, focused: bool = False
) -> tuple[float, float, float]:
    """Output, logit and retrieval error over one kind of queries, one query, head and key at a
    time."""
    lost, whole, logit, logits, retrieval, focus = 0.0, 0.0, 0.0, 0.0, 0.0, 0.0
    for one in rows.sequences:
        queries = one.focused if focused else one.even
        key, value = one.key.double(), one.value.double()
        k_rows, v_rows = (cached(k, one.key) if k else key), (cached(v, one.value) if v else value)
        group = queries.rows.shape[0] // key.shape[0]
        for n, position in enumerate(queries.positions.tolist()):
            seen = range(position + 1)
            far = [s >= windows.sink and position - s >= windows.recent for s in seen]
            mask = torch.tensor(far)
            exact_heads, other_heads = [], []
            for j in range(queries.rows.shape[0]):
                h, q = j // group, queries.rows[j, n].double() * rows.softmax.scaling
                exact = capped([q @ key[h, s] for s in seen], rows)
                other = capped([q @ (k_rows if far[s] else key)[h, s] for s in seen], rows)
                p, p_sink = weights(exact, rows, j)
                p_other, other_sink = weights(other, rows, j)
                weight = float(p[mask].max()) ** 2
                lost_bits = float((p * (p / p_other).log()).sum())
                if p_sink:
                    lost_bits += p_sink * math.log(p_sink / other_sink)
                retrieval += weight * lost_bits
                focus += weight
                noise, own = (other - exact)[mask], exact[mask]
                logit += float(((noise - noise.mean()) ** 2).sum())
                logits += float(((own - own.mean()) ** 2).sum())
                exact_heads.append(p @ value[h, : position + 1])
                read = [p_other[s] * (v_rows if far[s] else value)[h, s] for s in seen]
                other_heads.append(torch.stack(read).sum(0))
            exact_y = rows.o_proj.double() @ torch.cat(exact_heads)
            lost += float(((rows.o_proj.double() @ torch.cat(other_heads) - exact_y) ** 2).sum())
            whole += float((exact_y**2).sum())
    return lost / whole, logit / logits, retrieval / focus


@dataclass(frozen=True)
class Found:
    both: float
    k_only: float
    v_only: float
    logit: float
    retrieval: float


def measured(rows: LayerRows, k: Side, v: Side, windows: Windows = WINDOWS) -> Found:
    bench = LayerBench(0, rows, windows)
    both, k_only, logit = bench.caches([(k, v)])[0]
    return Found(both, k_only, bench.values([v])[0], logit, bench.retrieval([k])[0][0])


@pytest.mark.parametrize("heads", [(4, 2), (2, 2), (6, 2)])
@pytest.mark.parametrize("side", [plain, paired])
@pytest.mark.parametrize(("cap", "sinks"), [(None, False), (1.5, False), (None, True), (2.0, True)])
def test_errors_are_those_of_a_plain_loop(
    heads: tuple[int, int], side: object, cap: float | None, sinks: bool
) -> None:
    softmax = Softmax(8**-0.5, cap, torch.linspace(-1, 3, heads[0]) if sinks else None)
    rows = random_rows(heads=heads, lengths=(21, 17), softmax=softmax)
    k, v = side(8, clip=0.9), side(8)  # type: ignore[operator]
    found = measured(rows, k, v)
    assert found.both == pytest.approx(by_hand(rows, WINDOWS, k, v)[0], rel=1e-4)
    output, logit, _ = by_hand(rows, WINDOWS, k, None)
    assert (found.k_only, found.logit) == pytest.approx((output, logit), rel=1e-4)
    assert found.v_only == pytest.approx(by_hand(rows, WINDOWS, None, v)[0], rel=1e-4)
    assert found.retrieval == pytest.approx(
        by_hand(rows, WINDOWS, k, None, focused=True)[2], rel=1e-3
    )


def test_each_of_several_caches_is_measured_alone() -> None:
    rows, bench = random_rows(), LayerBench(0, random_rows(), WINDOWS)
    ks = [plain(8), paired(8), plain(8, clip=0.8)]
    vs = [paired(8, seed=2), plain(8), plain(8, clip=0.7)]
    alone = [measured(rows, k, v) for k, v in zip(ks, vs, strict=True)]
    retrieval, focus = bench.retrieval(ks)
    assert retrieval == pytest.approx([one.retrieval for one in alone])
    assert focus > 0
    assert bench.values(vs) == pytest.approx([one.v_only for one in alone])
    together = bench.caches(list(zip(ks, vs, strict=True)))
    assert [both for both, *_ in together] == pytest.approx([one.both for one in alone])


def test_rows_that_fit_the_codes_have_no_error() -> None:
    rows = random_rows(lengths=(30,))
    draw = torch.Generator().manual_seed(2)

    def coded(x: Tensor) -> Tensor:
        codes = torch.randint(0, 4, x.shape, generator=draw).float()
        codes[..., 0], codes[..., 1] = 0.0, 3.0
        return codes * 0.5 - 0.75

    one = rows.sequences[0]
    exact = LayerRows(
        (replace(one, key=coded(one.key), value=coded(one.value)),), rows.o_proj, rows.softmax
    )
    assert astuple(measured(exact, plain(8), plain(8))) == (0.0,) * 5


@pytest.mark.parametrize("what", ["query", "key", "value"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_layer_that_is_not_finite_is_named(what: str, bad: float) -> None:
    rows = random_rows(lengths=(20,))
    one = rows.sequences[0]
    spoiled = {"query": one.even.rows, "key": one.key, "value": one.value}[what]
    spoiled[0, 2 if what == "query" else 4, 1] = bad
    with pytest.raises(ComputeFailed, match="layer 7"):
        LayerBench(7, rows, WINDOWS).caches([(plain(8), plain(8))])


TEXT = EXAMPLE.parents[1] / "text"
CLIPPED = ServingRecipe(group_size=64, clip=Clip(k=0.96, v=0.92))
UNCLIPPED = ServingRecipe(group_size=64, clip=Clip(k=0, v=0))


def test_bf16_beats_oscar_beats_hadamard_beats_nothing() -> None:
    loaded = load_model(str(EXAMPLE), dtype="float32")
    data = load_calibration(TEXT / "calibration.txt", loaded.tokenizer, tokens=2048, seq_len=1024)
    moments = capture(loaded, data, needs=METHODS["oscar"].needs)
    oscar, hadamard = fit(moments, METHODS["oscar"]), fit(moments, METHODS["hadamard"])
    text = Path(TEXT / "validation.txt").read_text("utf-8")[:40_000]
    ids = torch.tensor(loaded.tokenizer(text, verbose=False)["input_ids"])
    task = Perplexity.from_tokens(ids, windows=2, length=1024, skip=320)
    caches = [
        None,
        CacheSpec(oscar.k, oscar.v, CLIPPED),
        CacheSpec(hadamard.k, hadamard.v, CLIPPED),
        CacheSpec(hadamard.k, hadamard.v, UNCLIPPED),
        CacheSpec(None, None, UNCLIPPED),
    ]
    values = [measure(loaded, task, cache).value for cache in caches]
    assert values == sorted(values), values
    assert all(worse > 1.02 * better for better, worse in pairwise(values)), values
