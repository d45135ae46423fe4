"""`oscar-zoo chat`: talk to a server that runs."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click

from oscar_zoo.cli import options
from oscar_zoo.cli.render import terminal

_NAME = re.compile("[A-Za-z0-9._:@/~-]+")
"""What can be a name of a server, where a question could stand, too."""


@click.command("chat")
@click.argument("server", metavar="[NAME|PORT]", required=False)
@click.argument("question", metavar="[QUESTION]", required=False)
@options.api_key_file_option
@click.option(
    "--max-tokens",
    type=click.IntRange(1),
    default=1024,
    show_default=True,
    metavar="TOKENS",
    help="Longest answer; a model that thinks first may need more.",
)
@options.json_option
def command(
    server: str | None,
    question: str | None,
    api_key_file: Path | None,
    max_tokens: int,
    as_json: bool,
) -> int:
    """Talk to a server that `oscar-zoo serve` runs on this machine, or ask it one question.

    One word of letters, digits and ._:@/~- is the name or the port of a server, and a QUESTION of
    one word follows it. All that comes from a pipe is one question, too. With a QUESTION nothing is
    read.

    On a terminal every line is a question, and so is a text of many lines that is pasted. Arrow
    keys edit, and up brings back what was typed. /new starts another conversation, Ctrl-C ends an
    answer. Ctrl-D, /bye and Ctrl-C twice end the chat. Any other /WORD alone is refused.

    \b
    Examples:
      oscar-zoo chat
      oscar-zoo chat 30000
      oscar-zoo chat "Why is the sky blue?"
      oscar-zoo chat Qwen3-8B Hello --json
      cat question.txt | oscar-zoo chat Qwen3-8B
    """
    import sys

    from oscar_zoo.app import server_records
    from oscar_zoo.app.api_key import read_key
    from oscar_zoo.app.chat import ChatSession
    from oscar_zoo.app.server_keys import key_of
    from oscar_zoo.cli.render.chat import answer, answer_facts, talk
    from oscar_zoo.engines.sglang.launch.ports import client_url
    from oscar_zoo.errors import ServerFailed, ServerNotFound, UsageError

    if server is not None and question is None and not _NAME.fullmatch(server):
        server, question = None, server
    asks = question is not None or not sys.stdin.isatty()
    if as_json and not asks:
        raise UsageError(
            "--json needs a question.", hint='add one: oscar-zoo chat "Why is the sky blue?" --json'
        )
    try:
        record = server_records.find(server, "chat")
    except ServerNotFound as error:
        here = server_records.running()
        if server is not None and here:  # one word, or several without quotes
            words = shlex.quote(" ".join(filter(None, (server, question))))
            error.advise(f"if that is a question: oscar-zoo chat {here[0].port} {words}")
        raise
    if record.state == "starting":
        raise ServerFailed(
            f"{record.model} on port {record.port} is still starting.",
            hint=f"try again when it is ready; what it does: oscar-zoo logs {record.port}",
        )
    key = read_key(api_key_file) if api_key_file else key_of(record)
    session = ChatSession(client_url(record.url), record.model, key=key, most=max_tokens)
    if not asks:
        terminal.note(f"{record.model} on port {record.port}. /new forgets, Ctrl-D ends.")
        talk(session)
        return 0
    question = (sys.stdin.read() if question is None else question).strip("\r\n")
    if not question.strip():
        raise UsageError(
            "stdin holds no question.",
            hint='write it behind: oscar-zoo chat "Why is the sky blue?"',
        )
    if as_json:
        terminal.emit_json(answer_facts(session, question, record))
    else:
        answer(session, question)
    return 0
