"""From a fit to the bytes of an artifact: rotation files, statistics, manifest. Pure; nothing is written here.

The payload depends on the model, the data, the options and this version only: no time, no path of the machine. The
time of making stands in the manifest, which is no part of the digest.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace

from oscar_zoo import __version__
from oscar_zoo.artifact import statistics, strict_json, writer
from oscar_zoo.artifact.digest import artifact_digest, file_digest
from oscar_zoo.artifact.formats import CalibrationValue, Role, RotationSet
from oscar_zoo.artifact.manifest import (
    FILE_NAME,
    SCHEMA,
    STATISTICS_NAME,
    Calibration,
    FileEntry,
    FileRole,
    Fit,
    License,
    Manifest,
    ModelBlock,
    Numerics,
    Provenance,
    SideTransform,
    StatisticsBlock,
    Transform,
)
from oscar_zoo.artifact.names import ArtifactId
from oscar_zoo.artifact.specs import CAPABILITIES, Harness, ServingRecipe
from oscar_zoo.compute.fit import FitResult
from oscar_zoo.compute.methods.base import Matrix

TOOL = Harness(name="oscar-zoo", version=__version__)


@dataclass(frozen=True)
class Facts:
    """All that the manifest says beside the fit itself. `calibration` and `numerics` are `None` without data."""

    artifact_id: ArtifactId
    model: ModelBlock
    recipe: ServingRecipe
    calibration: Calibration | None
    numerics: Numerics | None
    created: str


def assemble(result: FitResult, facts: Facts) -> dict[str, bytes]:
    """File name -> content of the whole artifact, `oscar.json` included."""
    fit_id = _fit_id(result, facts)
    files: dict[str, tuple[FileRole, bytes]] = {}
    sides: tuple[tuple[Role, FileRole, RotationSet], ...] = (
        ("k", "k_rotation", result.k),
        ("v", "v_rotation", result.v),
    )
    for role, file_role, side in sides:
        labelled = replace(side, calibration=_calibration_block(facts, fit_id))
        files[_file_name(role, side, result.method.name)] = (file_role, writer.rotation_bytes(labelled))
    if result.targets:
        targets: dict[str, Matrix] = dict(result.targets.items())
        fingerprint = statistics.fingerprint_bytes(targets, result.k.layer_ids, facts.model.id, facts.model.revision)
        files[STATISTICS_NAME] = ("statistics", fingerprint)
    manifest = _manifest(result, facts, fit_id, files)
    return {name: content for name, (_, content) in files.items()} | {FILE_NAME: manifest.to_bytes()}


def _file_name(role: Role, side: RotationSet, method: str) -> str:
    return f"{role}_rotation_{side.objective if side.format_version == 1 else method}.pt"


def _fit_id(result: FitResult, facts: Facts) -> str:
    """32 hex digits that K and V of one fit share and no other fit has: from inputs, options and matrices."""
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
            "tp_size": 1,
            "post_rope": True,
            "accumulator_dtype": "float64",
        }
    return block


def _manifest(result: FitResult, facts: Facts, fit_id: str, files: Mapping[str, tuple[FileRole, bytes]]) -> Manifest:
    k, v = result.k, result.v
    digests = [file_digest(name, content) for name, (_, content) in files.items()]
    requires = {*facts.recipe.requires, *k.requires, *v.requires}
    content = {
        "schema": SCHEMA,
        "id": str(facts.artifact_id),
        "created": facts.created,
        "digest": artifact_digest(digests),
        "tool": TOOL,
        "kind": "rotation_pair",
        "format_version": k.format_version,
        "grouping": k.grouping,
        "transform": Transform(k=_side_transform(k), v=_side_transform(v)),
        "model": facts.model,
        "fit": _fit_block(result, facts, fit_id),
        "recipe": facts.recipe.model_copy(update={"requires": tuple(c for c in CAPABILITIES if c in requires)}),
        "files": tuple(
            FileEntry(path=d.path, role=files[d.path][0], size=d.size, sha256=d.sha256, format=_format(d.path))
            for d in digests
        ),
        "statistics": _statistics_block(result),
        "license": License(artifact=None, model=None, calibration_data=None),
        "provenance": Provenance(kind="computed"),
    }
    return Manifest.model_validate(content)


def _fit_block(result: FitResult, facts: Facts, fit_id: str) -> Fit:
    return Fit(
        method=result.method.name,
        fit_id=fit_id,
        estimator=result.method.estimators,
        composition=result.method.composition,
        calibration=facts.calibration,
        coverage=result.coverage,
        numerics=facts.numerics,
    )


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


def _format(path: str) -> str:
    return "safetensors" if path.endswith(".safetensors") else "torch-zip"
