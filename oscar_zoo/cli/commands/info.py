"""`oscar-zoo info`: everything known about one model or artifact. Needs no torch."""

from __future__ import annotations

import click

from oscar_zoo.cli import completing, options, parsing
from oscar_zoo.cli.render import terminal


@click.command("info")
@click.argument("name", metavar="NAME[:TAG]|DIR", shell_complete=completing.names_or_paths)
@click.option(
    "--gpu-memory", metavar="SIZE", help="Say what fits on a GPU of this size, such as 24GiB."
)
@options.offline_option
@options.hubs_option
@options.json_option
def command(
    name: str, gpu_memory: str | None, offline: bool, hubs: tuple[str, ...], as_json: bool
) -> None:
    """Show what is known about a model, or one of its artifacts.

    A folder with a rotation is described by its oscar.json and the scores beside it, and its files
    are verified. A model that is not in the zoo is given by its folder, or by its id where its
    config.json was fetched before. What works for its architecture is shown then.

    How much memory weights and cache take, and how many tokens fit on the GPUs of this machine, is
    an estimate.

    \b
    Examples:
      oscar-zoo info Qwen3-8B
      oscar-zoo info Qwen3-8B --gpu-memory 24GiB
      oscar-zoo info Qwen3-8B:seq20000_prompt83_group128 --json
      oscar-zoo info ./my-rotation
      oscar-zoo info ./my-model
    """
    from oscar_zoo.app.browse import describe
    from oscar_zoo.app.folder_description import describe_folder
    from oscar_zoo.cli.render.described import facts_of, print_facts
    from oscar_zoo.observer import SILENT
    from oscar_zoo.registry.hubs.address import Sources
    from oscar_zoo.registry.targets import ModelTarget, PathTarget, looking_up, parse
    from oscar_zoo.serving.prepared import check_served

    memory = None if gpu_memory is None else parsing.parse_memory(gpu_memory)
    target = parse(name)
    if isinstance(target, ModelTarget):
        check_served(target.choice)
    if isinstance(target, PathTarget):
        found = describe_folder(target, gpu_memory=memory)
    else:
        sources = Sources(hubs, offline=offline)
        with looking_up(target, SILENT):
            found = describe(target, sources, gpu_memory=memory, any_model=True)
    facts = facts_of(found)
    if as_json:
        terminal.emit_json({"schema": "oscar-zoo.info/1"} | facts)
    else:
        print_facts(facts)
