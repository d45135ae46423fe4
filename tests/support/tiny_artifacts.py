"""Small artifacts with real rotation files, for tests of everything that moves or checks them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from oscar_zoo.artifact.files import artifact_digest, file_digest
from oscar_zoo.artifact.formats import LayerTransform, RotationSet, hadamard, pbr_permutation
from oscar_zoo.artifact.manifest import (
    FILE_NAME,
    WIDTHS_NAME,
    FileEntry,
    FileRole,
    Fit,
    License,
    Manifest,
    ModelBlock,
    Provenance,
    SideTransform,
    Transform,
)
from oscar_zoo.artifact.specs import Clip, Geometry, Harness, ServingRecipe, Widths
from oscar_zoo.artifact.writer import rotation_bytes

TINY = Geometry(
    num_layers=4,
    num_q_heads=4,
    num_kv_heads=2,
    head_dim=64,
    v_head_dim=64,
    attention_layers=(0, 1, 2, 3),
)
K_NAME, V_NAME = "k_rotation_qqt_r_h_pbr.pt", "v_rotation_sst_r_h_pbr.pt"


def rotation(
    objective: str, *, seed: int = 0, geometry: Geometry = TINY, spread: float = 0.02
) -> RotationSet:
    """A format-1 rotation `R = U H P` per attention layer; `spread` is how far U is from the
    identity."""
    random = np.random.default_rng([seed, len(objective), ord(objective[0])])
    dim = geometry.head_dim
    layers = []
    for layer in geometry.attention_layers:
        basis, _ = np.linalg.qr(np.eye(dim) + spread * random.standard_normal((dim, dim)))
        eigenvalues = np.sort(random.gamma(0.5, 1.0, dim) + 1e-3)
        matrix = ((basis @ hadamard(dim))[:, pbr_permutation(eigenvalues)]).astype(np.float32)
        layers.append(
            LayerTransform(layer, matrix, matrix, eigenvalues=eigenvalues.astype(np.float32))
        )
    return RotationSet(1, objective, "layer", "oscar", True, False, tuple(layers))


def payload(*, seed: int = 0, geometry: Geometry = TINY, proven: bool = True) -> dict[str, bytes]:
    """The two rotation files of an artifact; another `seed` gives other bytes.

    Unless `proven`, the files do not say that they come from one fit, which is a warning of
    verification.
    """
    label = {"generation_id": "0" * 32} if proven else {}
    k = rotation("qqt_r_h_pbr", seed=seed, geometry=geometry, spread=0.02)
    v = rotation("sst_r_h_pbr", seed=seed, geometry=geometry, spread=0.10)
    return {
        K_NAME: rotation_bytes(replace(k, calibration=label)),
        V_NAME: rotation_bytes(replace(v, calibration=label)),
    }


def manifest(
    files: dict[str, bytes],
    *,
    artifact: str = "tiny-qwen3-hard/seq512_prompt2_group64",
    geometry: Geometry = TINY,
    widths: Widths | None = None,
) -> Manifest:
    """The manifest of `payload()` files, and of `widths.json` where there are widths."""
    files = files if widths is None else {**files, WIDTHS_NAME: widths.to_bytes()}
    digests = [file_digest(name, data) for name, data in files.items()]
    recipe = ServingRecipe(group_size=geometry.head_dim, clip=Clip(k=0.96, v=0.92))
    return Manifest(
        schema="oscar-zoo.manifest/1" if widths is None else "oscar-zoo.manifest/2",
        id=artifact,
        created="2026-01-02T03:04:05Z",
        digest=artifact_digest(digests),
        tool=Harness(name="tests"),
        kind="rotation_pair",
        format_version=1,
        grouping="layer",
        transform=Transform(
            k=SideTransform(name="oscar", orthogonal=True),
            v=SideTransform(name="oscar", orthogonal=True),
        ),
        model=ModelBlock(
            **geometry.model_dump(),
            id=f"oscar-zoo/{artifact.split('/', maxsplit=1)[0]}",
            revision=None,
            config_sha256=None,
            rope=None,
            qk_norm=True,
            output_gate=False,
            weights=None,
            compatible_with=(),
        ),
        fit=Fit(
            method="oscar",
            fit_id=None,
            estimator=None,
            composition=None,
            calibration=None,
            coverage=None,
            numerics=None,
        ),
        recipe=recipe.with_widths(widths),
        files=tuple(
            FileEntry(
                path=d.path,
                role=_role(d.path),
                size=d.size,
                sha256=d.sha256,
                format="json" if d.path == WIDTHS_NAME else "torch-zip",
            )
            for d in digests
        ),
        license=License(artifact=None, model=None, calibration_data=None),
        provenance=Provenance(kind="computed"),
    )


def artifact_files(
    *,
    artifact: str = "tiny-qwen3-hard/seq512_prompt2_group64",
    seed: int = 0,
    with_manifest: bool = True,
    widths: Widths | None = None,
) -> dict[str, bytes]:
    """Every file of an artifact folder."""
    files = payload(seed=seed)
    if widths is not None:
        files[WIDTHS_NAME] = widths.to_bytes()
    if not with_manifest:
        return files
    made = manifest(payload(seed=seed), artifact=artifact, widths=widths)
    return {**files, FILE_NAME: made.to_bytes()}


def _role(name: str) -> FileRole:
    if name == WIDTHS_NAME:
        return "widths"
    return "k_rotation" if name.startswith("k") else "v_rotation"


def write_folder(folder: Path, files: dict[str, bytes]) -> Path:
    """Write `files` into `folder` and return it."""
    folder.mkdir(parents=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return folder
