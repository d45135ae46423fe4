"""Small artifacts with real rotation files, for tests of everything that moves or checks them."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oscar_zoo.artifact.artifact_folder import find_artifacts
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


def cache_shape(
    layers: int, *, heads: int, kv_heads: int, dim: int, v_dim: int = 0, at: Sequence[int] = ()
) -> Geometry:
    """Of a model with attention in the layers `at`, or in all."""
    heads_of = {"num_q_heads": heads, "num_kv_heads": kv_heads, "head_dim": dim}
    rest = {"v_head_dim": v_dim or dim, "attention_layers": tuple(at or range(layers))}
    return Geometry(num_layers=layers, **heads_of, **rest)


TINY = cache_shape(4, heads=4, kv_heads=2, dim=64)
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
        eigenvalues = eigenvalues.astype(np.float32)
        layers.append(LayerTransform(layer, matrix, matrix, eigenvalues=eigenvalues))
    return RotationSet(1, objective, "layer", "oscar", True, False, tuple(layers))


def payload(*, seed: int = 0, geometry: Geometry = TINY, proven: bool = True) -> dict[str, bytes]:
    """The two rotation files of an artifact. Unless `proven`, they do not say that they come from
    one fit, which is a warning of verification."""
    label = {"generation_id": "0" * 32} if proven else {}
    k = rotation("qqt_r_h_pbr", seed=seed, geometry=geometry, spread=0.02)
    v = rotation("sst_r_h_pbr", seed=seed, geometry=geometry, spread=0.10)
    return {
        K_NAME: rotation_bytes(replace(k, calibration=label)),
        V_NAME: rotation_bytes(replace(v, calibration=label)),
    }


UNKNOWN_FIT: dict[str, Any] = dict.fromkeys(
    "fit_id estimator composition calibration coverage numerics".split()
)


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
        fit=Fit(method="oscar", **UNKNOWN_FIT),
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
    folder.mkdir(parents=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return folder


D = 8
LAYERS = (0, 1)
HEADS = 2


def covariances(*shape: int, d: int = D, seed: int = 1, spread: float = 3.0) -> NDArray[np.float64]:
    """`[*shape, d, d]` float64 second moments of correlated channels of unequal size."""
    rng = np.random.default_rng(seed)
    rows = rng.standard_normal((*shape, 4 * d, d)) * np.exp(rng.uniform(0, spread, (*shape, 1, d)))
    rows = rows @ np.linalg.qr(rng.standard_normal((*shape, d, d)))[0]
    return np.asarray(np.swapaxes(rows, -2, -1) @ rows / (4 * d))


def rotated(covariance: NDArray[np.float64], layer_id: int) -> LayerTransform:
    values, vectors = np.linalg.eigh(covariance)
    d = values.shape[-1]
    matrix = (vectors @ hadamard(d))[..., pbr_permutation(np.arange(d, dtype=np.float64))].astype(
        np.float32
    )
    return LayerTransform(layer_id, matrix, matrix, eigenvalues=values.astype(np.float32))


def rotation_set(
    objective: str = "qqt_r_h_pbr",
    *,
    matrices: NDArray[np.float64] | None = None,
    layers: Sequence[int] = LAYERS,
) -> RotationSet:
    if matrices is None:
        matrices = covariances(len(layers), seed=len(objective) + ord(objective[0]))
    found = tuple(rotated(matrix, layer) for layer, matrix in zip(layers, matrices, strict=True))
    return RotationSet(1, objective, "layer", "oscar", True, False, found)


def per_head_set(objective: str = "qqt_r_h_pbr") -> RotationSet:
    found = tuple(
        rotated(matrix, layer) for layer, matrix in zip(LAYERS, covariances(2, HEADS), strict=True)
    )
    return RotationSet(2, objective, "kv_head", "oscar", True, False, found)


def hadamard_set(layers: Sequence[int] = LAYERS, d: int = D) -> RotationSet:
    matrix, ones = hadamard(d).astype(np.float32), np.ones(d, dtype=np.float32)
    found = tuple(LayerTransform(layer, matrix, matrix, eigenvalues=ones) for layer in layers)
    return RotationSet(1, "hadamard", "layer", "hadamard", True, False, found)


def partnered_set(side: str = "k") -> RotationSet:
    """Format 3, not orthogonal, keys also centered, one matrix per layer and KV head."""
    rng = np.random.default_rng(5)
    found = []
    for layer in LAYERS:
        forward = per_head_set().layers[layer].forward.astype(np.float64) * np.exp(
            rng.uniform(-1, 1, (HEADS, 1, D))
        )
        forward = forward.astype(np.float32)
        partner = np.swapaxes(np.linalg.inv(forward.astype(np.float64)), -2, -1).astype(np.float32)
        mean = rng.standard_normal((HEADS, D)).astype(np.float32) if side == "k" else None
        eigenvalues = np.sort(rng.uniform(1, 9, (HEADS, D)), axis=-1).astype(np.float32)
        found.append(LayerTransform(layer, forward, partner, mean, eigenvalues))
    role = "k" if side == "k" else "v"
    return RotationSet(
        3, f"wush_{side}", "kv_head", "wush", False, side == "k", tuple(found), {}, role
    )


def fed_back_set() -> RotationSet:
    """`partnered_set` whose keys are rounded with feedback."""
    weights = np.random.default_rng(6).standard_normal((HEADS, D * (D - 1) // 2))
    made, feedback = partnered_set(), weights.astype(np.float16).astype(np.float32)
    layers = (replace(layer, feedback=feedback + layer.layer_id) for layer in made.layers)
    return replace(made, layers=tuple(layers))


def change(rotations: RotationSet, **arrays: NDArray[np.float32]) -> RotationSet:
    """`rotations` with other arrays in its last layer."""
    last = replace(rotations.layers[-1], **arrays)
    if rotations.orthogonal:
        last = replace(last, partner=last.forward)
    return replace(rotations, layers=(*rotations.layers[:-1], last))


def assert_same(one: RotationSet, other: RotationSet) -> None:
    """Equal in every field, arrays bit for bit."""
    names = "format_version objective grouping transform orthogonal centered declared_role"
    for name in (*names.split(), "calibration", "layer_ids"):
        assert getattr(one, name) == getattr(other, name)
    for mine, theirs in zip(one.layers, other.layers, strict=True):
        for name in ("forward", "partner", "mean", "eigenvalues", "feedback"):
            a, b = getattr(mine, name), getattr(theirs, name)
            assert (a is None) == (b is None)
            assert a is None or (
                a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()
            )


SHARED = Path(__file__).resolve().parents[2].parent / "shared" / "real_artifacts"
ZOO = SHARED / "OSCAR-RotationZoo"
"""`<Model>/<tag>` folders, as a hub has them."""
HYBRID = cache_shape(32, heads=16, kv_heads=4, dim=256, at=tuple(range(3, 32, 4)))
"""Of Qwen3.5-4B, whose other layers keep a state."""


def folders() -> list[Path]:
    return list(find_artifacts(SHARED))


def geometry(folder: Path) -> Geometry | None:
    """The shape of the model of `folder`, where its files alone do not say it."""
    return HYBRID if folder.parent.name == "Qwen3.5-4B" else None


def absent() -> str | None:
    return None if folders() else "the published rotation files are not here"
