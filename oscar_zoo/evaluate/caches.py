"""The caches that a comparison measures, and what an element costs in each of them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from oscar_kernels.spec import QuantSpec, row_bytes
from oscar_zoo.artifact.formats import Role, RotationSet, hadamard_set
from oscar_zoo.artifact.specs import Clip, CodeBits, Geometry, ServingRecipe, Widths
from oscar_zoo.evaluate.formats import Alternative, RowCode, Schedule, Subject
from oscar_zoo.evaluate.measure import TaskPrompt, all_logits
from oscar_zoo.evaluate.outcome import MeasuredModel
from oscar_zoo.evaluate.shared import TEXTS, read_text
from oscar_zoo.evaluate.simulated_cache import CacheSpec, SimulatedCache
from oscar_zoo.models.attention import Softmax, attention_scope
from oscar_zoo.models.loading import LoadedModel

BF16_BITS = 16.0
CONTEXTS = (8192, 32768, 131072)
"""Tokens of sequences for which a comparison also tells what an element costs."""
CODE_BITS: dict[float, tuple[CodeBits, CodeBits]] = {2: (2, 2), 3: (4, 2), 4: (4, 4)}
"""Bits of keys and of values, by their mean."""


def caches_of(
    geometry: Geometry, artifact: tuple[RotationSet, RotationSet] | None, recipe: ServingRecipe
) -> dict[str, CacheSpec | None]:
    """`bf16`, `int2`, `int2-hadamard`, `int2-hadamard-clip`, and `artifact` where there is one;
    `None` for a cache that rounds nothing."""
    subject = Subject(geometry, recipe, artifact)
    caches: dict[str, CacheSpec | None] = {"bf16": None, "int2": integers(2, subject)}
    caches["int2-hadamard"] = hadamard(2, subject)
    caches["int2-hadamard-clip"] = hadamard_clipped(2, subject)
    if artifact is not None:
        caches["artifact"] = transformed(None, subject)
    for spec in reversed(list(caches.values())):  # the artifact's mismatch is the one to report
        if spec is not None:
            spec.check(geometry)
    return caches


def encoder(tokenizer: Any) -> Callable[[str], list[int]]:
    """From text to token ids, without special tokens."""

    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return ids

    return encode


def bits_of(
    spec: CacheSpec | Alternative | None, geometry: Geometry, length: int
) -> tuple[float, float]:
    """Bits of one stored element, and of everything that a sequence of `length` tokens occupies for
    each element of its rows, high-precision windows included."""
    if spec is None:
        return BF16_BITS, BF16_BITS
    if isinstance(spec, Alternative):
        return spec.stored_bits(geometry), spec.bits_at(geometry, length)
    return stored_bits(spec, geometry), bits_with_windows(spec, geometry, length)


def stored_bits(spec: CacheSpec, geometry: Geometry) -> float:
    """Bits of one stored element, scales and offsets included, on average over the layers. Rotary
    keys beside latents have 16."""
    specs = _specs(spec, geometry)
    exact = len(specs) * (geometry.rotary_key or 0)
    channels = exact + sum(one.head_dim for one in specs)
    return (8 * sum(map(row_bytes, specs)) + BF16_BITS * exact) / channels


def code_bits(spec: CacheSpec, geometry: Geometry) -> float:
    """The same of the codes alone."""
    specs = _specs(spec, geometry)
    return sum(one.bits * one.head_dim for one in specs) / sum(one.head_dim for one in specs)


def _specs(spec: CacheSpec, geometry: Geometry) -> list[QuantSpec]:
    layers = range(len(geometry.attention_layers))
    sides: tuple[tuple[Role, int], ...] = ("k", geometry.head_dim), ("v", geometry.v_head_dim)
    sides = sides[:1] if geometry.rotary_key else sides
    return [spec.recipe.quant_spec(role, width, i) for role, width in sides for i in layers]


def bits_with_windows(spec: CacheSpec, geometry: Geometry, length: int) -> float:
    """Bits of all that a sequence of `length` tokens occupies, for each element of its rows."""
    windows = spec.recipe.windows
    # INT2 rows exist for every token, the windows on top of them.
    return stored_bits(spec, geometry) + BF16_BITS * (windows.sink + windows.recent) / length


def bit_facts(
    spec: CacheSpec | Alternative | None, geometry: Geometry, length: int
) -> dict[str, Any]:
    """The fields of `outcome.Bits`, for a measurement with sequences of `length` tokens."""
    stored, whole = bits_of(spec, geometry, length)
    return {
        "bits_per_element": stored,
        "bits_per_element_with_windows": whole,
        "bits_per_element_at": {str(n): bits_of(spec, geometry, n)[1] for n in CONTEXTS},
    }


def largest_magnitudes(model: LoadedModel, length: int) -> dict[int, tuple[float, float]]:
    """Of keys and of values by layer, on the first `length` tokens of our calibration text."""
    text = read_text(next(iter(TEXTS)), "calibration")[: 16 * length]
    ids = torch.tensor(encoder(model.tokenizer)(text)[:length], device="cpu")
    exact = RowCode(lambda rows: (rows, {}))
    attend = SimulatedCache(Alternative(exact, exact, Schedule()), model.block, model.device)
    found = {}

    def seen(layer: int, query: Tensor, key: Tensor, value: Tensor, softmax: Softmax) -> Tensor:
        found[layer] = float(key.abs().max()), float(value.abs().max())
        return attend(layer, query, key, value, softmax)

    with attention_scope(model, seen), torch.inference_mode():
        list(all_logits(model, [TaskPrompt(ids, torch.tensor([len(ids) - 1], device="cpu"))]))
    return found


def facts_of(model: LoadedModel, text: str, recipe: ServingRecipe) -> dict[str, Any]:
    """What a reader needs to repeat a measurement: fields of `outcome.Facts`."""
    block = model.block
    return {
        "model": MeasuredModel(block.id, block.revision, block.config_sha256, model.dtype),
        "text_sha256": hashlib.sha256(text.encode()).hexdigest(),
        "sink": recipe.windows.sink,
        "recent": recipe.windows.recent,
        "clip": recipe.clip,
        "group_size": recipe.group_size,
        "scale_dtype": recipe.scale_dtype,
        "quantizer": recipe.quantizer,
        "chunking": "every position exact",
        "torch": torch.__version__,
        "device": str(model.device),
    }


def integers(bits: float | None, subject: Subject) -> CacheSpec:
    """Rows as they are, without a clip."""
    return CacheSpec(None, None, _recipe(subject, bits or 2, clipped=False))


def hadamard(bits: float | None, subject: Subject, *, clipped: bool = False) -> CacheSpec:
    """Rows behind a Hadamard matrix, without a clip."""
    sets = hadamard_set(subject.geometry, "k"), hadamard_set(subject.geometry, "v")
    return CacheSpec(*sets, _recipe(subject, bits or 2, clipped=clipped))


def hadamard_clipped(bits: float | None, subject: Subject) -> CacheSpec:
    """The same with the clip ratios of the recipe."""
    return hadamard(bits, subject, clipped=True)


def transformed(bits: float | None, subject: Subject) -> CacheSpec:
    """Rows behind the transforms of the artifact; without `bits` as its recipe says."""
    assert subject.artifact is not None
    recipe = subject.recipe if bits is None else _recipe(subject, bits, clipped=True)
    return CacheSpec(*subject.artifact, recipe)


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
