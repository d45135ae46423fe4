"""`oscar-zoo cache`: look at the local store, check it, and give its disk back. Needs no torch and
asks no hub."""

from __future__ import annotations

import click

from oscar_zoo.cli import completing, options
from oscar_zoo.cli.render import terminal


@click.group("cache")
def command() -> None:
    """Look after the artifacts that were pulled: list, check, remove, free space.

    \b
    Examples:
      oscar-zoo cache list
      oscar-zoo cache verify
      oscar-zoo cache rm Qwen3-8B:seq20000_prompt83_group128
      oscar-zoo cache gc --dry-run
    """


@command.command("list", short_help="Show what is stored, and how much room it takes.")
@options.json_option
def list_command(as_json: bool) -> None:
    """Show what is stored, from where, and how much room it takes.

    \b
    Examples:
      oscar-zoo cache list
      oscar-zoo cache list --json
    """
    from oscar_zoo.app.cache import stored
    from oscar_zoo.cli.render.stored import emit_stored, print_stored

    (emit_stored if as_json else print_stored)(stored())


@command.command("verify", short_help="Hash and verify every stored artifact again.")
@options.json_option
def verify_command(as_json: bool) -> int:
    """Hash every stored file again and verify every artifact; exit code 4 if one is damaged.

    \b
    Examples:
      oscar-zoo cache verify
      oscar-zoo cache verify --json
    """
    from oscar_zoo.app.cache import check
    from oscar_zoo.cli.render.stored import emit_checks, print_checks

    checks = check()
    if as_json:
        emit_checks(checks)
    else:
        print_checks(checks)
    return 4 if any(found.problem for found in checks) else 0


@command.command("gc", short_help="Remove what no stored artifact needs.")
@click.option("--dry-run", is_flag=True, help="Only say what would go.")
@options.json_option
def gc_command(dry_run: bool, as_json: bool) -> None:
    """Remove what no stored artifact needs: unused files, leftovers of killed processes, old
    listings of hubs.

    \b
    Examples:
      oscar-zoo cache gc --dry-run
      oscar-zoo cache gc
    """
    from oscar_zoo.app.cache import collect
    from oscar_zoo.cli.render.stored import emit_collected, print_collected

    report = collect(dry_run=dry_run)
    if as_json:
        emit_collected(report, dry_run=dry_run)
    else:
        print_collected(report, dry_run=dry_run)


@command.command("rm", short_help="Remove artifacts from the store.")
@click.argument(
    "names", metavar="NAME[:TAG]...", nargs=-1, required=True, shell_complete=completing.stored
)
@options.json_option
def rm_command(names: tuple[str, ...], as_json: bool) -> None:
    """Remove artifacts from the store. They can be pulled again as long as a hub has them.

    \b
    Examples:
      oscar-zoo cache rm Qwen3-8B
      oscar-zoo cache rm Qwen3-8B:seq20000_prompt83_group128 Qwen3-4B@sha256:3f9a12b4c5d6
    """
    from oscar_zoo.app.cache import remove
    from oscar_zoo.cli.render.stored import record_row
    from oscar_zoo.registry.targets import parse_name

    rows = [record_row(record) for record in remove([parse_name(name) for name in names])]
    if as_json:
        terminal.emit_json({"schema": "oscar-zoo.cache-rm/1", "removed": rows})
        return
    for row in rows:
        terminal.out().print(f"Removed {terminal.clean(row['reference'])}  {row['digest']}")


@command.command("dir", short_help="Print the folder of the store.")
@options.json_option
def dir_command(as_json: bool) -> None:
    """Print the folder of the store; the variable OSCAR_ZOO_CACHE moves it.

    \b
    Examples:
      oscar-zoo cache dir
      du -sh "$(oscar-zoo cache dir)"
    """
    from oscar_zoo import paths

    if as_json:
        terminal.emit_json({"schema": "oscar-zoo.cache-dir/1", "path": str(paths.cache_dir())})
    else:
        click.echo(paths.cache_dir())
