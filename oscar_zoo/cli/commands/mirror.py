"""`oscar-zoo mirror`: copy artifacts from hub to hub. Needs no torch."""

from __future__ import annotations

import click

from oscar_zoo.cli import options
from oscar_zoo.cli.render import terminal


@click.command("mirror")
@click.argument("source", metavar="SRC")
@click.argument("target", metavar="DST")
@click.argument("names", metavar="[NAME]...", nargs=-1)
@click.option("--all", "everything", is_flag=True, help="Every artifact of SRC.")
@click.option(
    "--create", is_flag=True, help="Create DST, a repository or a folder, if there is none."
)
@options.create_pr_option
@click.option("--dry-run", is_flag=True, help="Show what would be copied, and copy nothing.")
@options.quiet_option
@options.json_option
def command(
    source: str,
    target: str,
    names: tuple[str, ...],
    create_pr: bool,
    dry_run: bool,
    quiet: bool,
    as_json: bool,
    **flags: bool,
) -> None:
    """Copy artifacts from the hub SRC to the hub DST, byte for byte, and compare both listings
    afterwards.

    A NAME without a tag means all versions of a model. Every artifact is verified before it is
    written; what DST has already, with the same digest, is skipped. Status, scores and aliases of
    the index go along.

    \b
    Examples:
      oscar-zoo mirror hf:Zhongzhu/OSCAR-RotationZoo file:/srv/zoo --all
      oscar-zoo mirror file:/srv/zoo ms:my-org/zoo Qwen3-8B Qwen3-32B:seq16000_prompt69_group128
    """
    from oscar_zoo.app.mirror import MirrorRequest, mirror_all
    from oscar_zoo.cli.render.mirrored import mirror_row, print_mirrored
    from oscar_zoo.cli.render.progress import TerminalObserver
    from oscar_zoo.registry.writing import ignore

    request = MirrorRequest(source, target, names, propose=create_pr, dry_run=dry_run, **flags)
    with TerminalObserver(quiet=quiet, as_json=as_json) as observer:
        results = mirror_all(request, observer, ignore if as_json else print_mirrored)
    if as_json:
        rows = [mirror_row(result) for result in results]
        terminal.emit_json(
            {"schema": "oscar-zoo.mirror/1", "source": source, "target": target, "artifacts": rows}
        )
    elif results and not (dry_run or create_pr):
        count = f"{len(results)} artifact{'s' if len(results) > 1 else ''}"
        terminal.note(f"{count}: both hubs list the same digests", quiet=quiet)
