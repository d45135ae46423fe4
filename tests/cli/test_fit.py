"""`compute`, `fit` and `merge-moments` as people run them: one capture, many methods."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from oscar_zoo.cli.main import run

ROOT = Path(__file__).resolve().parents[2]
MODEL = str(ROOT / "examples" / "models" / "tiny-qwen3-hard")
TEXT = ROOT / "examples" / "text" / "calibration.txt"


def told(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, object]:
    """The JSON of a command that must succeed."""
    capsys.readouterr()
    code = run([str(argument) for argument in (*arguments, "--json")])
    out, err = capsys.readouterr()
    assert code == 0, (out, err)
    result: dict[str, object] = json.loads(out)
    return result


def compute(capsys: pytest.CaptureFixture[str], folder: Path, text: Path, method: str) -> dict[str, object]:
    return told(
        capsys,
        "compute",
        MODEL,
        "--calib-data",
        text,
        "--calib-tokens",
        512,
        "--method",
        method,
        "--output-dir",
        folder,
    )


@pytest.fixture
def halves(tmp_path: Path) -> list[Path]:
    """Two texts without a common document."""
    text = TEXT.read_text("utf-8")
    places = [tmp_path / "one.txt", tmp_path / "two.txt"]
    for place, part in zip(places, (text[:40_000], text[-40_000:]), strict=True):
        place.write_text(part)
    return places


def test_one_capture_gives_what_every_method_would_have_computed(
    tmp_path: Path, halves: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    first = compute(capsys, tmp_path / "oscar", halves[0], "oscar")
    moments = first["moments"]
    for method in ("wush", "oscar-per-head", "oscar"):
        fitted = told(capsys, "fit", moments, "--method", method, "--output-dir", tmp_path / f"fit-{method}")
        again = compute(capsys, tmp_path / f"again-{method}", halves[0], method)
        assert fitted["digest"] == again["digest"], method
        assert run(["verify", str(tmp_path / f"fit-{method}"), "--strict"]) == 0


def test_captures_of_other_text_add_up(tmp_path: Path, halves: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    parts = [compute(capsys, tmp_path / half.stem, half, "wush")["moments"] for half in halves]
    merged = told(capsys, "merge-moments", *parts, "--output", tmp_path / "both.safetensors")
    assert merged["tokens"] == 1024
    told(capsys, "fit", merged["path"], "--method", "wush", "--output-dir", tmp_path / "both")
    assert run(["merge-moments", str(parts[0]), str(parts[0]), "--output", str(tmp_path / "twice.safetensors")]) == 2
    assert not (tmp_path / "twice.safetensors").exists()
    assert run(["fit", str(merged["path"]), "--method", "oscar", "--output-dir", str(tmp_path / "lost")]) == 1
    assert not (tmp_path / "lost").exists()


def test_a_file_that_holds_no_moments_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "no.safetensors").write_bytes(b"<html>")
    for path in (tmp_path / "no.safetensors", tmp_path / "absent.safetensors"):
        assert run(["fit", str(path), "--method", "wush", "--output-dir", str(tmp_path / "out")]) in (3, 4)
        assert capsys.readouterr().err.count("\n") == 1
        assert not (tmp_path / "out").exists()
