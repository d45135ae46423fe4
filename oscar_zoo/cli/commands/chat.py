"""`oscar-zoo chat`: talk to a server that runs, or to a model in this process."""

from __future__ import annotations

import re
import shlex
import sys
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from oscar_zoo.artifact.names import is_path
from oscar_zoo.cli import build
from oscar_zoo.cli.render import terminal
from oscar_zoo.errors import ServerFailed, ServerNotFound, UsageError
from oscar_zoo.observer import Note
from oscar_zoo.registry.params import command_line, option_words
from oscar_zoo.serving.params import ChatParams

if TYPE_CHECKING:
    from oscar_zoo.serving.chat import ChatSession

_NAME = re.compile("[A-Za-z0-9._:@/~-]+")
"""What can be a name of a server, where a question could stand, too."""


def _body(as_json: bool, **values: Any) -> int:
    from oscar_zoo.cli.render.chat import answer, talk
    from oscar_zoo.registry.targets import choose_model
    from oscar_zoo.verb import as_json as plain

    params = ChatParams(**values)
    if params.server and params.question is None and not _NAME.fullmatch(params.server):
        params = replace(params, server=None, question=params.server)
    if params.model:  # before a question is missed: where it is no model, that is the mistake
        choose_model(params.model)
    session = None if params.model else _of_server(params, as_json)
    talks = params.question is None and sys.stdin.isatty()
    question = (params.question or ("" if talks else sys.stdin.read())).strip("\r\n")
    if (as_json or not talks) and not question.strip():
        taken = f": {params.server}, one word, is taken for a name" if params.server else ""
        model, word = str(params.model or ""), params.server or ""
        named = "NAME" if is_path(model) else model
        meant = [named, word] if model and word and not is_path(word) else [word, "Why so?"]
        line = shlex.join(["chat", *["--model", model] * bool(model), *filter(None, meant)])
        raise UsageError(f"there is no question{taken}.", hint=f"for example: oscar-zoo {line}")
    session = session or _loaded(params, as_json)
    if talks:
        where = f" on port {session.answer.port}" if session.answer.port else ""
        terminal.note(f"{session.answer.model_id}{where}. /new forgets, Ctrl-D ends.")
        talk(session)
    elif as_json:
        for _ in session.ask(question):
            pass
        terminal.emit_json(plain(session.answer))
    else:
        answer(session, question)
    return 0


command = build.of_body("chat", ChatParams, _body, quiet=False)


def _of_server(params: ChatParams, as_json: bool) -> ChatSession:
    """With the server that is meant, which must be ready."""
    from oscar_zoo.engines.sglang.launch.plan import client_url
    from oscar_zoo.serving import chat, records

    try:
        record = records.find(params.server, "chat")
    except ServerNotFound as error:
        here = records.running()
        if params.server and is_path(params.server):
            error.advise(f"without a server: oscar-zoo chat --model MODEL {params.server}")
        elif here and params.server and not params.server.isdigit():  # words without quotes
            words = " ".join(filter(None, (params.server, params.question)))
            meant = ["chat", str(here[0].port), words, *option_words(params), *["--json"] * as_json]
            error.advise(f"if that is a question: {command_line(meant)}")
        raise
    if record.state == "starting":
        raise ServerFailed(
            f"{record.model} on port {record.port} is still starting.",
            hint=f"try again when it is ready; what it does: oscar-zoo logs {record.port}",
        )
    key = records.read_key(params.api_key_file) if params.api_key_file else records.key_of(record)
    known = client_url(record.url), record.model, key, params.max_tokens
    return chat.ChatSession(partial(chat.server_events, *known), record.model, record.port)


def _loaded(params: ChatParams, as_json: bool) -> ChatSession:
    """With a model in this process. What can be wrong is found before its weights are read."""
    from oscar_zoo.cli.render.progress import TerminalObserver
    from oscar_zoo.engines.requirements import require_compute
    from oscar_zoo.evaluate.in_process import find_subject, load_subject
    from oscar_zoo.evaluate.params import EvalParams
    from oscar_zoo.serving.artifact_model import both_sides
    from oscar_zoo.serving.chat import ChatSession

    require_compute()
    model, device = str(params.model), params.device
    wanted = EvalParams(params.server or model, model=model, device=device, stream_weights=False)
    with TerminalObserver(as_json=as_json) as observer:
        subject = find_subject("chat", wanted, observer)
        from oscar_zoo.engines.transformers import cache, chat

        k, v = both_sides(subject.artifact)
        cache.check_made_for(subject.artifact, k, v, subject.block)
        settings = chat.settings_of(subject.choice.source)
        loaded = load_subject(wanted, subject.choice, observer, longest=1)
        bits = f"{subject.recipe.bits_per_element:.2f} bits on {loaded.device}"
        text = f"{loaded.block.id} with {subject.artifact.label}, {bits}."
        observer.note(Note("chat.model", text))
    made = cache.OscarCache(loaded.model, k, v, subject.recipe)
    return ChatSession(chat.Answering(loaded, made, settings, params.max_tokens), loaded.block.id)
