"""WUSH against the formulas of its paper, and against what they promise."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from random_moments import GROUP, MODEL, layer_rows, random_moments

from oscar_zoo.artifact.formats import hadamard
from oscar_zoo.compute.methods import wush
from oscar_zoo.errors import ComputeFailed

Matrix = NDArray[np.float64]
SIDES = ("k", "v")


def gram_and_hessian(side: str, layer: int, head: int) -> tuple[Matrix, Matrix]:
    """M and Hs straight from the rows: sums over tokens, because scales do not matter."""
    rows = layer_rows(layer)
    heads = range(head * GROUP, (head + 1) * GROUP)
    if side == "k":
        key = rows.key[head]
        return key.T @ key, 2 * np.sum([rows.query[j].T @ rows.query[j] for j in heads], axis=0)
    value, dv = rows.value[head], MODEL.v_head_dim
    blocks = [rows.weights[:, j * dv : (j + 1) * dv] for j in heads]
    return value.T @ value, 2 * np.sum([w.T @ w for w in blocks], axis=0)


def column_form(gram: Matrix, hessian: Matrix, gamma: float) -> tuple[Matrix, Matrix]:
    """T for columns, and lambda: eigenvectors have a positive largest entry; the last meets the
    constant row of H."""
    d = len(gram)
    lower = np.linalg.cholesky(hessian + gamma * np.diag(np.diag(hessian)))
    values, vectors = np.linalg.eigh(lower.T @ (gram + gamma * np.diag(np.diag(gram))) @ lower)
    vectors = vectors * np.sign(vectors[np.abs(vectors).argmax(0), np.arange(d)])
    c = np.sqrt((1 + gamma) * np.trace(gram) / np.sqrt(values).sum())
    return c * hadamard(d)[:, ::-1] @ np.diag(values**-0.25) @ vectors.T @ lower.T, values


def random_pair(d: int, seed: int, spread: float = 1.5) -> tuple[Matrix, Matrix]:
    draw = np.random.default_rng(seed)
    found = []
    for _ in range(2):
        rows = draw.standard_normal((4 * d, d)) * np.exp(spread * draw.standard_normal(d))
        rows = rows @ np.linalg.qr(draw.standard_normal((d, d)))[0]
        found.append(rows.T @ rows / len(rows))
    return found[0], found[1]


def one(gram: Matrix, hessian: Matrix, **damping: object) -> tuple[Matrix, Matrix, Matrix]:
    """`wush.transform` of a single head."""
    found = wush.transform(torch.from_numpy(gram)[None], torch.from_numpy(hessian)[None], **damping)  # type: ignore[arg-type]
    return tuple(x[0].numpy() for x in found)  # type: ignore[return-value]


def loss(gram: Matrix, hessian: Matrix, forward: Matrix, partner: Matrix) -> float:
    """tr(T M T^T) tr(T^-T Hs T^-1), T^T = forward, T^-1 = partner."""
    return float(np.trace(forward.T @ gram @ forward) * np.trace(partner.T @ hessian @ partner))


def bound(gram: Matrix, hessian: Matrix) -> float:
    """(sum sigma)^2 with the singular values of M^(1/2) Hs^(1/2)."""
    roots = []
    for matrix in (gram, hessian):
        values, vectors = np.linalg.eigh(matrix)
        roots.append(vectors * np.sqrt(values.clip(0)) @ vectors.T)
    return float(np.linalg.svd(roots[0] @ roots[1], compute_uv=False).sum() ** 2)


@pytest.mark.parametrize("side", SIDES)
def test_files_hold_the_formulas(side: str) -> None:
    pair = wush.fit(random_moments())
    found = pair.k if side == "k" else pair.v
    assert (found.format_version, found.grouping, found.objective) == (3, "kv_head", f"wush_{side}")
    assert (found.transform, found.role, found.layer_ids) == ("wush", side, (0, 2))
    assert not (found.orthogonal or found.centered)
    scale = 1 / layer_rows(0).key.shape[1] if side == "k" else 1
    for layer in found.layers:
        for head in range(MODEL.num_kv_heads):
            gram, hessian = gram_and_hessian(side, layer.layer_id, head)
            want, values = column_form(gram * scale, hessian * scale, 1e-2)
            got = one(gram, hessian, gamma=1e-2)
            assert np.abs(got[0] - want.T).max() <= 1e-9 * np.abs(want).max()
            assert np.abs(got[1] - np.linalg.inv(want)).max() <= 1e-9 * np.abs(got[1]).max()
            assert layer.eigenvalues is not None
            pairs = (
                (layer.forward, want.T, 1e-7),
                (layer.partner, np.linalg.inv(want), 1e-6),
            )  # see `as_stored`
            for stored, exact, limit in pairs:
                assert np.abs(stored[head] - exact).max() <= limit * np.abs(exact).max()
            if side == "k":  # the values' Hessian has no tokens to average over
                assert layer.eigenvalues[head] == pytest.approx(values, rel=1e-6)


@settings(deadline=None, max_examples=15)
@given(
    d=st.sampled_from([2, 8, 64]),
    seed=st.integers(0, 1000),
    gamma=st.sampled_from([0.0, 1e-3, 1e-2]),
)
def test_transform_and_partner_are_inverse_and_keep_logits(d: int, seed: int, gamma: float) -> None:
    forward, partner, values = one(*random_pair(d, seed), gamma=gamma)
    assert np.abs(forward @ partner.T - np.eye(d)).max() < 1e-10
    assert (np.diff(values) >= 0).all()
    query, key = np.random.default_rng(seed).standard_normal((2, 5, d))
    assert (query @ partner) @ (key @ forward).T == pytest.approx(query @ key.T, abs=1e-9)


@settings(deadline=None, max_examples=15)
@given(d=st.sampled_from([2, 8, 64]), seed=st.integers(0, 1000))
def test_without_damping_no_transform_costs_less(d: int, seed: int) -> None:
    gram, hessian = random_pair(d, seed)
    forward, partner, _ = one(gram, hessian, gamma=0)
    least = bound(gram, hessian)
    assert loss(gram, hessian, forward, partner) == pytest.approx(least, rel=1e-9)
    for product in (forward.T @ gram @ forward, partner.T @ hessian @ partner):
        assert np.diag(product) == pytest.approx(np.full(d, np.trace(product) / d), rel=1e-7)
    other = np.random.default_rng(seed).standard_normal((d, d))
    assert loss(gram, hessian, other, np.linalg.inv(other).T) >= least * (1 - 1e-9)
    assert loss(gram, hessian, np.eye(d), np.eye(d)) >= least * (1 - 1e-9)
    gain = float(wush.headroom(torch.from_numpy(gram)[None], torch.from_numpy(hessian)[None])[0])
    assert gain == pytest.approx(np.trace(gram) * np.trace(hessian) / least, rel=1e-4)


def stored_rows(gram: Matrix, hessian: Matrix, scales: Matrix, gamma: float) -> Matrix:
    """Rows before H, of unit size and with positive first entries, of the same function in rescaled
    channels."""
    keys = np.random.default_rng(0).standard_normal((6, len(gram))) * scales
    scaled = gram * np.outer(scales, scales), hessian / np.outer(scales, scales)
    rows = keys @ one(*scaled, gamma=gamma)[0] @ hadamard(len(gram))
    return np.asarray(rows * np.sign(rows[0]) / np.linalg.norm(rows))


@settings(deadline=None, max_examples=10)
@given(seed=st.integers(0, 100), gamma=st.sampled_from([0.0, 1e-2, 0.3]))
def test_rescaled_channels_store_the_same_rows_as_before(seed: int, gamma: float) -> None:
    gram, hessian = random_pair(8, seed)
    scales = np.exp(2 * np.random.default_rng(seed).standard_normal(8))
    plain = stored_rows(gram, hessian, np.ones(8), gamma)
    assert stored_rows(gram, hessian, scales, gamma) == pytest.approx(plain, rel=1e-6, abs=1e-6)


def test_rounding_error_is_that_of_the_rows() -> None:
    gram, hessian = random_pair(16, 5)
    forward, partner, _ = one(gram, hessian)
    draw = np.random.default_rng(6)
    keys, queries = draw.standard_normal((40, 16)), draw.standard_normal((30, 16))
    copies = [torch.from_numpy(x).bfloat16().double().numpy() for x in (forward, partner)]
    exact = queries @ keys.T
    error = (queries @ copies[1]) @ (keys @ copies[0]).T - exact
    matrices = [
        torch.from_numpy(x)[None] for x in (forward, partner, keys.T @ keys, queries.T @ queries)
    ]
    got = float(wush.rounding_error(*matrices)[0])
    assert got == pytest.approx(np.linalg.norm(error) / np.linalg.norm(exact), rel=1e-9)
    assert 1e-4 < got < 1e-2


@given(seed=st.integers(0, 1000))
@settings(max_examples=10, deadline=None)
def test_what_is_stored_is_inverse_where_plain_rounding_is_not(seed: int) -> None:
    """Channels of very different size, as of a model with outliers: rows of `forward` go with one
    over that."""
    draw = torch.Generator().manual_seed(seed)
    forward = torch.linalg.qr(torch.randn(3, 64, 64, generator=draw, dtype=torch.float64)).Q
    sizes = torch.rand(3, 64, 1, generator=draw, dtype=torch.float64)
    forward = torch.exp2(12 * sizes - 6) * forward
    stored, partner = wush.as_stored(forward)
    assert torch.equal(stored, forward.float().double())
    assert torch.equal(partner, partner.float().double())
    exact = torch.linalg.inv(forward).mT
    assert torch.allclose(partner, exact, rtol=0, atol=1e-4 * float(exact.abs().max()))
    identity = torch.eye(64, dtype=torch.float64)
    mine, plain = (
        (stored @ x.mT - identity).abs().amax((-2, -1)) for x in (partner, exact.float().double())
    )
    assert float((mine / plain).max()) < 1
    assert float((mine / plain).mean()) < 0.6


def test_forecasts_say_condition_and_headroom_of_every_head() -> None:
    pair = wush.fit(random_moments())
    for side, rotations in (("k", pair.k), ("v", pair.v)):
        forecast = pair.forecasts[side]  # type: ignore[index]
        shapes = {one.shape for one in vars(forecast).values()}
        assert shapes == {(2, 2)}
        for position, layer in enumerate(rotations.layers):
            assert forecast.condition[position] == pytest.approx(
                np.linalg.cond(layer.forward), rel=1e-4
            )
            for head in range(2):
                gram, hessian = gram_and_hessian(side, layer.layer_id, head)
                want = np.trace(gram) * np.trace(hessian) / bound(gram, hessian)
                assert forecast.headroom[position, head] == pytest.approx(want, rel=1e-4)
        assert (forecast.bf16_error < wush.BF16_LIMIT).all()


def test_what_bfloat16_cannot_serve_is_refused() -> None:
    """Keys are large where no query looks: rounding lets what is large leak into what counts."""
    moments = random_moments()
    layer = moments.layers[2]
    basis = torch.linalg.qr(layer.kk[0])[0]
    energies = torch.logspace(0, 6, 16, dtype=torch.float64)
    layer.kk[1] = basis * energies @ basis.T
    layer.qq[1] = basis * energies.flip(0) @ basis.T
    with pytest.raises(
        ComputeFailed, match=r"wush: bfloat16 would change K of layer 2, KV head 1 by .*condition"
    ) as info:
        wush.fit(moments, gamma=1e-12)
    assert "oscar-per-head" in str(info.value.hint)


@pytest.mark.parametrize("empty", [slice(3), slice(5, 6), slice(0, 0, 1), slice(None)], ids=str)
@pytest.mark.parametrize("sides", ["kk", "qq", "kk qq", "vv", "wo"])
@pytest.mark.parametrize("tiny", [0.0, 1e-30])
def test_channels_that_are_zero_are_fitted(empty: slice, sides: str, tiny: float) -> None:
    """As behind a norm that switches channels of queries or keys off, or a head that is unused."""
    moments = random_moments()
    for name in sides.split():
        matrix = getattr(moments.layers[2], name)
        matrix[0, empty, :] *= tiny
        matrix[0, :, empty] *= tiny
    found = wush.fit(moments)
    for side in (found.k, found.v):
        for layer in side.layers:
            assert np.isfinite(layer.forward).all() and layer.partner is not None
            product = layer.forward.astype(float) @ layer.partner.astype(float).swapaxes(-1, -2)
            assert np.abs(product - np.eye(product.shape[-1])).max() < 1e-5
    for forecast in found.forecasts.values():
        assert all(np.isfinite(numbers).all() for numbers in vars(forecast).values())
    exact = wush.fit(random_moments())
    for mine, theirs in ((found.k, exact.k), (found.v, exact.v)):
        assert np.array_equal(mine.layers[0].forward, theirs.layers[0].forward)
