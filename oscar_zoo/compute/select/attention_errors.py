"""Errors of every fit in attention, on held-out rows: clip curves, and errors by layer.

Two passes go over the layers. The first measures each side alone for every clip of the grid, keys
by their retrieval error, values by their output error; that fixes a clip per fit. The second
measures both sides together for that clip, for the recipe's clip and for none.

The quantizer clips a row at an index into its sorted absolute values, so the grid is one of
indices. A ratio is stored as `(index + 0.5) / d`, the middle of the ratios that mean that index.
The last index clips nothing and is stored as 0. Runtimes take one ratio per side, so the best one
over all layers is served, and the best one of each layer is only reported.

The history is the part that a server reads from INT2: key positions at or after the sink and at
least `recent` before the query. Everything else stays exact, in the model's own basis; so does the
side that is not being measured. There are three numbers:

* output error `||Y^ - Y||^2 / ||Y||^2` after the output projection, over evenly spaced queries;
* logit error: the same ratio for the logits of the history, the mean of each query removed (softmax
  ignores it);
* retrieval error: the divergence KL(p || p^) of the attention weights of focused queries, averaged
  with the square of the largest weight on a single row of the history: queries that fetch one row
  count, others hardly do.

With stronger clipping the first two keep falling long after perplexity and recall have begun to
rise. Clipping shrinks a key along the very query that looks for it. An average over all queries
does not show this, but the third number does.

A soft cap is applied to exact logits and to those with errors, and a learned sink is one more row
outside the history, whose output is 0.

With p the exact weights and e what the error of the keys adds to a logit (0 outside the history),
less its mean sum p e, the weights become p exp(e) / Z, where Z = 1 + sum p (exp(e) - 1) is at least
1 and KL = log Z. Rows outside the history share one e, so only their total weight and output are
needed. Rows are float32, sums over rows float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from oscar_kernels.spec import QuantSpec
from oscar_zoo.artifact.formats import Role, RotationSet
from oscar_zoo.artifact.specs import Clip, Geometry, ServingRecipe, Windows
from oscar_zoo.compute.capture.rows import (
    SCORES_AT_ONCE,
    LayerRows,
    Queries,
    RowSource,
    SequenceRows,
    history_mask,
)
from oscar_zoo.errors import ComputeFailed
from oscar_zoo.evaluate.simulated_cache import CacheSpec, Side, cache_side
from oscar_zoo.models.attention import Softmax
from oscar_zoo.next_step import AddOption

RATIOS = (0.98, 0.96, 0.94, 0.92, 0.90, 0.88)
TIE = 1.02
"""Errors up to this factor above the least count as equal: held-out rows tell no more apart."""


def clip_indices(head_dim: int, *also: int | None) -> tuple[int, ...]:
    """The grid for rows of `head_dim` channels, as ascending indices. It holds those of `RATIOS`,
    that of no clipping, and `also`."""
    grid = {math.floor(ratio * head_dim) for ratio in RATIOS} | {head_dim - 1}
    return tuple(sorted(grid | {index for index in also if index is not None}))


def ratio_of(index: int, head_dim: int) -> float:
    """The ratio that a recipe states for an index: 0 for the last one, which clips nothing."""
    return 0.0 if index >= head_dim - 1 else (index + 0.5) / head_dim


def ratio_text(ratio: float) -> str:
    """A ratio for people, with two decimals or as many as it needs, four at most; `0` for none."""
    exact = f"{ratio:.4f}".rstrip("0")
    return "0" if ratio == 0 else max(exact, f"{ratio:.2f}", key=len)


def index_of(spec: QuantSpec) -> int:
    """The index at which `spec` clips; `head_dim - 1` for none."""
    return spec.head_dim - 1 if spec.clip_index is None else spec.clip_index


@dataclass(frozen=True)
class ClipCurve:
    """Errors of one side of one fit: per layer one error for each of the ascending `indices`. The
    mean over layers has `weights`, or is geometric."""

    head_dim: int
    indices: tuple[int, ...]
    layers: tuple[tuple[float, ...], ...]
    weights: tuple[float, ...] | None = None

    @property
    def mean(self) -> tuple[float, ...]:
        """Over layers, per index."""
        columns = zip(*self.layers, strict=True)
        if self.weights is None:
            return tuple(geometric_mean(column) for column in columns)
        total = math.fsum(self.weights)
        if total <= 0:
            return tuple(math.fsum(column) / len(column) for column in columns)
        return tuple(
            math.fsum(w * e for w, e in zip(self.weights, column, strict=True)) / total
            for column in columns
        )

    @property
    def ratios(self) -> tuple[float, ...]:
        """The ratio that a recipe states for each index."""
        return tuple(ratio_of(index, self.head_dim) for index in self.indices)

    @property
    def best(self) -> int:
        """The index to serve. Of the indices whose error is within `TIE` of the least, it is the
        one that clips least."""
        return self.indices[_best(self.mean)]

    def at(self, index: int) -> tuple[float, ...]:
        """Error of every layer at an index of the grid."""
        position = self.indices.index(index)
        return tuple(layer[position] for layer in self.layers)

    def to_json(self) -> dict[str, Any]:
        """Ratios, mean error and the best ratio, overall and by layer; plain JSON values."""
        return {
            "ratios": list(self.ratios),
            "errors": list(self.mean),
            "best": ratio_of(self.best, self.head_dim),
            "best_by_layer": [self.ratios[_best(layer)] for layer in self.layers],
        }


def _best(errors: Sequence[float]) -> int:
    return max(position for position, error in enumerate(errors) if error <= TIE * min(errors))


@dataclass(frozen=True)
class ClipErrors:
    """Errors of one fit with one clip, per layer in ascending order: of the output with both sides
    in INT2 and with one, and of the logits; the retrieval error is over all layers."""

    clip: Clip
    output: tuple[float, ...]
    k_only: tuple[float, ...]
    v_only: tuple[float, ...]
    logit: tuple[float, ...]
    retrieval: float

    @property
    def output_geo(self) -> float:
        """Geometric mean of the output error over layers."""
        return geometric_mean(self.output)


@dataclass(frozen=True)
class Fidelity:
    """Errors of one fit: clip curves of both sides, and errors with the clip found, the recipe's
    and none, each once; only with the recipe's when it is fixed."""

    k_curve: ClipCurve
    v_curve: ClipCurve
    clips: tuple[ClipErrors, ...]

    @property
    def found(self) -> ClipErrors:
        """Errors with the clip that was found."""
        return self.clips[0]

    def of(self, clip: Clip) -> ClipErrors | None:
        """Errors with one clip, if it was measured."""
        same = (one for one in self.clips if (one.clip.k, one.clip.v) == (clip.k, clip.v))
        return next(same, None)


