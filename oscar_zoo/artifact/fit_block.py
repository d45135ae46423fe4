"""The part of a manifest about the fit: method, estimators, calibration data and numerics.

A field that is not known is null, because much of it may be unknown for imported artifacts.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from oscar_zoo.artifact.specs import Count, Harness, Hex64, Spec, Text


class Estimator(Spec):
    """The matrix that a fit targets, by versioned id such as `qqt/1`.

    It is mandatory because the paper and its code differ.
    """

    id: Text
    revision: Text | None = None
    source_commit: Text | None = None
    params: dict[str, float | int | str | bool] = Field(default_factory=dict)


class Estimators(Spec):
    """Estimators of both sides."""

    k: Estimator
    v: Estimator


class Composition(Spec):
    """How the eigenvectors became a rotation."""

    id: Text
    hadamard: Text | None = None
    permutation: Text | None = None
    signs: Text | None = None


class LengthStats(Spec):
    """Sequence lengths in tokens."""

    min: Count
    median: Count
    max: Count


class Disjoint(Spec):
    """An evaluation set proven disjoint from the calibration data, and how."""

    dataset: Text
    method: Text


class Calibration(Spec):
    """The tokens that a fit saw.

    `prompts_sha256` covers the compact JSON list of token-id lists, in order.
    """

    dataset: Text | None
    revision: Text | None
    split: Text | None
    license: Text | None
    prompts_sha256: Hex64 | None
    sequences: Count | None
    tokens_requested: Count | None
    tokens_used: Count | None
    length: LengthStats | None
    content: Literal["prefill", "generated", "mixed"] | None
    chat_template: bool | None
    seed: int | None
    disjoint_from: tuple[Disjoint, ...] | None
    overlaps_with: tuple[Text, ...]


class Coverage(Spec):
    """Layers and heads really observed."""

    layers: Count
    q_heads: Count
    kv_heads: Count
    tokens_min: Count
    tokens_max: Count
    tp: Count = 1
    pp: Count = 1
    dp: Count = 1


class Numerics(Spec):
    """Reproducibility class of the fit."""

    forward_dtype: Text
    accumulate: Text
    engine: Harness
    device: Text


class MomentsFile(Spec):
    """Where the refit source is."""

    sha256: Hex64
    size: Count
    location: Text


class Fit(Spec):
    """How the matrices were made.

    Everything except `method` may be unknown for imported artifacts.
    """

    method: Text
    fit_id: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")] | None
    estimator: Estimators | None
    composition: Composition | None
    calibration: Calibration | None
    coverage: Coverage | None
    numerics: Numerics | None
    moments: MomentsFile | None = None
    selection: dict[str, Any] | None = None
