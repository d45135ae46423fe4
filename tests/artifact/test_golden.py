"""Committed files of every format version read the same forever, and the writer still makes the
same bytes."""

from pathlib import Path

import pytest
import tiny_artifacts as tiny
from tiny_artifacts import folders, geometry

from oscar_zoo.artifact.artifact_folder import verify_path
from oscar_zoo.artifact.files import read_file, sha256_hex
from oscar_zoo.artifact.outcome import Rejected, Verified
from oscar_zoo.artifact.reader import GROUPINGS, read_rotation
from oscar_zoo.artifact.writer import rotation_bytes

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
FILES = {path.name: path for path in sorted(GOLDEN.rglob("*.pt"))}
FACTS: dict[str, tuple[int, str, str, bool]] = {
    "k_rotation_qqt_r_h_pbr.pt": (1, "qqt_r_h_pbr", "layer", True),
    "v_rotation_sst_r_h_pbr.pt": (1, "sst_r_h_pbr", "layer", True),
    "k_rotation_perhead.pt": (2, "qqt_r_h_pbr", "kv_head", True),
    "v_rotation_perhead.pt": (2, "vtv_r_h_pbr", "kv_head", True),
    "k_rotation_wush.pt": (3, "wush_k", "kv_head", False),
    "v_rotation_wush.pt": (3, "wush_v", "kv_head", False),
}
SHA256 = dict(reversed(one.split("  ")) for one in (GOLDEN / "SHA256SUMS").read_text().splitlines())


@pytest.mark.parametrize("name", FACTS)
def test_golden_files(name: str) -> None:
    data = read_file(FILES[name])
    assert sha256_hex(data) == SHA256[str(FILES[name].relative_to(GOLDEN))]
    found = read_rotation(data, what=name)
    assert (found.format_version, found.objective, found.grouping, found.orthogonal) == FACTS[name]
    assert (found.layer_ids, found.head_dim) == ((0, 1), tiny.D)
    assert rotation_bytes(found) == data


@pytest.mark.parametrize("folder", sorted(GOLDEN.glob("format*")), ids=lambda path: path.name)
def test_golden_artifacts_verify(folder: Path) -> None:
    outcome = verify_path(folder)
    assert isinstance(outcome, Verified)
    assert outcome.grade == ("fp64" if folder.name in ("format1", "format2") else outcome.grade)


def test_every_format_has_a_golden_pair() -> None:
    assert FILES.keys() == FACTS.keys()
    assert {fact[0] for fact in FACTS.values()} == set(GROUPINGS)
    assert all(path.stat().st_size < 8000 for path in FILES.values())


FOLDERS = folders()


@pytest.mark.real
@pytest.mark.skipif(not FOLDERS, reason="the published rotation files are not here")
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
