"""`oscar-zoo plot`: a report from its JSON, spectra from moments, and what a tired person gets
wrong."""

from __future__ import annotations

import contextlib
import io
import subprocess
from pathlib import Path

import pytest
from cli_output import parsed
from random_moments import describe, random_moments
from site_pages import sample_report

from oscar_zoo.cli import main as cli
from oscar_zoo.compute.moments_file import save_moments
from oscar_zoo.compute.report.data import ReportData


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    """A command line, run in this process."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = cli.run([str(argument) for argument in arguments])
    return subprocess.CompletedProcess(arguments, status, out.getvalue(), err.getvalue())


def small_report() -> ReportData:
    """With one chart, quick to draw."""
    return sample_report(2).model_copy(
        update={"errors": (), "clip": None, "spectra": None, "headroom": None}
    )


@pytest.fixture
def report(tmp_path: Path) -> Path:
    """Beside the folder of its artifact."""
    (tmp_path / "artifact").mkdir()
    path = tmp_path / "artifact.report.json"
    path.write_bytes(small_report().to_bytes())
    return path


def test_a_folder_means_the_report_beside_or_in_it(report: Path, tmp_path: Path) -> None:
    assert run("plot", tmp_path / "artifact").returncode == 0
    assert run("plot", tmp_path, "--output", tmp_path / "again.html").returncode == 0
    assert (tmp_path / "again.html").read_bytes() == (
        tmp_path / "artifact.report.html"
    ).read_bytes()


def test_the_ending_of_the_output_chooses_the_format(report: Path, tmp_path: Path) -> None:
    assert run("plot", report, "--output", tmp_path / "p.PNG").returncode == 0
    assert (tmp_path / "p.PNG").read_bytes().startswith(b"\x89PNG")


def test_json_gives_the_numbers_and_where_the_page_is(report: Path) -> None:
    done = run("plot", report, "--json")
    facts = parsed(done.stdout)
    assert done.returncode == 0 and facts["schema"] == "oscar-zoo.plot/1"
    assert Path(facts["path"]).is_file()
    assert facts["report"] == small_report().to_json()


def test_moments_give_their_spectra(tmp_path: Path) -> None:
    moments = random_moments()
    save_moments(tmp_path / "moments.safetensors", moments, describe(moments))
    assert run("plot", tmp_path / "moments.safetensors").returncode == 0
    page = (tmp_path / "moments.html").read_text()
    assert "oscar-zoo/random" in page and "Eigenvalue spectra" in page and "<table>" not in page


def refused(code: int, *arguments: object) -> str:
    """The one line on stderr of a command that must fail with `code`."""
    done = run("plot", *arguments)
    assert done.returncode == code and done.stdout == "", done
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
    return done.stderr


def test_wrong_sources(tmp_path: Path) -> None:
    assert "no such file" in refused(3, tmp_path / "nothing.json")
    assert "no report in or beside" in refused(3, tmp_path)
    (tmp_path / "rotation.pt").write_bytes(b"x")
    # another exit code than that of `fit` for the same file would be a trap for scripts
    assert "neither a report nor a moments file" in refused(4, tmp_path / "rotation.pt")
    for name in ("a", "b"):
        (tmp_path / f"{name}.report.json").write_bytes(b"{}")
    assert "a.report.json" in refused(2, tmp_path)


@pytest.mark.parametrize(
    "content", [b"", b"{", b"{}", b"<html>", b'{"schema":"oscar-zoo.report/1"}', b"\xff"]
)
def test_broken_reports(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "r.report.json").write_bytes(content)
    assert "r.report.json" in refused(4, tmp_path / "r.report.json")
    assert [path.name for path in tmp_path.iterdir()] == ["r.report.json"]


def test_wrong_outputs(report: Path, tmp_path: Path) -> None:
    for name in ("report.pdf", "p"):
        assert ".html or .png" in refused(2, report, "--output", tmp_path / name)
    assert "no such folder" in refused(3, report, "--output", tmp_path / "gone" / "r.html")
    assert "cannot write /proc/r.html" in refused(8, report, "--output", "/proc/r.html")
    (tmp_path / "folder.html").mkdir()
    assert "is a folder" in refused(2, report, "--output", tmp_path / "folder.html")
