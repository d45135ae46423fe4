"""`oscar-zoo publish`: put an artifact folder on a hub. Needs no torch."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import click

from oscar_zoo.cli import options


@click.command("publish")
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
@click.option(
    "--alias",
    "aliases",
    multiple=True,
    metavar="NAME",
    help="Another name of this version. Can be repeated.",
)
@click.option(
    "--create", is_flag=True, help="Create the repository, or the folder, if there is none."
)
@options.create_pr_option
@click.option(
    "--scores",
    multiple=True,
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Score file to attach beside scores.json of the folder. Can be repeated.",
)
@click.option("--allow-warnings", is_flag=True, help="Publish although verification has warnings.")
@click.option(
    "--allow-poor",
    is_flag=True,
    help="Publish although perplexity is more than 5 % above BF16; the index says so.",
)
@click.option(
    "--unmeasured",
    is_flag=True,
    help="Publish although perplexity or recall was not measured; the index says so.",
)
@click.option(
    "--sign",
    is_flag=True,
    help=(
        "Refuse to publish without a key in OSCAR_ZOO_SIGN_KEY, which signs the artifact and the"
        " index of the hub."
    ),
)
@click.option("--dry-run", is_flag=True, help="Show exactly what would be sent, and send nothing.")
@options.targets_option
@options.quiet_option
@options.json_option
def command(
    folder: Path, hubs: tuple[str, ...], create_pr: bool, quiet: bool, as_json: bool, **flags: Any
) -> int:
    """Put an artifact folder on a hub, as a version that never changes.

    The folder is verified by the strict rules first; then its files, the hub's index and its card
    are written in one commit, read back and tagged. Publishing the same content again succeeds
    quietly, and repairs what an interrupted run left undone; other content under the same name and
    tag is refused (exit code 7). The report of the fit beside the folder goes along.

    Perplexity and recall must have been measured under the recipe, by oscar-zoo compute when it
    chose the method or by oscar-zoo eval, which leaves scores.json in the folder. A GPQA score is
    recommended for models from about 100 million parameters on.

    With a private key of the curve P-256 in the file that OSCAR_ZOO_SIGN_KEY names, the version
    gets a signature file, model.sig in the format of OpenSSF Model Signing, and the index of the
    hub a signed timestamp, valid for 90 days. Publishing again renews the timestamp.

    \b
    Examples:
      oscar-zoo publish ./my-rotation
      oscar-zoo publish ./my-rotation --hub hf:my-org/zoo --hub ms:my-org/zoo --dry-run
      oscar-zoo publish ./my-rotation --hub hf:their-org/zoo --create-pr
      oscar-zoo publish ./my-rotation --scores gpqa.json
      oscar-zoo publish ./my-rotation --unmeasured
    """
    from oscar_zoo.app.publish import PublishRequest, publish_all
    from oscar_zoo.cli.main import exit_code
    from oscar_zoo.cli.render import writing
    from oscar_zoo.cli.render.progress import TerminalObserver
    from oscar_zoo.registry.writing import ignore

    request = PublishRequest(folder, hubs, propose=create_pr, **flags)
    show = ignore if as_json else partial(writing.print_published, quiet=quiet)
    with TerminalObserver(quiet=quiet, as_json=as_json) as observer:
        report = publish_all(request, observer, show)
    rows = [writing.publish_row(written) for written in report.done]
    writing.emit_report("oscar-zoo.publish/1", rows, report.error, as_json=as_json)
    return exit_code(report.error)
