"""Errors of every fit in attention, on held-out rows: clip curves, and errors by layer.

Two passes go over the layers. The first measures each side alone for every clip of the grid, keys
by their retrieval error (`layer_errors` says why), values by their output error; that fixes a clip
per fit. The second measures both sides together for that clip, for the recipe's clip and for none.

The quantizer clips a row at an index into its sorted absolute values, so the grid is one of
indices. A ratio is stored as `(index + 0.5) / d`, the middle of the ratios that mean that index.
The last index clips nothing and is stored as 0. Runtimes take one ratio per side, so the best one
over all layers is served, and the best one of each layer is only reported.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from oscar_kernels.spec import QuantSpec
from oscar_zoo.artifact.formats import Role, RotationSet
from oscar_zoo.artifact.specs import Clip, Geometry, ServingRecipe
from oscar_zoo.compute.capture.rows import RowSource
from oscar_zoo.compute.select.layer_errors import CacheErrors, LayerBench, geometric_mean
from oscar_zoo.evaluate.simulated_cache import CacheSpec, Side, cache_side

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

    @property
    def best_by_layer(self) -> tuple[int, ...]:
        """The best index of every layer on its own."""
        return tuple(self.indices[_best(layer)] for layer in self.layers)

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
            "best_by_layer": [ratio_of(index, self.head_dim) for index in self.best_by_layer],
        }


def _best(errors: Iterable[float]) -> int:
    listed = list(errors)
    return max(position for position, error in enumerate(listed) if error <= TIE * min(listed))


PairOfSets = tuple[RotationSet, RotationSet]
PerLayer = tuple[float, ...]


@dataclass(frozen=True)
class ClipErrors:
    """Errors of one fit with one clip, per layer in ascending order: of the output with both sides
    in INT2 and with one, and of the logits; the retrieval error is over all layers."""

    clip: Clip
    output: PerLayer
    k_only: PerLayer
    v_only: PerLayer
    logit: PerLayer
    retrieval: float

    @property
    def output_geo(self) -> float:
        """Geometric mean of the output error over layers."""
        return geometric_mean(self.output)

    @property
    def output_worst(self) -> float:
        """Output error of the layer with the largest one."""
        return max(self.output)

    @property
    def logit_geo(self) -> float:
        """Geometric mean of the logit error over layers."""
        return geometric_mean(self.logit)


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
        return next(
            (one for one in self.clips if (one.clip.k, one.clip.v) == (clip.k, clip.v)), None
        )


def measure_fits(
    source: RowSource,
    geometry: Geometry,
    fits: Mapping[str, PairOfSets],
    recipe: ServingRecipe,
    *,
    fixed_clip: bool = False,
    tick: Callable[[], None] = lambda: None,
) -> dict[str, Fidelity]:
    """Measure fits of one model on the same rows."""
    bench = _Bench(source, geometry, recipe, fixed_clip)
    curves = bench.curves(fits, tick)
    choices = {name: bench.choices(*both) for name, both in curves.items()}
    errors = bench.together(fits, choices, tick)
    return {
        name: Fidelity(
            *curves[name], tuple(map(bench.summary(*curves[name]), choices[name], errors[name]))
        )
        for name in fits
    }


Indices = tuple[int, int]
"""Where a K side and a V side clip."""


@dataclass(frozen=True)
class _Bench:
    source: RowSource
    geometry: Geometry
    recipe: ServingRecipe
    fixed_clip: bool

    def spec(self, role: Role) -> QuantSpec:
        """The recipe's quantizer of one side."""
        width = self.geometry.head_dim if role == "k" else self.geometry.v_head_dim
        return CacheSpec(None, None, self.recipe).quant_spec(role, width)

    def grid(self, role: Role) -> tuple[int, ...]:
        """Indices to try; the recipe's is one of them."""
        spec = self.spec(role)
        return (index_of(spec),) if self.fixed_clip else clip_indices(spec.head_dim, index_of(spec))

    def layers(self, tick: Callable[[], None]) -> Iterator[LayerBench]:
        """Every layer in turn."""
        for layer in self.geometry.attention_layers:
            with torch.inference_mode():
                yield LayerBench(layer, self.source(layer), self.recipe.windows)
            tick()

    def sides(
        self, role: Role, rotations: RotationSet, layer: LayerBench, indices: Sequence[int]
    ) -> list[Side]:
        """One side of one layer for some clips."""
        spec = self.spec(role)
        side = cache_side(rotations, layer.layer_id, spec, layer.rows.o_proj.device)
        return [
            replace(side, spec=replace(spec, clip_ratio=ratio_of(at, spec.head_dim)))
            for at in indices
        ]

    def curves(
        self, fits: Mapping[str, PairOfSets], tick: Callable[[], None]
    ) -> dict[str, tuple[ClipCurve, ClipCurve]]:
        """The first pass: clip curves of each side alone."""
        k_grid, v_grid = self.grid("k"), self.grid("v")
        keys: dict[str, list[PerLayer]] = {name: [] for name in fits}
        values: dict[str, list[PerLayer]] = {name: [] for name in fits}
        weights = []
        for layer in self.layers(tick):
            focus = 0.0
            for name, (k, v) in fits.items():
                errors, focus = layer.retrieval(self.sides("k", k, layer, k_grid))
                keys[name].append(errors)
                values[name].append(layer.values(self.sides("v", v, layer, v_grid)))
            weights.append(focus)
        widths = self.geometry.head_dim, self.geometry.v_head_dim
        return {
            name: (
                ClipCurve(widths[0], k_grid, tuple(keys[name]), tuple(weights)),
                ClipCurve(widths[1], v_grid, tuple(values[name])),
            )
            for name in fits
        }

    def choices(self, k_curve: ClipCurve, v_curve: ClipCurve) -> list[Indices]:
        """Clips to measure on both sides together: the one found, the recipe's, none; each once."""
        recipes = index_of(self.spec("k")), index_of(self.spec("v"))
        if self.fixed_clip:
            return [recipes]
        none = self.geometry.head_dim - 1, self.geometry.v_head_dim - 1
        return list(dict.fromkeys([(k_curve.best, v_curve.best), recipes, none]))

    def together(
        self,
        fits: Mapping[str, PairOfSets],
        choices: Mapping[str, Sequence[Indices]],
        tick: Callable[[], None],
    ) -> dict[str, list[tuple[CacheErrors, ...]]]:
        """The second pass: for every choice, one entry per layer."""
        found: dict[str, list[tuple[CacheErrors, ...]]] = {name: [] for name in fits}
        for layer in self.layers(tick):
            for name, (k, v) in fits.items():
                ks, vs = zip(*choices[name], strict=True)
                pairs = zip(
                    self.sides("k", k, layer, ks), self.sides("v", v, layer, vs), strict=True
                )
                found[name].append(layer.caches(list(pairs)))
        return {name: list(zip(*layers, strict=True)) for name, layers in found.items()}

    def summary(
        self, k_curve: ClipCurve, v_curve: ClipCurve
    ) -> Callable[[Indices, tuple[CacheErrors, ...]], ClipErrors]:
        """A function that joins the errors of both passes, for one choice of clips."""

        def one(choice: Indices, layers: tuple[CacheErrors, ...]) -> ClipErrors:
            k, v = choice
            return ClipErrors(
                self._clip(k, v),
                output=tuple(layer.output for layer in layers),
                k_only=tuple(layer.k_only for layer in layers),
                v_only=v_curve.at(v),
                logit=tuple(layer.logit for layer in layers),
                retrieval=k_curve.mean[k_curve.indices.index(k)],
            )

        return one

    def _clip(self, k: int, v: int) -> Clip:
        """The ratios as a recipe has them: its own where the index is its own."""
        own = self.recipe.clip
        if own.algorithm != "none" and (k, v) == (
            index_of(self.spec("k")),
            index_of(self.spec("v")),
        ):
            return own
        ratios = ratio_of(k, self.geometry.head_dim), ratio_of(v, self.geometry.v_head_dim)
        return Clip(
            k=ratios[0], v=ratios[1], algorithm="absrank-floor/1" if any(ratios) else "none"
        )
