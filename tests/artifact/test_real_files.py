"""Published rotation files: every one reads and verifies; skipped where they are absent."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny_rotations as tiny

from oscar_zoo.artifact.artifact_folder import verify_path
from oscar_zoo.artifact.files import read_file
from oscar_zoo.artifact.outcome import Rejected, Verified
from oscar_zoo.artifact.reader import read_rotation
from oscar_zoo.artifact.specs import Geometry
from oscar_zoo.artifact.tree import find_artifacts
from oscar_zoo.artifact.writer import rotation_bytes

SHARED = Path(__file__).resolve().parents[2].parent / "shared" / "real_artifacts"
FOLDERS = find_artifacts(SHARED)
HYBRID = Geometry(
    num_layers=32,
    num_q_heads=16,
    num_kv_heads=4,
    head_dim=256,
    v_head_dim=256,
    attention_layers=tuple(range(3, 32, 4)),
)
pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(not FOLDERS, reason="the published rotation files are not here"),
]


def geometry(folder: Path) -> Geometry | None:
    return HYBRID if folder.parent.name == "Qwen3.5-4B" else None


@pytest.mark.parametrize(
    "folder", FOLDERS, ids=lambda folder: f"{folder.parent.name}/{folder.name}"
)
def test_every_pair_verifies(folder: Path) -> None:
    outcome = verify_path(folder, geometry=geometry(folder))
    assert isinstance(outcome, Verified), outcome
    assert (outcome.level, outcome.grade) == ("numeric", "fp64")
    assert set(outcome.warnings) <= {"pair.unproven"}
    assert outcome.k is not None
    assert outcome.v is not None


@pytest.mark.parametrize(
    "path",
    [p for f in FOLDERS for p in sorted(f.glob("*.pt"))],
    ids=lambda p: "/".join(p.parts[-3:]),
)
def test_every_file_survives_the_canonical_writer(path: Path) -> None:
    found = read_rotation(read_file(path), what=path.name)
    assert isinstance(verify_path(path, geometry=geometry(path.parent)), Verified)
    again = rotation_bytes(found)
    tiny.assert_same(read_rotation(again, what="rewritten"), found)
    assert rotation_bytes(read_rotation(again, what="rewritten")) == again


@pytest.mark.parametrize(
    "folder", [f for f in FOLDERS if geometry(f)], ids=lambda folder: folder.name
)
def test_hybrid_layers_are_not_checked_where_the_model_is_not_known(folder: Path) -> None:
    outcome = verify_path(folder)
    assert isinstance(outcome, Verified)
    assert set(outcome.warnings) <= {"pair.unproven", "layers.not_checked"}
    check = next(check for check in outcome.checks if check.name == "model")
    assert check.state == "not checked" and "cover of layers not checked" in check.detail
    strict = verify_path(folder, strict=True)
    assert isinstance(strict, Rejected)
    assert (strict.stage, strict.code) == ("schema", "layers.gaps")
