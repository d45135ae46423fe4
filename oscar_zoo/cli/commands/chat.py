"""`oscar-zoo chat`: talk to a server that runs."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from oscar_zoo.cli import build
from oscar_zoo.cli.render import terminal
from oscar_zoo.errors import ServerFailed, ServerNotFound, UsageError
from oscar_zoo.serving.params import ChatParams

if TYPE_CHECKING:
    from oscar_zoo.serving.records import ServerRecord

_NAME = re.compile("[A-Za-z0-9._:@/~-]+")
"""What can be a name of a server, where a question could stand, too."""


def _body(
    as_json: bool,
    server: str | None,
    question: str | None,
    api_key_file: Path | None,
    max_tokens: int,
) -> int:
    from oscar_zoo.cli.render.chat import answer, talk
    from oscar_zoo.engines.sglang.launch.plan import client_url
    from oscar_zoo.serving.chat import ChatSession
    from oscar_zoo.serving.records import key_of, read_key
    from oscar_zoo.verb import as_json as plain

    if server is not None and question is None and not _NAME.fullmatch(server):
        server, question = None, server
    asks = question is not None or not sys.stdin.isatty()
    if as_json and not asks:
        raise UsageError(
            "--json needs a question.", hint='add one: oscar-zoo chat "Why is the sky blue?" --json'
        )
    record = _find(server, question)
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
        for _ in session.ask(question):
            pass
        terminal.emit_json(plain(session.answer))
    else:
        answer(session, question)
    return 0


command = build.of_body("chat", ChatParams, _body, quiet=False)


def _find(server: str | None, question: str | None) -> ServerRecord:
    """The server that is meant, which must be ready."""
    from oscar_zoo.serving import records

    try:
        record = records.find(server, "chat")
    except ServerNotFound as error:
        here = records.running()
        if server is not None and here:  # one word, or several without quotes
            words = shlex.quote(" ".join(filter(None, (server, question))))
            error.advise(f"if that is a question: oscar-zoo chat {here[0].port} {words}")
        raise
    if record.state == "starting":
        raise ServerFailed(
            f"{record.model} on port {record.port} is still starting.",
            hint=f"try again when it is ready; what it does: oscar-zoo logs {record.port}",
        )
    return record
