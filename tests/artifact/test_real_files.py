"""Published rotation files of a hybrid model; what holds of all is in
`contrib/reliability/reading_experiments.py`."""

from __future__ import annotations

from pathlib import Path

import pytest
from real_files import folders, geometry

from oscar_zoo.artifact.artifact_folder import verify_path
from oscar_zoo.artifact.outcome import Rejected, Verified

FOLDERS = folders()
pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(not FOLDERS, reason="the published rotation files are not here"),
]


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
