"""Errors of attention: the definitions against a plain loop in float64, and what must hold whatever the rows."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from attention_rows import WINDOWS, paired, plain, random_rows
from torch import Tensor

from oscar_kernels.quantizer import fake_quantize
from oscar_zoo.artifact.specs import Windows
from oscar_zoo.compute import quality
from oscar_zoo.compute.heldout import LayerRows
from oscar_zoo.compute.quality import LayerErrors, geometric_mean, layer_errors
from oscar_zoo.errors import ComputeFailed
from oscar_zoo.evaluate.cache import Side

EACH = [(0, None), (None, 0), (0, 0)]


def cached(side: Side, x: Tensor) -> Tensor:
    """Rows that went through the cache, in the model's own basis, float64."""
    stored = fake_quantize(side.rows(x), side.spec).double()
    if side.partner is not None:
        stored = stored @ side.partner.double().mT
    return stored if side.mean is None else stored + side.mean.double()


def by_hand(rows: LayerRows, windows: Windows, k: Side | None, v: Side | None) -> tuple[float, float, float]:
    """Output, logit and retrieval error, one query, head and key at a time."""
    lost, whole, logit, logits, retrieval, focus = 0.0, 0.0, 0.0, 0.0, 0.0, 0.0
    for one in rows.sequences:
        key, value = one.key.double(), one.value.double()
        k_rows, v_rows = (cached(k, one.key) if k else key), (cached(v, one.value) if v else value)
        group = one.query.shape[0] // key.shape[0]
        for n, position in enumerate(one.positions.tolist()):
            exact_heads, other_heads = [], []
            for j in range(one.query.shape[0]):
                h, q = j // group, one.query[j, n].double() * rows.scaling
                far = [s >= windows.sink and position - s >= windows.recent for s in range(position + 1)]
                exact = torch.stack([q @ key[h, s] for s in range(position + 1)])
                other = torch.stack([q @ (k_rows if far[s] else key)[h, s] for s in range(position + 1)])
                p, p_other = exact.softmax(0), other.softmax(0)
                mask = torch.tensor(far)
                weight = float(p[mask].max()) ** 2
                retrieval += weight * float((p * (p / p_other).log()).sum())
                focus += weight
                if one.even[n]:
                    noise, own = (other - exact)[mask], exact[mask]
                    logit += float(((noise - noise.mean()) ** 2).sum())
                    logits += float(((own - own.mean()) ** 2).sum())
                exact_heads.append(p @ value[h, : position + 1])
                other_heads.append(
                    sum((p_other[s] * (v_rows if far[s] else value)[h, s] for s in range(position + 1)), torch.zeros(1))
                )
            if one.even[n]:
                exact_y = rows.o_proj.double() @ torch.cat(exact_heads)
                lost += float(((rows.o_proj.double() @ torch.cat(other_heads) - exact_y) ** 2).sum())
                whole += float((exact_y**2).sum())
    return lost / whole, logit / logits, retrieval / focus


def measured(rows: LayerRows, k: Side, v: Side, windows: Windows = WINDOWS) -> LayerErrors:
    return layer_errors(0, rows, windows, ([k], [v]), EACH)


@pytest.mark.parametrize("heads", [(4, 2), (2, 2), (6, 2)])
@pytest.mark.parametrize("side", [plain, paired])
def test_errors_are_those_of_a_plain_loop(heads: tuple[int, int], side: object) -> None:
    rows = random_rows(heads=heads, lengths=(21, 17))
    k, v = side(8, clip=0.9), side(8)  # type: ignore[operator]
    found = measured(rows, k, v)
    for got, (one, other) in zip(found.output, [(k, None), (None, v), (k, v)], strict=True):
        assert got == pytest.approx(by_hand(rows, WINDOWS, one, other)[0], rel=1e-4)
    _, logit, retrieval = by_hand(rows, WINDOWS, k, None)
    assert found.logit == pytest.approx((logit,), rel=1e-4)
    assert found.retrieval == pytest.approx((retrieval,), rel=1e-3)


