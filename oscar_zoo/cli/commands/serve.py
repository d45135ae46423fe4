"""`oscar-zoo serve`: a model with an INT2 KV cache, in stock SGLang."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click

from oscar_zoo.cli import completing, options, parsing
from oscar_zoo.cli.engine_flags import EngineCommand
from oscar_zoo.cli.optional_choice import OptionalChoice
from oscar_zoo.cli.render import terminal
from oscar_zoo.errors import ServerFailed, UsageError

if TYPE_CHECKING:
    from oscar_zoo.app.serve_request import ServeRequest
    from oscar_zoo.cli.render.progress import TerminalObserver


@click.command("serve", cls=EngineCommand)
@click.argument("artifact", metavar="NAME|DIR|MODEL", shell_complete=completing.names_or_paths)
@options.engine_flags_argument
@options.served_model_options
@click.option(
    "--port",
    type=click.IntRange(1, 65535),
    default=30000,
    show_default=True,
    envvar="OSCAR_ZOO_PORT",
    metavar="PORT",
    help="Port to listen on.",
)
@click.option(
    "--expose",
    metavar="ADDRESS",
    help="Listen on this address instead of loopback; needs --require-key or --api-key-file.",
)
@click.option(
    "--require-key",
    is_flag=True,
    help="Make an API key that requests need, and show it once.",
)
@options.api_key_file_option
@click.option(
    "--allow-origin",
    multiple=True,
    metavar="URL",
    help="Web pages of this origin may ask and read; by default none may. Can be repeated.",
)
@click.option(
    "--engine-api",
    is_flag=True,
    help=(
        "Clients may set every field of the engine's own requests, some of which can end a server."
        " Only on this machine; by default they may set what OpenAI's API and the documents name."
    ),
)
@click.option("--clip", metavar="K,V", help="Clip ratios to use in place of the recipe's.")
@click.option(
    "--drafts",
    cls=OptionalChoice,
    choices=("auto", "mtp", "ngram"),
    usual="auto",
    help=(
        "Guess tokens ahead and check several in one step: with the model's own layer (mtp), from"
        " text that repeats itself (ngram), or the first where there is one (auto, also without a"
        " value). On a GPU."
    ),
)
@options.start_timeout_option("How long to wait until it is ready.")
@click.option(
    "--detach", is_flag=True, help="Return when it is ready; it goes on in the background."
)
@click.option(
    "--print",
    "print_only",
    is_flag=True,
    help="Show the command and its variables instead of running it.",
)
@options.computing_options
@options.offline_option
@options.hubs_option
@options.device_option
@options.quiet_option
@options.json_option
def command(
    artifact: str,
    engine_flags: tuple[str, ...],
    clip: str | None,
    print_only: bool,
    quiet: bool,
    as_json: bool,
    **choices: Any,
) -> int:
    """Serve a model with an INT2 KV cache over the OpenAI-compatible API.

    The artifact is a NAME of the zoo, or a folder that begins with ./, ../, / or ~. It is verified,
    rewritten from the verified arrays into a private folder, and handed to stock SGLang. Everything
    after -- goes to SGLang, except flags that would open the server.

    --print shows the command for a shell: stock SGLang with this plugin, which takes the artifact
    by its name or folder and reads it with the same checks. It needs neither a GPU nor SGLang;
    --device cuda says that a GPU will run it.

    Requests on this machine need no key. --require-key makes one, and an exposed server always
    needs one. Routes that change a server are closed.

    --detach returns when the server is ready, which then outlives the terminal: see it with
    `oscar-zoo ps` and `oscar-zoo logs`, end it with `oscar-zoo stop`.

    Where nobody has an artifact for the model, one can be computed first: on a terminal you are
    asked, elsewhere --compute says so. It goes to your own zoo, where the next run finds it.

    --drafts is speculative decoding: greedy answers stay the same, and come sooner where guesses
    are right and few requests run at a time. Without it there are no drafts.

    \b
    Examples:
      oscar-zoo serve Qwen3-8B
      oscar-zoo serve ./my-rotation --model ./my-model --port 30001
      oscar-zoo serve ./my-model --compute
      oscar-zoo serve Qwen3-8B --detach
      oscar-zoo serve Qwen3-8B --drafts
      oscar-zoo serve Qwen3-8B -- --tp=2 --context-length=65536
      oscar-zoo serve Qwen3-8B --print --device cuda
    """
    from oscar_zoo.app.serve_request import ServeRequest
    from oscar_zoo.cli.render.progress import TerminalObserver, can_ask
    from oscar_zoo.registry.targets import parse

    if choices["offline"]:
        options.go_offline()
    ask = can_ask() and not as_json
    clipped = parsing.parse_clip(clip)
    request = ServeRequest(parse(artifact), extra=engine_flags, clip=clipped, ask=ask, **choices)
    if print_only and request.detach:
        raise UsageError(
            "--print starts nothing that could be detached.", hint="leave out one of the two"
        )
    with TerminalObserver(quiet=quiet, as_json=as_json) as observer:
        if print_only:
            return _print(request, observer, as_json=as_json)
        if request.detach:
            return _detach(request, observer, as_json=as_json)
        return _serve(request, observer, quiet=quiet, as_json=as_json)


def _print(request: ServeRequest, observer: TerminalObserver, *, as_json: bool) -> int:
    from oscar_zoo.app.serve_command import command as make
    from oscar_zoo.cli.render.serve_command import command_facts, shell_text
    from oscar_zoo.observer import Note

    made = make(request, observer)
    for warning in made.warnings:
        observer.note(Note("server.environment", warning))
    if as_json:
        terminal.emit_json(command_facts(made))
    else:
        sys.stdout.write(shell_text(made) + "\n")
    return 0


def _detach(request: ServeRequest, observer: TerminalObserver, *, as_json: bool) -> int:
    from oscar_zoo.app.artifacts import warning_note
    from oscar_zoo.app.detach import start_detached
    from oscar_zoo.cli.render.ready import print_ready

    said, status = start_detached(request, observer)
    if status is not None:
        error = said["error"]
        terminal.print_error(error["code"], error["message"], error["hint"], as_json=as_json)
        return status
    if as_json:
        terminal.emit_json(said)
    else:
        for warning in said["warnings"]:
            observer.note(warning_note(warning))
        stop = f"oscar-zoo stop {request.port}"
        print_ready(said, stop=stop, new_key=request.require_key)
    return 0


def _serve(request: ServeRequest, observer: TerminalObserver, *, quiet: bool, as_json: bool) -> int:
    from oscar_zoo.app.serve import start
    from oscar_zoo.cli.render.ready import print_ready, ready_facts

    silent = quiet or as_json
    with start(request, observer) as server:
        facts = ready_facts(
            server, port=request.port, key_file=request.api_key_file or server.key_file
        )
        try:
            if as_json:
                terminal.emit_json(facts)
            else:
                print_ready(facts, stop="Ctrl-C", new_key=request.require_key)
            server.wait(lambda requests: terminal.note(_draining(requests), quiet=silent))
        except KeyboardInterrupt:
            terminal.note("Stopped.", quiet=silent)
            return 130
        except SystemExit:
            terminal.note("Stopped by SIGTERM.", quiet=silent)
            return 0
        except ServerFailed as error:
            if not as_json:
                raise
            # stdout has its one object already
            terminal.print_error(error.code, error.message, error.hint, as_json=False)
            return 1
    return 0


def _draining(requests: int | None) -> str:
    """What is said at SIGTERM, where so many requests run."""
    from oscar_zoo.engines.sglang.launch.server import DRAIN_SECONDS

    if requests == 0:
        return "SIGTERM: no request runs."
    which = {None: "running requests finish", 1: "1 running request finishes"}
    finish = which.get(requests, f"{requests} running requests finish")
    return f"SIGTERM: {finish} first, for up to {DRAIN_SECONDS:.0f} s; a second signal ends them."
