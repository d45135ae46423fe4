"""Draw the report of a fit again from its numbers, or the spectra of a moments file.

Only a moments file needs torch; a report is drawn from the JSON that `compute` wrote.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from oscar_zoo.artifact.output_files import check_file, write_file
from oscar_zoo.errors import MalformedFile, PathNotFound, UsageError

if TYPE_CHECKING:
    from oscar_zoo.compute.report.data import ReportData

_MOMENTS = ".safetensors"
_FORMATS = (".html", ".png")
_SOURCES = "give NAME.report.json or a moments file, as `oscar-zoo compute` writes them"


@dataclass(frozen=True)
class ReportRequest:
    """What to draw, and where to.

    Attributes:
        source: a report in JSON, a moments file, the folder of an artifact with its report beside
            it, or a folder that holds exactly one report or moments file.
        output: an .html or .png file; `None` for a page beside the source.
    """

    source: str
    output: Path | None = None


@dataclass(frozen=True)
class Drawn:
    """A report that was drawn.

    Attributes:
        source: the file that was read.
        path: the file that was written.
        data: the numbers in it.
    """

    source: Path
    path: Path
    data: ReportData


def draw_report(source: str | Path, output: str | Path | None = None) -> Drawn:
    """Draw the report of a fit again from its numbers, or the spectra of a moments file.

    Args:
        source: `NAME.report.json`, a moments file, or the folder of an artifact with one of them
            beside it.
        output: an .html or .png file; `None` for a page beside the source.

    Returns:
        `source`, `path` of what was drawn, and `data`, the numbers in it.

    Raises:
        PathNotFound: the source, or the folder of the output, does not exist.
        UsageError: the source holds several reports, or the output names neither format.
        MalformedFile: the source is of another kind, or breaks the rules of its format.
    """
    request = ReportRequest(str(source), None if output is None else Path(output))
    return draw(request)


def draw(request: ReportRequest) -> Drawn:
    """Draw a report as a page or as a picture."""
    from oscar_zoo.compute.report.page import render_html, render_png

    source = _find_source(request.source)
    target = _check_output(request.output or source.with_suffix(".html"))
    data = _read(source)
    content = render_html(data) if target.suffix.lower() == ".html" else render_png(data)
    write_file(target, content)
    return Drawn(source, target, data)


def _find_source(text: str) -> Path:
    """The file to draw: `text` itself, or the one that lies beside or in the folder `text`."""
    from oscar_zoo.compute.report.data import SUFFIX
    from oscar_zoo.registry.verify import existing_path

    path = existing_path(Path(text).expanduser())
    if path.is_file():
        if path.suffix not in (".json", _MOMENTS):
            message = f"{text} is neither a report nor a moments file."
            raise MalformedFile("report.kind", message, hint=_SOURCES)
        return path
    beside = path.resolve().parent / f"{path.resolve().name}{SUFFIX}"
    if beside.is_file():
        return beside
    found = sorted(path.glob(f"*{SUFFIX}")) or sorted(path.glob(f"*moments{_MOMENTS}"))
    if not found:
        raise PathNotFound(f"no report in or beside {text}.", hint=_SOURCES)
    if len(found) > 1:
        raise UsageError(
            f"{text} holds {len(found)} reports.", hint=f"name one, for example {found[0]}"
        )
    return found[0]


def _check_output(path: Path) -> Path:
    """`path`, if it names a format and can be written."""
    if path.suffix.lower() not in _FORMATS:
        wrong = f"has the ending {path.suffix}, a format that is not supported"
        raise UsageError(
            f"--output {path} {wrong if path.suffix else 'has no ending that says its format'}.",
            hint=f"end it in {' or '.join(_FORMATS)}",
        )
    check_file(path)
    return path


def _read(path: Path) -> ReportData:
    """The report in a JSON file, or that of a moments file."""
    from oscar_zoo.artifact.files import read_file
    from oscar_zoo.compute.report.data import MAX_BYTES, ReportData
    from oscar_zoo.engines.requirements import require_compute

    if path.suffix != _MOMENTS:
        return ReportData.from_bytes(read_file(path, max_bytes=MAX_BYTES), what=str(path))
    require_compute()
    from oscar_zoo.compute.moments_file import load_moments
    from oscar_zoo.compute.report.of_moments import report_of_moments

    return report_of_moments(*load_moments(path))
