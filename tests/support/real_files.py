"""Published rotation files, where this machine has them."""

from __future__ import annotations

from pathlib import Path

from oscar_zoo.artifact.artifact_folder import find_artifacts
from oscar_zoo.artifact.specs import Geometry

SHARED = Path(__file__).resolve().parents[2].parent / "shared" / "real_artifacts"
ZOO = SHARED / "OSCAR-RotationZoo"
"""`<Model>/<tag>` folders, as a hub has them."""
HYBRID = Geometry(
    num_layers=32,
    num_q_heads=16,
    num_kv_heads=4,
    head_dim=256,
    v_head_dim=256,
    attention_layers=tuple(range(3, 32, 4)),
)
"""Of Qwen3.5-4B, whose other layers keep a state."""


def folders() -> list[Path]:
    """The folders of all artifacts that are here."""
    return list(find_artifacts(SHARED))


def geometry(folder: Path) -> Geometry | None:
    """The shape of the model of `folder`, where its files alone do not say it."""
    return HYBRID if folder.parent.name == "Qwen3.5-4B" else None


def absent() -> str | None:
    """Why they cannot be read, or `None`."""
    return None if folders() else "the published rotation files are not here"
