"""`oscar-zoo serve`: a model with an INT2 KV cache, in stock SGLang."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from oscar_zoo.cli import build, options
from oscar_zoo.cli.engine_flags import FlagsCommand
from oscar_zoo.cli.render import terminal
from oscar_zoo.errors import ServerFailed
from oscar_zoo.serving.params import ServeParams
from oscar_zoo.verb import checked

if TYPE_CHECKING:
    from oscar_zoo.cli.render.progress import TerminalObserver
    from oscar_zoo.serving.serve import ReadyServer


def _body(as_json: bool, quiet: bool, **values: Any) -> int:
    from oscar_zoo.cli.render.progress import TerminalObserver, can_ask
    from oscar_zoo.cli.render.ready import shell_text
    from oscar_zoo.compute.serve import computed
    from oscar_zoo.serving.serve import command as make
    from oscar_zoo.verb import as_json as plain

    if values["offline"]:
        options.go_offline()
    params = replace(checked(ServeParams, values), ask=can_ask() and not as_json)
    with TerminalObserver(quiet=quiet, as_json=as_json) as observer:
        if params.detach:
            return _detach(params, observer, as_json=as_json)
        if not params.print_only:
            return _serve(params, observer, quiet=quiet or as_json, as_json=as_json)
        made = make(params, observer, computed)
    if as_json:
        terminal.emit_json(plain(made))
    else:
        sys.stdout.write(shell_text(made) + "\n")
    return 0


command = build.of_body("serve", ServeParams, _body, cls=FlagsCommand)


def _detach(params: ServeParams, observer: TerminalObserver, *, as_json: bool) -> int:
    from oscar_zoo.compute.serve import computed
    from oscar_zoo.registry.artifacts import warning_note
    from oscar_zoo.serving.detach import Refused, start_detached

    ready = start_detached(params, observer, computed)
    if isinstance(ready, Refused):
        terminal.print_error(ready.code, ready.message, ready.hint, as_json=as_json)
        return ready.status
    for warning in () if as_json else ready.warnings:
        observer.note(warning_note(warning))
    _show(ready, params, stop=ready.stop_command, as_json=as_json)
    return 0


def _serve(params: ServeParams, observer: TerminalObserver, *, quiet: bool, as_json: bool) -> int:
    from oscar_zoo.compute.serve import computed
    from oscar_zoo.serving.serve import start

    with start(params, observer, computed) as server:
        try:
            _show(server.facts, params, stop="Ctrl-C", as_json=as_json)
            server.wait(lambda requests: terminal.note(_draining(requests), quiet=quiet))
        except KeyboardInterrupt:
            terminal.note("Stopped.", quiet=quiet)
            return 130
        except SystemExit:
            terminal.note("Stopped by SIGTERM.", quiet=quiet)
            return 0
        except ServerFailed as error:
            if not as_json:
                raise
            terminal.print_failure(error)  # stdout has its one object already
            return 1
    return 0


def _show(ready: ReadyServer, params: ServeParams, *, stop: str, as_json: bool) -> None:
    from oscar_zoo.cli.render.ready import print_ready
    from oscar_zoo.verb import as_json as plain

    if as_json:
        terminal.emit_json(plain(ready))
    else:
        print_ready(ready, stop=stop, new_key=params.require_key)


def _draining(requests: int | None) -> str:
    """What is said at SIGTERM, where so many requests run."""
    from oscar_zoo.engines.sglang.launch.server import DRAIN_SECONDS

    if requests == 0:
        return "SIGTERM: no request runs."
    which = {None: "running requests finish", 1: "1 running request finishes"}
    finish = which.get(requests, f"{requests} running requests finish")
    return f"SIGTERM: {finish} first, for up to {DRAIN_SECONDS:.0f} s; a second signal ends them."
