"""`oscar-zoo chat`: talk to a server that runs."""

from __future__ import annotations

from pathlib import Path

import click

from oscar_zoo.cli import options
from oscar_zoo.cli.render import terminal


@click.command("chat")
@click.argument("name", metavar="[NAME|PORT]", required=False)
@options.api_key_file_option
@click.option(
    "--max-tokens",
    type=click.IntRange(1),
    default=1024,
    show_default=True,
    metavar="TOKENS",
    help="Longest answer; a model that thinks first may need more.",
)
def command(name: str | None, api_key_file: Path | None, max_tokens: int) -> int:
    """Talk to a server that `oscar-zoo serve` runs on this machine.

    Every line is a question. /new starts another conversation, Ctrl-C ends an answer, Ctrl-D ends
    the chat, and so does Ctrl-C twice. Any other /WORD alone is refused. Lines can also come from a
    pipe.

    \b
    Examples:
      oscar-zoo chat
      oscar-zoo chat 30000
      echo Hello | oscar-zoo chat Qwen3-8B
    """
    import sys

    from oscar_zoo.app import server_records
    from oscar_zoo.app.api_key import read_key
    from oscar_zoo.app.chat import ChatSession
    from oscar_zoo.app.server_keys import key_of
    from oscar_zoo.cli.render.chat import talk
    from oscar_zoo.engines.sglang.launch.ports import client_url
    from oscar_zoo.errors import ServerFailed

    record = server_records.find(name, "chat")
    if record.state == "starting":
        raise ServerFailed(
            f"{record.model} on port {record.port} is still starting.",
            hint=f"try again when it is ready; what it does: oscar-zoo logs {record.port}",
        )
    key = read_key(api_key_file) if api_key_file else key_of(record)
    terminal.note(
        f"{record.model} on port {record.port}. /new forgets, Ctrl-D ends.",
        quiet=not sys.stdin.isatty(),
    )
    talk(ChatSession(client_url(record.url), record.model, key=key, most=max_tokens))
    return 0
