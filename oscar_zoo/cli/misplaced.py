"""Options that stand in front of the command that has them."""

from __future__ import annotations

import click


def behind_its_command(error: click.NoSuchOption) -> str | None:
    """What to type where an option of a command was given to its group, as in `oscar-zoo --json
    list`; `None` for any other mistake."""
    from oscar_zoo.cli.main import OTHER_WORDS

    context = error.ctx
    if context is None:
        return None
    command: click.Command | None = context.command
    path = context.command_path
    typed = context.find_root().obj or ()
    for word in (ours for one in typed for ours in OTHER_WORDS.get(one, (one,))):
        if isinstance(command, click.Group) and word in command.list_commands(context):
            command = command.get_command(context, word)
            path = f"{path} {word}"
    if command is None or not any(error.option_name in known.opts for known in command.params):
        return None
    return f"put {error.option_name} behind the command: {path} {error.option_name}"
