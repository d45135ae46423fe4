"""`oscar-zoo plot`: draw the report of a fit again. Needs torch for moments files only."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from oscar_zoo.cli import options
from oscar_zoo.cli.render import terminal

if TYPE_CHECKING:
    from oscar_zoo.compute.report.data import ReportData

_MOMENTS = ".safetensors"
_FORMATS = (".html", ".png")
WANTED = "give NAME.report.json or a moments file, as `oscar-zoo compute` writes them"


@click.command("plot")
@click.argument("source", metavar="REPORT.json|MOMENTS|DIR")
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    metavar="FILE.html|.png",
    help="[default: the page, beside the source]",
)
@options.json_option
def command(source: str, output: Path | None, as_json: bool) -> None:
    """Draw a report again from its numbers, or the spectra of a moments file.

    The page is one HTML file that needs nothing else; the picture shows the same. DIR is an
    artifact's folder, with the report beside it, or a folder that holds one report or moments file.

    \b
    Examples:
      oscar-zoo plot ./Qwen3-8B/seq8192_prompt31_group128-wush.report.json
      oscar-zoo plot moments.safetensors --output spectra.png
    """
    from oscar_zoo.artifact import durable
    from oscar_zoo.cli.pasting import typed
    from oscar_zoo.compute.report.page import render_html, render_png

    path = find_source(source)
    target = check_output(output or default_output(path))
    data = read_source(path)
    content = render_html(data) if target.suffix.lower() == ".html" else render_png(data)
    with durable.storage_errors(f"cannot write {target}"):
        durable.replace_file(target, content)
    if as_json:
        facts = {
            "schema": "oscar-zoo.plot/1",
            "source": typed(path),
            "path": typed(target),
            "report": data.to_json(),
        }
        terminal.emit_json(facts)
    else:
        terminal.out().print(f"Saved {terminal.clean(typed(target))}")


def find_source(text: str) -> Path:
    """The file to draw: `text` itself, or what stands beside or in the folder `text`.

    Raises:
        PathNotFound: nothing is there, or nothing to draw.
        UsageError: a folder with several, or a file of another kind.
    """
    from oscar_zoo.compute.report.data import SUFFIX
    from oscar_zoo.errors import PathNotFound, UsageError
    from oscar_zoo.registry.verification import existing_path

    path = existing_path(text)
    if path.is_file():
        if path.suffix not in (".json", _MOMENTS):
            raise UsageError(f"{text} is neither a report nor a moments file.", hint=WANTED)
        return path
    beside = path.resolve().parent / f"{path.resolve().name}{SUFFIX}"
    if beside.is_file():
        return beside
    found = sorted(path.glob(f"*{SUFFIX}")) or sorted(path.glob(f"*moments{_MOMENTS}"))
    if not found:
        raise PathNotFound(f"no report in or beside {text}.", hint=WANTED)
    if len(found) > 1:
        raise UsageError(
            f"{text} holds {len(found)} reports.", hint=f"name one, for example {found[0]}"
        )
    return found[0]


def default_output(source: Path) -> Path:
    """The page beside `source`: the same name with another ending."""
    return source.with_suffix(".html")


def check_output(path: Path) -> Path:
    """`path`, when it names a format and its folder is there.

    Raises:
        UsageError: another ending, or a folder.
        PathNotFound: its folder does not exist.
    """
    from oscar_zoo.errors import PathNotFound, UsageError

    if path.suffix.lower() not in _FORMATS:
        raise UsageError(
            f"--output {path} says no format.", hint=f"end it in {' or '.join(_FORMATS)}"
        )
    if path.is_dir():
        raise UsageError(f"{path} is a folder.", hint="name a file")
    if not path.parent.is_dir():
        raise PathNotFound.for_path(path.parent, "folder")
    return path


def read_source(path: Path) -> ReportData:
    """The report in a JSON file, or that of a moments file.

    Raises:
        MalformedFile, StorageError: from reading it.
        MissingDependency: moments without torch.
    """
    from oscar_zoo.artifact.files import read_file
    from oscar_zoo.cli.loading import require_compute
    from oscar_zoo.compute.report.data import MAX_BYTES, ReportData

    if path.suffix != _MOMENTS:
        return ReportData.from_bytes(read_file(path, max_bytes=MAX_BYTES), what=str(path))
    require_compute()
    from oscar_zoo.compute.moments_file import load_moments
    from oscar_zoo.compute.report.of_moments import report_of_moments

    return report_of_moments(*load_moments(path))
