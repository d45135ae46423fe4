"""`oscar-zoo pull`: fetch, verify, keep. Needs no torch."""

from __future__ import annotations

import click

from oscar_zoo.cli import options, render


@click.command("pull")
@click.argument("names", metavar="NAME[:TAG]...", nargs=-1, required=True)
@click.option("--accept-new-digest", is_flag=True, help="Replace a stored copy when the hub offers other bytes now.")
@options.hub_option
@options.quiet_option
@options.json_option
def command(names: tuple[str, ...], accept_new_digest: bool, hub: str | None, quiet: bool, as_json: bool) -> None:
    """Fetch artifacts by name, verify them, and keep them in the local store.

    A name that is here already is hashed again. Nothing is kept unless it passed every check.

    \b
    Examples:
      oscar-zoo pull Qwen3-8B --hub file:/srv/zoo
      oscar-zoo pull Qwen3-8B:seq20000_prompt83_group128
      oscar-zoo pull Qwen3-8B@sha256:3f9a12b4c5d6
    """
    from oscar_zoo.cli.targets import artifact_name
    from oscar_zoo.hubs.address import open_hub
    from oscar_zoo.registry.pull import pull
    from oscar_zoo.registry.store import Store

    source, store, rows = open_hub(hub), Store(), []
    for name in names:
        with render.progress("bytes", enabled=not (quiet or as_json)) as advance:
            result = pull(
                artifact_name(name),
                source,
                store,
                accept_new=accept_new_digest,
                progress=lambda file, done, total, advance=advance: advance(done, total, file),  # type: ignore[misc]
            )
        record, verified = result.artifact.record, result.verified
        rows.append(
            {
                "id": str(record.id),
                "digest": record.digest,
                "path": str(record.path),
                "already_present": result.already_present,
                "level": verified.level,
                "warnings": [*result.resolved.warnings, *verified.warnings],
                "first_use": result.first_use,
                "hub": source.name,
            }
        )
        if not as_json:
            _print(rows[-1], record.id.reference, quiet)
    if as_json:
        render.emit_json({"schema": "oscar-zoo.pull/1", "artifacts": rows})


def _print(row: dict[str, object], reference: str, quiet: bool) -> None:
    from oscar_zoo.cli.outcomes import warning_text

    console = render.out()
    if row["already_present"]:
        console.print(f"Already here and intact: {render.clean(reference)}  {row['digest']}")
    else:
        console.print(f"Pulled {render.clean(reference)} from {render.clean(row['hub'])}  {row['digest']}")
        console.print(f"verified to level {row['level']}; kept in {render.clean(row['path'])}")
    if row["first_use"]:
        render.note("first use: this artifact has no manifest; its digest is remembered from now on", quiet=quiet)
    for warning in row["warnings"] if isinstance(row["warnings"], list) else []:
        render.note(f"warning: {warning_text(str(warning))}", quiet=quiet)
    render.note(f"Next: oscar-zoo serve {reference}", quiet=quiet)
