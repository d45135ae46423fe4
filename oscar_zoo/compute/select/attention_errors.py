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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from oscar_kernels.spec import QuantSpec
from oscar_zoo.artifact.formats import Role, RotationSet
from oscar_zoo.artifact.specs import Clip, Geometry, ServingRecipe
from oscar_zoo.compute.capture.rows import RowSource
from oscar_zoo.compute.select.layer_errors import LayerBench, geometric_mean
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
        "k": quantizers.quant_spec("k", geometry.head_dim),
        "v": quantizers.quant_spec("v", geometry.v_head_dim),
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
        side = cache_side(rotations, layer.layer_id, spec, layer.rows.o_proj.device)
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