def measure_fits(
    source: RowSource,
    geometry: Geometry,
    fits: Mapping[str, tuple[RotationSet, RotationSet]],
    recipe: ServingRecipe,
    *,
    fixed_clip: bool = False,
    tick: Callable[[], None] = lambda: None,
) -> dict[str, Fidelity]:
    """Measure fits of one model on the same rows."""
    quantizers = CacheSpec(None, None, recipe)
    specs: dict[Role, QuantSpec] = {
        "k": quantizers.recipe.quant_spec("k", geometry.head_dim),
        "v": quantizers.recipe.quant_spec("v", geometry.v_head_dim),
    }
    own = index_of(specs["k"]), index_of(specs["v"])
    none = geometry.head_dim - 1, geometry.v_head_dim - 1
    k_grid, v_grid = (
        (index,) if fixed_clip else clip_indices(spec.head_dim, index)
        for spec, index in zip(specs.values(), own, strict=True)
    )

    def layers() -> Iterator[LayerBench]:
        for layer in geometry.attention_layers:
            with torch.inference_mode():
                yield LayerBench(layer, source(layer), recipe.windows)
            tick()

    def sides(
        role: Role, rotations: RotationSet, layer: LayerBench, indices: Sequence[int]
    ) -> list[Side]:
        spec = specs[role]
        beside = (geometry.rotary_key or 0) if role == "k" else 0
        side = cache_side(rotations, layer.layer_id, spec, layer.rows.o_proj.device, beside)
        clipped = (replace(spec, clip_ratio=ratio_of(at, spec.head_dim)) for at in indices)
        return [replace(side, spec=one) for one in clipped]

    keys: dict[str, list[tuple[float, ...]]] = {name: [] for name in fits}
    values: dict[str, list[tuple[float, ...]]] = {name: [] for name in fits}
    weights = []
    for layer in layers():  # each side alone
        focus = 0.0
        for name, (k, v) in fits.items():
            errors, focus = layer.retrieval(sides("k", k, layer, k_grid))
            keys[name].append(errors)
            values[name].append(layer.values(sides("v", v, layer, v_grid)))
        weights.append(focus)
    curves = {
        name: (
            ClipCurve(geometry.head_dim, k_grid, tuple(keys[name]), tuple(weights)),
            ClipCurve(geometry.v_head_dim, v_grid, tuple(values[name])),
        )
        for name in fits
    }
    choices = {
        name: [own] if fixed_clip else list(dict.fromkeys([(k.best, v.best), own, none]))
        for name, (k, v) in curves.items()
    }
    together: dict[str, list[list[tuple[float, ...]]]] = {name: [] for name in fits}
    for layer in layers():  # both sides, for every choice
        for name, (k, v) in fits.items():
            ks, vs = zip(*choices[name], strict=True)
            pairs = zip(sides("k", k, layer, ks), sides("v", v, layer, vs), strict=True)
            together[name].append(layer.caches(list(pairs)))

    def clip_of(k: int, v: int) -> Clip:
        """As a recipe has it: its own where the indices are its own."""
        if recipe.clip.algorithm != "none" and (k, v) == own:
            return recipe.clip
        ratios = ratio_of(k, geometry.head_dim), ratio_of(v, geometry.v_head_dim)
        algorithm: Any = "absrank-floor/1" if any(ratios) else "none"
        return Clip(k=ratios[0], v=ratios[1], algorithm=algorithm)

    def errors_of(name: str, at: int) -> ClipErrors:
        (k, v), (k_curve, v_curve) = choices[name][at], curves[name]
        output, k_only, logit = zip(*(layer[at] for layer in together[name]), strict=True)
        retrieval = k_curve.mean[k_curve.indices.index(k)]
        return ClipErrors(clip_of(k, v), output, k_only, v_curve.at(v), logit, retrieval)

    return {
        name: Fidelity(*curves[name], tuple(errors_of(name, at) for at in range(len(chosen))))
        for name, chosen in choices.items()
    }


