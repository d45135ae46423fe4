"""From a fit to the bytes of an artifact: rotation files, statistics, widths, manifest.

Nothing is written here. The payload depends only on the model, the data, the options and this
version, and contains no time and no path. The time of creation is in the manifest, which the digest
does not cover.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from oscar_zoo.artifact import statistics, strict_json, writer
from oscar_zoo.artifact.files import artifact_digest, file_digest
from oscar_zoo.artifact.formats import CalibrationValue, Role, RotationSet, hadamard_name
from oscar_zoo.artifact.manifest import (
    FILE_NAME,
    STATISTICS_NAME,
    WIDTHS_NAME,
    Calibration,
    Coverage,
    FileEntry,
    FileRole,
    Fit,
    License,
    Manifest,
    ModelBlock,
    MomentsFile,
    Numerics,
    Provenance,
    SideTransform,
    StatisticsBlock,
    Transform,
    schema_of,
)
from oscar_zoo.artifact.names import ArtifactId, CalibrationTag
from oscar_zoo.artifact.specs import CAPABILITIES, Geometry, Harness, ServingRecipe
from oscar_zoo.compute.methods.base import FitResult, Method
from oscar_zoo.errors import UsageError
from oscar_zoo.evaluate.simulated_cache import CacheSpec
from oscar_zoo.version import __version__

TOOL = Harness(name="oscar-zoo", version=__version__)


@dataclass(frozen=True)
class Facts:
    """All that the manifest says beside the fit itself. What the fit requires of an engine is added
    to the recipe. `coverage` is of a capture where heads, layers or tokens were split over ranks,
    `None` for what the fit saw; `selection` and `quality` are plain JSON values."""

    artifact_id: ArtifactId
    model: ModelBlock
    recipe: ServingRecipe
    calibration: Calibration | None
    numerics: Numerics | None
    created: str
    coverage: Coverage | None = None
    moments: MomentsFile | None = None
    selection: Mapping[str, Any] | None = None
    quality: Mapping[str, Any] | None = None


def assemble(result: FitResult, facts: Facts) -> dict[str, bytes]:
    """File name -> content of the whole artifact, `oscar.json` included."""
    if not result.method.publishable:
        raise UsageError(
            f"{result.method.name} is a baseline to measure, not an artifact.", hint="use hadamard"
        )
    fit_id = _fit_id(result, facts)
    files: dict[str, tuple[FileRole, bytes]] = {}
    sides: tuple[tuple[Role, FileRole, RotationSet], ...] = (
        ("k", "k_rotation", result.k),
        ("v", "v_rotation", result.v),
    )
    if facts.model.rotary_key is not None:
        sides = (("k", "latent_rotation", result.k),)
    for role, file_role, side in sides:
        content = writer.rotation_bytes(
            replace(side, calibration=_calibration_block(facts, fit_id))
        )
        # names that readers of each format know
        stem = {1: side.objective, 2: "perhead"}.get(side.format_version, result.method.name)
        name = file_role if file_role == "latent_rotation" else f"{role}_rotation"
        files[f"{name}_{stem}.pt"] = (file_role, content)
    if result.targets:
        fingerprint = statistics.fingerprint_bytes(
            dict(result.targets.items()), result.k.layer_ids, facts.model.id, facts.model.revision
        )
        files[STATISTICS_NAME] = ("statistics", fingerprint)
    if facts.recipe.widths is not None:
        files[WIDTHS_NAME] = ("widths", facts.recipe.widths.to_bytes())
    manifest = _manifest(result, facts, fit_id, files).to_bytes()
    return {name: content for name, (_, content) in files.items()} | {FILE_NAME: manifest}


def _fit_id(result: FitResult, facts: Facts) -> str:
    """An identifier of 32 hex digits that the K and V files of one fit share. It is a hash of
    inputs, options and matrices, so no other fit has it."""
    state = hashlib.sha256()
    inputs = {
        "config_sha256": facts.model.config_sha256,
        "method": result.method.name,
        "model": facts.model.id,
        "prompts_sha256": facts.calibration.prompts_sha256 if facts.calibration else None,
        "revision": facts.model.revision,
        "tool": __version__,
    }
    state.update(strict_json.canonical_bytes(inputs))
    for side in (result.k, result.v):
        for layer in side.layers:
            state.update(layer.forward.tobytes())
            state.update(layer.partner.tobytes())
    return state.hexdigest()[:32]


def _calibration_block(facts: Facts, fit_id: str) -> dict[str, CalibrationValue]:
    """The block inside the rotation files; keys as readers of format 1 know them."""
    block: dict[str, CalibrationValue] = {
        "generation_id": fit_id,
        "model_path": facts.model.id,
        "model_revision": facts.model.revision,
        "global_q_heads": facts.model.num_q_heads,
        "global_kv_heads": facts.model.num_kv_heads,
    }
    if facts.calibration is not None:
        block |= {
            "prompt_sha256": facts.calibration.prompts_sha256,
            "tokens": facts.calibration.tokens_used,
            "max_tokens": facts.calibration.tokens_requested,
            "tp_size": facts.coverage.tp if facts.coverage else 1,
            "post_rope": True,
            "accumulator_dtype": "float64",
        }
    return block


def _manifest(
    result: FitResult, facts: Facts, fit_id: str, files: Mapping[str, tuple[FileRole, bytes]]
) -> Manifest:
    k, v, method = result.k, result.v, result.method
    digests = [file_digest(name, content) for name, (_, content) in files.items()]
    formats = {"safetensors": "safetensors", "json": "json"}
    entries = [
        {
            "path": one.path,
            "role": files[one.path][0],
            "size": one.size,
            "sha256": one.sha256,
            "format": formats.get(one.path.rpartition(".")[2], "torch-zip"),
        }
        for one in digests
    ]
    hadamard = {"hadamard": hadamard_name(facts.model.geometry)}
    fit = Fit(
        method=method.name,
        fit_id=fit_id,
        estimator=method.estimators,
        composition=method.composition and method.composition.model_copy(update=hadamard),
        calibration=facts.calibration,
        coverage=(facts.coverage or result.coverage) if method.needs else None,
        numerics=facts.numerics,
        moments=facts.moments,
        selection=None if facts.selection is None else _plain(facts.selection),
    )
    content = {
        "schema": schema_of(facts.model, facts.recipe),
        "id": str(facts.artifact_id),
        "created": facts.created,
        "digest": artifact_digest(digests),
        "tool": TOOL,
        "kind": "mla_latent" if facts.model.rotary_key else "rotation_pair",
        "format_version": k.format_version,
        "grouping": k.grouping,
        "transform": Transform(k=_side_transform(k), v=_side_transform(v)),
        "model": facts.model,
        "fit": fit,
        "recipe": _recipe(result, facts),
        "files": tuple(map(FileEntry.model_validate, entries)),
        "statistics": _statistics_block(result),
        "quality": _quality(result, facts),
        "license": License(artifact=None, model=None, calibration_data=None),
        "provenance": Provenance(kind="computed"),
    }
    return Manifest.model_validate(content)


def _recipe(result: FitResult, facts: Facts) -> ServingRecipe:
    """The recipe with the capabilities that the method requires. It forbids folding the value
    transform into the weights where that product is not exact."""
    requires = {*facts.recipe.requires, *result.method.requires}
    requires |= {"latent"} if facts.model.rotary_key else set()
    update: dict[str, object] = {"requires": tuple(c for c in CAPABILITIES if c in requires)}
    model = facts.model
    # That product is exact for unquantized weights without an elementwise operation between
    # attention and o_proj; a model of which this is not known counts as the others.
    plain = model.weights is not None and model.weights.quantization is None
    if model.output_gate is not False or not plain:
        if facts.recipe.v_absorption == "required":
            raise UsageError(
                f"the value transform cannot be folded into the weights of {model.id}, which are"
                " quantized or gated, or nothing is known of them.",
                hint="use v_absorption allowed",
            )
        update["v_absorption"] = "forbidden"
    return facts.recipe.model_copy(update=update)


def _quality(result: FitResult, facts: Facts) -> dict[str, Any] | None:
    """The caller's results, with mean headroom and worst condition of the heads of each layer."""
    quality = _plain(facts.quality or {})
    for role, forecast in result.forecasts.items():
        numbers = {
            "headroom_per_layer": forecast.headroom.mean(-1),
            "condition_per_layer": forecast.condition.max(-1),
        }
        for name, values in numbers.items():
            quality.setdefault(name, {})[role] = [float(f"{value:.4g}") for value in values]
    return quality or None


def _plain(value: Mapping[str, Any]) -> dict[str, Any]:
    """JSON values, so that the manifest equals what is read back; raises `ValueError` for NaN."""
    plain: dict[str, Any] = json.loads(strict_json.canonical_bytes(value))
    return plain


def _side_transform(side: RotationSet) -> SideTransform:
    return SideTransform(name=side.transform, orthogonal=side.orthogonal, centered=side.centered)


def _statistics_block(result: FitResult) -> StatisticsBlock | None:
    if not result.targets or result.coverage is None:
        return None
    return StatisticsBlock(
        file=STATISTICS_NAME,
        version="oscar-zoo.stats/1",
        matrices=tuple(result.targets),
        n_tokens=result.coverage.tokens_max,
    )


def calibration_tag(
    tokens: int, prompts: int, recipe: ServingRecipe, geometry: Geometry, method: Method | None
) -> CalibrationTag:
    """The tag of a fit with this recipe; its average bits are named unless all codes have 2. The
    method is `None` while it is not chosen."""
    bits = None
    if recipe.widths is not None:
        bits = CacheSpec(None, None, recipe).stored_bits(geometry)
    variant = method.variant if method else None
    return CalibrationTag(tokens, prompts, recipe.group_size, variant, bits)
