"""Integer codes per token, through the simulated cache of our own: no transform, Hadamard, or the
transforms of an artifact.

For each token, head and group of channels, with B bits (OSCAR's quantizer, arXiv 2605.17757, and
that of LMDeploy's `quant_policy=4`, which is asymmetric per token and head):

    offset = min(x), scale = (max(x) - min(x)) / (2^B - 1), code = round((x - offset) / scale)

Groups, the type of scales, and windows are those of the recipe. 3 bits are keys of 4 and values of
2. Clip ratios belong to a width: those of the recipe are for 2 bits, and 4 bits are not clipped.
"""

from __future__ import annotations

from oscar_zoo.artifact.formats import RotationSet, hadamard_set
from oscar_zoo.artifact.specs import Clip, CodeBits, ServingRecipe, Widths
from oscar_zoo.errors import UsageError
from oscar_zoo.evaluate.alternatives.base import Subject
from oscar_zoo.evaluate.simulated_cache import CacheSpec

CODE_BITS: dict[float, tuple[CodeBits, CodeBits]] = {2: (2, 2), 3: (4, 2), 4: (4, 4)}
"""Bits of keys and of values, by their mean."""


def integers(bits: float | None, subject: Subject) -> CacheSpec:
    """Rows as they are, without a clip."""
    return CacheSpec(None, None, _recipe(subject, bits or 2, clipped=False))


def hadamard(bits: float | None, subject: Subject) -> CacheSpec:
    """Rows behind a Hadamard matrix, without a clip."""
    return CacheSpec(*_hadamard_sets(subject), _recipe(subject, bits or 2, clipped=False))


def hadamard_clipped(bits: float | None, subject: Subject) -> CacheSpec:
    """Rows behind a Hadamard matrix, with the clip ratios of the recipe."""
    return CacheSpec(*_hadamard_sets(subject), _recipe(subject, bits or 2, clipped=True))


def transformed(bits: float | None, subject: Subject) -> CacheSpec:
    """Rows behind the transforms of the artifact; without `bits` as its recipe says."""
    if subject.artifact is None:
        raise UsageError("this alternative needs an artifact.")
    recipe = subject.recipe if bits is None else _recipe(subject, bits, clipped=True)
    return CacheSpec(*subject.artifact, recipe)


def _hadamard_sets(subject: Subject) -> tuple[RotationSet, RotationSet]:
    return hadamard_set(subject.geometry, "k"), hadamard_set(subject.geometry, "v")


def _recipe(subject: Subject, bits: float, *, clipped: bool) -> ServingRecipe:
    """The recipe of `subject` with the same bits in every layer, and its clip or none."""
    recipe = subject.recipe.with_widths(None)
    if not clipped:
        none = Clip(k=0.0, v=0.0, algorithm="none")
        recipe = recipe.model_copy(update={"clip": none})
    if bits == 2:
        return recipe
    layers = len(subject.geometry.attention_layers)
    k, v = CODE_BITS[bits]
    return recipe.with_widths(Widths.uniform(layers, k=k, v=v, clip=recipe.clip))