LARGEST_NOISE = 60.0
"""Errors of logits are cut here, so their exponentials and sums of these fit into float32."""


@dataclass(frozen=True)
class LayerBench:
    """Measures caches of one layer, all on the same rows. All methods raise `ComputeFailed` where
    rows or errors are not finite, or no query has history."""

    layer_id: int
    rows: LayerRows
    windows: Windows

    def retrieval(self, sides: Sequence[Side]) -> tuple[tuple[float, ...], float]:
        """Retrieval errors of some K sides, and their weight in an average over layers."""
        lost, focus = [0.0] * len(sides), 0.0
        for one in self.rows.sequences:
            blocks, key = self._blocks(one, one.focused), self._stored(one.key)
            focus += math.fsum(float(block.focus.sum()) for block in blocks)
            for n, side in enumerate(sides):
                error = _error(side, key)
                lost[n] += math.fsum(block.divergence(error) for block in blocks)
        return self._checked([focus], *((x / focus if focus else math.nan) for x in lost)), focus

    def values(self, sides: Sequence[Side]) -> tuple[float, ...]:
        """Output error of some V sides with exact keys."""
        lost, energy = [0.0] * len(sides), 0.0
        for one in self.rows.sequences:
            blocks, value = self._blocks(one, one.even), self._stored(one.value)
            energy += math.fsum(block.output_energy(block.output) for block in blocks)
            for n, side in enumerate(sides):
                error = _error(side, value)
                lost[n] += math.fsum(block.output_energy(block.weights @ error) for block in blocks)
        return self._checked([energy], *((x / energy if energy else math.nan) for x in lost))

    def caches(self, pairs: Sequence[tuple[Side, Side]]) -> list[tuple[float, ...]]:
        """Errors of some pairs of a K side and a V side: of the output with both in INT2 and with
        exact values, and of the logits."""
        lost = torch.zeros(len(pairs), 3, dtype=torch.float64, device="cpu")
        energy = torch.zeros(3, dtype=torch.float64, device="cpu")
        for one in self.rows.sequences:
            blocks = self._blocks(one, one.even)
            key, value = self._stored(one.key), self._stored(one.value)
            for block in blocks:
                whole = block.output_energy(block.output)
                energy += energy.new_tensor([whole, whole, block.logit_energy(block.logits)])
            for n, (k, v) in enumerate(pairs):
                k_error, v_error = _error(k, key), _error(v, value)
                for block in blocks:
                    lost[n] += lost.new_tensor(block.cache_errors(k_error, v_error))
        self._checked(energy.tolist(), *(lost / energy).flatten().tolist())
        return [tuple(row) for row in (lost / energy).tolist()]

    def _stored(self, rows: Tensor) -> Tensor:
        """The rows of `[num_kv_heads, T, d]` that the last query reads from INT2."""
        sink, recent = self.windows.sink, self.windows.recent
        return rows[:, sink : max(sink, rows.shape[1] - recent)]

    def _blocks(self, sequence: SequenceRows, queries: Queries) -> list[_Block]:
        """The queries of a sequence, a few at a time."""
        if not len(queries.positions):
            return []
        size = max(1, SCORES_AT_ONCE // (queries.rows.shape[0] * sequence.key.shape[1]))
        parts = zip(queries.positions.split(size), queries.rows.split(size, 1), strict=True)
        return [self._block(sequence, at, rows) for at, rows in parts]

    def _block(self, sequence: SequenceRows, positions: Tensor, rows: Tensor) -> _Block:
        key, value, softmax = sequence.key.float(), sequence.value.float(), self.rows.softmax
        (kv_heads, tokens, _), number = key.shape, len(positions)
        query = rows.float().unflatten(0, (kv_heads, -1)).flatten(1, 2) * softmax.scaling
        products = query @ key.mT
        logits = softmax.capped(products).unflatten(1, (-1, number))
        future = torch.arange(tokens, device=key.device) > positions[:, None]
        seen = logits.masked_fill(future, -math.inf)
        weights = softmax.weights(seen.flatten(0, 1)).unflatten(0, (kv_heads, -1)).flatten(1, 2)
        history = self._stored(history_mask(positions, tokens, self.windows)[None].mT).mT[0]
        group = query.shape[1] // number
        history = history.repeat(group, 1)
        stored = self._stored(weights.mT).mT.masked_fill(~history, 0.0)
        return _Block(
            query=query,
            products=self._stored(products.mT).mT,
            softmax=softmax,
            weights=stored,
            history=history,
            output=weights @ value,
            beside=(weights @ value) - stored @ self._stored(value),
            value=self._stored(value),
            o_proj=self.rows.o_proj.float(),
            number=number,
        )

    def _checked(self, energies: Sequence[float], *errors: float) -> tuple[float, ...]:
        if not all(energies):
            both = self.windows.sink + self.windows.recent
            raise ComputeFailed(
                f"layer {self.layer_id} has no held-out query that reads INT2 rows.",
                hint=f"held-out sequences must be longer than {both} tokens",
            )
        if not all(map(math.isfinite, (*energies, *errors))):
            raise ComputeFailed(
                f"attention of layer {self.layer_id} is not finite on held-out text.",
                next_step=AddOption("--dtype", "float32"),
            )
        return errors


def geometric_mean(values: Iterable[float]) -> float:
    """exp of the mean logarithm; 0 when any value is 0."""
    items = list(values)
    return 0.0 if min(items) <= 0.0 else math.exp(math.fsum(map(math.log, items)) / len(items))


@dataclass(frozen=True)
class _Block:
    """Some queries of a sequence, and the exact results for them.

    Heads of a group are stacked as more queries.

    Attributes:
        query: `[num_kv_heads, g * n, d]`, scaled.
        products: `[num_kv_heads, g * n, S]`, scaled and before any cap, over the S rows stored for
            the last query.
        softmax: of the layer.
        weights: of the same shape, 0 outside the query's own history.
        history: `[g * n, S]` bool: rows that are read from INT2.
        output, beside: `[num_kv_heads, g * n, dv]`, from all rows and from those outside it.
        value: `[num_kv_heads, S, dv]`.
        o_proj: `[hidden, num_q_heads * dv]`.
        number: n.
    """

    query: Tensor
    products: Tensor
    softmax: Softmax
    weights: Tensor
    history: Tensor
    output: Tensor
    beside: Tensor
    value: Tensor
    o_proj: Tensor
    number: int

    @property
    def focus(self) -> Tensor:
        """`[num_kv_heads, g * n]` float64: squared largest weight on one row of the history."""
        return self.weights.amax(-1).double() ** 2

    @property
    def logits(self) -> Tensor:
        """`[num_kv_heads, g * n, S]`, capped."""
        return self.softmax.capped(self.products)

    def noise(self, k_error: Tensor) -> Tensor:
        """What an error of the keys `[num_kv_heads, S, d]` adds to the logits."""
        added = self.query @ k_error.mT
        if self.softmax.cap is None:
            return added
        return self.softmax.capped(self.products + added) - self.logits

    def divergence(self, k_error: Tensor) -> float:
        """Sum of KL(p || p^), times `focus`, under an error of the keys `[num_kv_heads, S, d]`."""
        more, beside = self._changes(self.noise(k_error))
        kl = (more.sum(-1) + beside[..., 0] * self._weight_beside).log1p()
        return float((kl.double().clamp_min(0) * self.focus).sum())

    def cache_errors(self, k_error: Tensor, v_error: Tensor) -> tuple[float, float, float]:
        """Squared norms of the output error, for both sides together and for the keys alone. The
        third number is the energy of the error of the logits."""
        noise = self.noise(k_error)
        more, beside = self._changes(noise)
        more_in_all = more.sum(-1, keepdim=True) + beside * self._weight_beside[..., None]
        total = 1 + more_in_all
        from_keys = (more @ self.value + beside * self.beside - more_in_all * self.output) / total
        from_values = ((self.weights + more) @ v_error) / total
        both = self.output_energy(from_keys + from_values)
        return both, self.output_energy(from_keys), self.logit_energy(noise)

    def logit_energy(self, logits: Tensor) -> float:
        """Sum over the history of squares of `logits`, each query's mean removed."""
        mean = logits.masked_fill(~self.history, 0.0).sum(-1) / self.history.sum(-1).clamp_min(1)
        centered = (logits - mean[..., None]).masked_fill_(~self.history, 0.0)
        return float((centered**2).sum(-1, dtype=torch.float64).sum())

    def output_energy(self, heads: Tensor) -> float:
        """Squared norm of `[num_kv_heads, g * n, dv]` after the output projection."""
        rows = heads.unflatten(1, (-1, self.number)).flatten(0, 1).transpose(0, 1).flatten(1)
        return float(((rows @ self.o_proj.mT) ** 2).sum(-1, dtype=torch.float64).sum())

    @property
    def _weight_beside(self) -> Tensor:
        """`[num_kv_heads, g * n]`: of all rows outside the history."""
        return (1 - self.weights.sum(-1)).clamp_min(0)

    def _changes(self, noise: Tensor) -> tuple[Tensor, Tensor]:
        """The change of each weight for an error e of its logit. It is `p (exp(e) - 1)` in the
        history, and `exp(e) - 1` outside of it."""
        mean = (self.weights * noise).sum(-1, keepdim=True)
        more = self.weights * (noise - mean).clamp_(max=LARGEST_NOISE).expm1_()
        return more, (-mean).clamp_(max=LARGEST_NOISE).expm1_()


def _error(side: Side, x: Tensor) -> Tensor:
    """The error that INT2 adds to rows `[num_kv_heads, S, d]`, in the model's own basis."""
    return side.restored(side.stored(side.rows(x))) - x.float()
