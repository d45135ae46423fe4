"""What every fit does to attention on held-out rows: clip curves, and errors by layer for the clips worth serving.

Two passes over the layers. The first measures each side alone for every clip of the grid, keys by their retrieval
error (see `quality` for why), values by their output error; that fixes a clip per fit. The second measures both sides
together for that clip, for the recipe's and for none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from oscar_kernels.spec import QuantSpec
from oscar_zoo.artifact.formats import Role, RotationSet
from oscar_zoo.artifact.specs import Clip, Geometry, ServingRecipe
from oscar_zoo.compute.clip import ClipCurve, clip_indices, index_of, ratio_of
from oscar_zoo.compute.heldout import RowSource
from oscar_zoo.compute.quality import LayerErrors, Pair, geometric_mean, layer_errors
from oscar_zoo.evaluate.cache import CacheSpec, Side, cache_side

PairOfSets = tuple[RotationSet, RotationSet]
PerLayer = tuple[float, ...]


@dataclass(frozen=True)
class ClipErrors:
    """Errors of one fit with one clip, per layer in ascending order.

    Attributes:
        clip: the two ratios.
        output, k_only, v_only: output error with both sides in INT2, and with one.
        logit: logit error.
        retrieval: retrieval error over all layers.
    """

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
        """Of the layer with the largest output error."""
        return max(self.output)

    @property
    def logit_geo(self) -> float:
        """Geometric mean of the logit error over layers."""
        return geometric_mean(self.logit)


@dataclass(frozen=True)
class Fidelity:
    """Errors of one fit.

    Attributes:
        k_curve, v_curve: retrieval error of keys and output error of values against the clip.
        clips: the clip found, then the recipe's, then none, each once; only the recipe's when it is fixed.
    """

    k_curve: ClipCurve
    v_curve: ClipCurve
    clips: tuple[ClipErrors, ...]

    @property
    def found(self) -> ClipErrors:
        """With the clip that was found."""
        return self.clips[0]

    def of(self, clip: Clip) -> ClipErrors | None:
        """With one clip, if it was measured."""
        return next((one for one in self.clips if (one.clip.k, one.clip.v) == (clip.k, clip.v)), None)


def measure_fits(
    source: RowSource,
    geometry: Geometry,
    fits: Mapping[str, PairOfSets],
    recipe: ServingRecipe,
    *,
    fixed_clip: bool = False,
    tick: Callable[[], None] = lambda: None,
) -> dict[str, Fidelity]:
    """Measure fits of one model on the same rows.

    Args:
        source: held-out rows.
        geometry: of the model.
        fits: name -> K and V sets.
        recipe: quantizer, windows and the clip to compare with.
        fixed_clip: look at its clip only.
        tick: called after every layer of either pass.

    Raises:
        ComputeFailed: as `quality.layer_errors`.
        UsageError: the recipe's quantizer cannot be simulated.
    """
    bench = _Bench(source, geometry, recipe, fixed_clip)
    singles = bench.run({name: (pair, bench.grid) for name, pair in fits.items()}, bench.each_alone, tick)
    curves = {name: bench.curves(measured) for name, measured in singles.items()}
    choices = {name: bench.choices(*both) for name, both in curves.items()}
    chosen = {name: (pair, tuple(zip(*choices[name], strict=True))) for name, pair in fits.items()}
    together = bench.run(chosen, lambda k, v: [(n, n) for n in range(len(k))], tick)
    found = {}
    for name in fits:
        clips = bench.clips(choices[name], singles[name], together[name])
        found[name] = Fidelity(*curves[name], clips)
    return found


Indices = tuple[Sequence[int], ...]
"""Clip indices of the K sides and of the V sides."""


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

    @property
    def grid(self) -> Indices:
        """Indices to try, per side; the recipe's is one of them."""
        specs = self.spec("k"), self.spec("v")
        if self.fixed_clip:
            return tuple((index_of(spec),) for spec in specs)
        return tuple(clip_indices(spec.head_dim, index_of(spec)) for spec in specs)

    @staticmethod
    def each_alone(k: Sequence[int], v: Sequence[int]) -> list[Pair]:
        """Every K side with exact values, then every V side with exact keys."""
        return [*((n, None) for n in range(len(k))), *((None, n) for n in range(len(v)))]

    def run(
        self,
        fits: Mapping[str, tuple[PairOfSets, Indices]],
        pairs: Callable[[Sequence[int], Sequence[int]], list[Pair]],
        tick: Callable[[], None],
    ) -> dict[str, list[LayerErrors]]:
        """One pass over the layers."""
        found: dict[str, list[LayerErrors]] = {name: [] for name in fits}
        with torch.inference_mode():
            for layer in self.geometry.attention_layers:
                rows = self.source(layer)
                for name, (sets, (k, v)) in fits.items():
                    device = rows.o_proj.device
                    sides = self._sides("k", sets[0], layer, k, device), self._sides("v", sets[1], layer, v, device)
                    found[name].append(layer_errors(layer, rows, self.recipe.windows, sides, pairs(k, v)))
                tick()
        return found

    def _sides(
        self, role: Role, rotations: RotationSet, layer: int, indices: Sequence[int], device: torch.device
    ) -> list[Side]:
        spec = self.spec(role)
        side = cache_side(rotations, layer, spec, device)
        return [replace(side, spec=replace(spec, clip_ratio=ratio_of(at, spec.head_dim))) for at in indices]

    def curves(self, measured: Sequence[LayerErrors]) -> tuple[ClipCurve, ClipCurve]:
        """Of the first pass."""
        k, v = self.grid
        return (
            ClipCurve(
                self.geometry.head_dim,
                tuple(k),
                tuple(one.retrieval for one in measured),
                tuple(one.focus for one in measured),
            ),
            ClipCurve(self.geometry.v_head_dim, tuple(v), tuple(one.output[len(k) :] for one in measured)),
        )

    def choices(self, k_curve: ClipCurve, v_curve: ClipCurve) -> list[tuple[int, int]]:
        """Index pairs to measure together: found, the recipe's, none; each once."""
        recipes = index_of(self.spec("k")), index_of(self.spec("v"))
        if self.fixed_clip:
            return [recipes]
        none = self.geometry.head_dim - 1, self.geometry.v_head_dim - 1
        return list(dict.fromkeys([(k_curve.best, v_curve.best), recipes, none]))

    def clips(
        self, choices: Sequence[tuple[int, int]], singles: Sequence[LayerErrors], both: Sequence[LayerErrors]
    ) -> tuple[ClipErrors, ...]:
        """Of both passes."""
        ks, vs = self.grid
        focus = [one.focus for one in both]
        found = []
        for n, (k, v) in enumerate(choices):
            at_k, at_v = ks.index(k), len(ks) + vs.index(v)
            lost = sum(one.retrieval[n] * weight for one, weight in zip(both, focus, strict=True))
            found.append(
                ClipErrors(
                    self._clip(k, v),
                    output=tuple(one.output[n] for one in both),
                    k_only=tuple(one.output[at_k] for one in singles),
                    v_only=tuple(one.output[at_v] for one in singles),
                    logit=tuple(one.logit[n] for one in both),
                    retrieval=lost / sum(focus),
                )
            )
        return tuple(found)

    def _clip(self, k: int, v: int) -> Clip:
        """The ratios as a recipe has them: its own where the index is its own."""
        own = self.recipe.clip
        if own.algorithm != "none" and (k, v) == (index_of(self.spec("k")), index_of(self.spec("v"))):
            return own
        ratios = ratio_of(k, self.geometry.head_dim), ratio_of(v, self.geometry.v_head_dim)
        return Clip(k=ratios[0], v=ratios[1], algorithm="absrank-floor/1" if any(ratios) else "none")
