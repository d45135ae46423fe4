"""`oscar-zoo mirror`: copy artifacts from hub to hub. Needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from oscar_zoo.cli import options
from oscar_zoo.cli.render import terminal

if TYPE_CHECKING:
    from oscar_zoo.registry.mirror import MirrorResult

_VERBS = {
    "copied": "Copied",
    "already there": "Already there",
    "would be copied": "Would copy",
    "proposed": "Proposed",
}


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
    source: str, target: str, names: tuple[str, ...], quiet: bool, as_json: bool, **flags: bool
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
    shown = not (quiet or as_json)
    results = _mirror(
        source, target, names, progress=shown, told=lambda result: _print(result, as_json), **flags
    )
    if as_json:
        rows = [_row(result) for result in results]
        terminal.emit_json(
            {"schema": "oscar-zoo.mirror/1", "source": source, "target": target, "artifacts": rows}
        )
    elif results and not (flags["dry_run"] or flags["create_pr"]):
        count = f"{len(results)} artifact{'s' if len(results) > 1 else ''}"
        terminal.note(f"{count}: both hubs list the same digests", quiet=quiet)


def _mirror(
    source: str,
    target: str,
    names: Sequence[str],
    *,
    everything: bool,
    progress: bool,
    told: Any,
    **flags: bool,
) -> tuple[MirrorResult, ...]:
    from oscar_zoo.cli.publishing import refuse_offline
    from oscar_zoo.errors import UsageError
    from oscar_zoo.hubs.address import open_hub
    from oscar_zoo.registry.mirror import MirrorOptions, mirror

    if bool(names) == everything:
        raise UsageError(
            "name artifacts, or ask for --all of them.",
            hint=f"see them: oscar-zoo list --hub {source}",
        )
    one, two = open_hub(source), open_hub(target)
    refuse_offline(one)
    refuse_offline(two)
    chosen = MirrorOptions(
        create=flags["create"], propose=flags["create_pr"], dry_run=flags["dry_run"]
    )
    with terminal.progress("bytes", enabled=progress) as advance:
        return mirror(
            one,
            two,
            names,
            options=chosen,
            told=told,
            progress=lambda name, done, total: advance(done, total, name),
        )


def _row(result: MirrorResult) -> dict[str, Any]:
    return {
        "id": str(result.id),
        "digest": result.digest,
        "outcome": result.outcome.replace(" ", "_"),
        "bytes": result.size,
        "proposal": result.proposal,
        "warnings": list(result.warnings),
    }


def _print(result: MirrorResult, as_json: bool) -> None:
    from oscar_zoo.artifact.outcome import warning_text

    if as_json:
        return
    reference, size = terminal.clean(result.id.reference), terminal.megabytes(result.size)
    terminal.out().print(f"{_VERBS[result.outcome]}: {reference}  {size}  {result.digest}")
    for warning in result.warnings:
        terminal.note(f"warning: {warning_text(warning)}")
    if result.proposal is not None:
        terminal.note(f"Next: ask its owner to merge {result.proposal}")
