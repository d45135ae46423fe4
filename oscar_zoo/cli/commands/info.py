"""`oscar-zoo info`: everything known about one model or artifact. Needs no torch."""

from __future__ import annotations

import click

from oscar_zoo.cli import options, render


@click.command("info")
@click.argument("name", metavar="NAME[:TAG]")
@options.hubs_option
@options.json_option
def command(name: str, hubs: tuple[str, ...], as_json: bool) -> None:
    """Show what is known about a model of the zoo, or one of its artifacts.

    \b
    Examples:
      oscar-zoo info Qwen3-8B
      oscar-zoo info Qwen3-8B:seq20000_prompt83_group128 --json
    """
    from oscar_zoo.cli.describe import describe, print_facts

    facts = describe(name, hubs)
    if as_json:
        render.emit_json({"schema": "oscar-zoo.info/1"} | facts)
    else:
        print_facts(facts)
