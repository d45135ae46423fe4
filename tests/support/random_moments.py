"""Moments of random attention rows: two of three layers, 4 query heads, 2 KV heads, keys wider than
values.

Rows are float64 and correlated, a few channels far larger than the rest, so that methods differ and
eigenvalues are far apart. Tests evaluate formulas on the same rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from oscar_zoo.artifact.manifest import Calibration, LengthStats, ModelBlock, Numerics, WeightsInfo
from oscar_zoo.artifact.specs import Geometry, Harness
from oscar_zoo.compute.moments import LayerMoments, Moments, qqt
from oscar_zoo.compute.moments_file import MomentsInfo, SequenceRecord

Rows = NDArray[np.float64]

MODEL = ModelBlock(
    num_layers=3,
    num_q_heads=4,
    num_kv_heads=2,
    head_dim=16,
    v_head_dim=8,
    attention_layers=(0, 2),
    id="oscar-zoo/random",
    revision=None,
    config_sha256=None,
    rope=None,
    qk_norm=False,
    output_gate=False,
    weights=WeightsInfo(dtype="bfloat16"),
    compatible_with=(),
)
GROUP = 2
TOKENS = 200
COUNTS = ("tokens", "query_rows", "output_rows", "weighted_tokens")
NUMERICS = Numerics(
    forward_dtype="float32",
    accumulate="float64",
    engine=Harness(name="rows", version="1"),
    device="x",
)


@dataclass(frozen=True)
class LayerRows:
    """`query` `[4, T, 16]`, `key` `[2, T, 16]`, `value` `[2, T, 8]`, `output` `[4, T, 8]`,
    `weights` `[12, 4 * 8]`."""

    query: Rows
    key: Rows
    value: Rows
    output: Rows
    weights: Rows

    def part(self, tokens: slice) -> LayerRows:
        return LayerRows(
            *(x[:, tokens] for x in (self.query, self.key, self.value, self.output)), self.weights
        )


def layer_rows(layer: int, *, tokens: int = TOKENS, seed: int = 0) -> LayerRows:
    """The rows of one layer; the weights do not depend on `seed`."""
    model = np.random.default_rng([99, layer])
    draw = np.random.default_rng([seed, layer])

    def mixed(heads: int, width: int) -> Rows:
        basis = np.linalg.qr(model.standard_normal((heads, width, width)))[0]
        scales = np.exp(1.2 * model.standard_normal((heads, 1, width)))
        rows = np.asarray(draw.standard_normal((heads, tokens, width)) * scales @ basis)
        return rows + 0.3 * model.standard_normal((heads, 1, width))

    d, dv = MODEL.head_dim, MODEL.v_head_dim
    rows = (mixed(4, d), mixed(2, d), mixed(2, dv), mixed(4, dv))
    return LayerRows(
        *rows, model.standard_normal((12, 4 * dv)) * np.exp(model.standard_normal(4 * dv))
    )


def add(sums: LayerMoments, rows: LayerRows) -> None:
    """Everything but the weighted sums."""
    sums.add(*(torch.from_numpy(x) for x in (rows.query, rows.key, rows.value, rows.output)))
    sums.set_weights(torch.from_numpy(rows.weights))


def weigh(sums: LayerMoments, rows: LayerRows) -> None:
    """The second pass over the same rows."""
    sums.add_weighted(torch.from_numpy(rows.key), torch.from_numpy(rows.value), qqt(sums))


def empty_moments(geometry: Geometry = MODEL.geometry) -> Moments:
    shape = (geometry.num_kv_heads, geometry.head_dim, geometry.v_head_dim)
    layers = {layer: LayerMoments.zeros(*shape) for layer in geometry.attention_layers}
    return Moments(geometry, layers)


def random_moments(*, tokens: int = TOKENS, seed: int = 0, weighted: bool = True) -> Moments:
    moments = empty_moments(MODEL.geometry)
    for layer, sums in moments.layers.items():
        rows = layer_rows(layer, tokens=tokens, seed=seed)
        add(sums, rows)
        if weighted:
            weigh(sums, rows)
    return moments


def records(*lengths: int, seed: int = 0) -> tuple[SequenceRecord, ...]:
    """Records of sequences of these lengths; another seed gives other sequences."""
    return tuple(
        SequenceRecord.of([seed, number, *range(length - 2)])
        for number, length in enumerate(lengths)
    )


def describe(
    moments: Moments, sequences: Sequence[SequenceRecord] = (), *, partial: bool = False
) -> MomentsInfo:
    """What a capture would say about `moments`; one sequence of all tokens unless `sequences` are
    given."""
    sequences = tuple(sequences) or records(moments.tokens)
    lengths = sorted(one.tokens for one in sequences)
    calibration = Calibration(
        dataset="random",
        revision=None,
        split=None,
        license=None,
        prompts_sha256="ab" * 32,
        sequences=len(sequences),
        tokens_requested=sum(lengths),
        tokens_used=sum(lengths),
        length=LengthStats(
            min=lengths[0], median=lengths[(len(lengths) - 1) // 2], max=lengths[-1]
        ),
        content="prefill",
        chat_template=False,
        seed=None,
        disjoint_from=None,
        overlaps_with=(),
    )
    return MomentsInfo(
        model=MODEL,
        calibration=calibration,
        coverage=None if partial else moments.observed(),
        numerics=NUMERICS,
        sequences=sequences,
        partial=partial,
    )