def test_blocks_of_queries_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = random_rows()
    whole = measured(rows, paired(8), plain(8))
    monkeypatch.setattr(quality, "SCORES_AT_ONCE", 4 * 40 * 7)
    parts = measured(rows, paired(8), plain(8))
    assert parts.output == pytest.approx(whole.output, rel=1e-5)
    assert parts.retrieval == pytest.approx(whole.retrieval, rel=1e-5)
    assert parts.focus == pytest.approx(whole.focus, rel=1e-6)


def test_rows_that_fit_the_codes_have_no_error() -> None:
    rows = random_rows(lengths=(30,))
    draw = torch.Generator().manual_seed(2)

    def coded(x: Tensor) -> Tensor:
        codes = torch.randint(0, 4, x.shape, generator=draw).float()
        codes[..., 0], codes[..., 1] = 0.0, 3.0
        return codes * 0.5 - 0.75

    one = rows.sequences[0]
    exact = LayerRows((replace(one, key=coded(one.key), value=coded(one.value)),), rows.o_proj, rows.scaling)
    found = measured(exact, plain(8), plain(8))
    assert found.output == found.logit + found.output[1:] == (0.0, 0.0, 0.0)
    assert found.retrieval == (0.0,)


def test_a_side_that_is_read_exactly_adds_nothing() -> None:
    rows = random_rows()
    assert layer_errors(0, rows, WINDOWS, ([], []), [(None, None)]).output == (0.0,)


def test_errors_fall_with_finer_groups_and_with_less_history() -> None:
    rows = random_rows(dims=(64, 64), lengths=(90, 70))
    coarse, fine = (measured(rows, plain(64, group=g), plain(64, group=g)) for g in (64, 16))
    for large, small in ((coarse.output, fine.output), (coarse.logit, fine.logit), (coarse.retrieval, fine.retrieval)):
        assert all(a > 1.2 * b for a, b in zip(large, small, strict=True))
    shorter = measured(rows, plain(64), plain(64), Windows(sink=3, recent=40))
    later = [replace(one, even=one.even & (one.positions >= 43)) for one in rows.sequences]
    same = measured(replace(rows, sequences=tuple(later)), plain(64), plain(64))
    assert all(a > b for a, b in zip(same.output, shorter.output, strict=True))


@pytest.mark.parametrize(("dims", "heads"), [((64, 64), (4, 1)), ((128, 64), (2, 2)), ((256, 256), (6, 1))])
def test_every_shape_of_head_is_measured(dims: tuple[int, int], heads: tuple[int, int]) -> None:
    rows = random_rows(dims=dims, heads=heads, lengths=(24,))
    found = measured(rows, plain(dims[0]), plain(dims[1]))
    assert all(0 < error < 1.5 for error in (*found.output, *found.logit))
    assert math.isfinite(found.retrieval[0])
    assert found.retrieval[0] > 0


@pytest.mark.parametrize("what", ["query", "key", "value"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_layer_that_is_not_finite_is_named(what: str, bad: float) -> None:
    rows = random_rows(lengths=(20,))
    one = rows.sequences[0]
    broken = getattr(one, what).clone()
    broken[0, 4, 1] = bad
    with pytest.raises(ComputeFailed, match="layer 7"):
        layer_errors(
            7,
            replace(rows, sequences=(replace(one, **{what: broken}),)),
            WINDOWS,
            ([plain(8)], [plain(8)]),
            EACH,
        )


def test_rows_without_history_are_refused() -> None:
    with pytest.raises(ComputeFailed, match="layer 3") as caught:
        layer_errors(3, random_rows(lengths=(6,)), WINDOWS, ([plain(8)], []), [(0, None)])
    assert "longer than 8 tokens" in (caught.value.hint or "")


def test_geometric_mean() -> None:
    assert geometric_mean([1.0, 4.0, 2.0]) == pytest.approx(2.0)
    assert geometric_mean([1.0, 0.0]) == 0.0
