"""`oscar-zoo serve`: a model with an INT2 KV cache, in stock SGLang."""

from __future__ import annotations

from pathlib import Path

import click

from oscar_zoo.cli import completing, options
from oscar_zoo.cli.engine_flags import EngineCommand
from oscar_zoo.errors import UsageError


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
    help="Listen on this address instead of loopback; needs --api-key-file.",
)
@click.option(
    "--api-key-file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="File holding the API key.",
)
@click.option("--clip", metavar="K,V", help="Clip ratios to use in place of the recipe's.")
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
@click.option(
    "--engine",
    type=click.Choice(["sglang", "oscar-fork"]),
    default="sglang",
    show_default=True,
    help="With --print: for stock SGLang, or for the fork that was published with OSCAR.",
)
@options.computing_options
@options.offline_option
@options.hubs_option
@options.device_option
@options.quiet_option
@options.json_option
def command(artifact: str, engine_flags: tuple[str, ...], **choices: object) -> int:
    """Serve a model with an INT2 KV cache over the OpenAI-compatible API.

    The artifact is a NAME of the zoo, or a folder that begins with ./, ../, / or ~. It is verified,
    rewritten from the verified arrays into a private folder, and handed to stock SGLang. Everything
    after -- goes to SGLang, except flags that would open the server.

    --print shows the command for a shell: stock SGLang with this plugin, which takes the artifact
    by its name or folder and reads it with the same checks. It needs neither a GPU nor SGLang;
    --device cuda says that a GPU will run it.

    --detach returns when the server is ready, which then outlives the terminal: see it with
    `oscar-zoo ps` and `oscar-zoo logs`, end it with `oscar-zoo stop`.

    Where nobody has an artifact for the model, one can be computed first: on a terminal you are
    asked, elsewhere --compute says so. It goes to your own zoo, where the next run finds it.

    \b
    Examples:
      oscar-zoo serve Qwen3-8B
      oscar-zoo serve ./my-rotation --model ./my-model --port 30001
      oscar-zoo serve ./my-model --compute
      oscar-zoo serve Qwen3-8B --detach
      oscar-zoo serve Qwen3-8B -- --tp=2 --context-length=65536
      oscar-zoo serve Qwen3-8B --print --device cuda
      oscar-zoo serve Qwen3-8B --print --engine oscar-fork
    """
    from oscar_zoo.cli.choosing import ServeRequest

    request = ServeRequest(artifact=artifact, extra=engine_flags, **choices)  # type: ignore[arg-type]
    if request.offline:
        options.go_offline()
    if request.print_only and request.detach:
        raise UsageError(
            "--print starts nothing that could be detached.", hint="leave out one of the two"
        )
    if request.print_only:
        from oscar_zoo.cli.printing import print_command

        return print_command(request)
    if request.engine != "sglang":
        raise UsageError(
            "oscar-zoo starts stock SGLang only.",
            hint=f"see the command for {request.engine}: add --print",
        )
    if request.detach:
        from oscar_zoo.cli.detaching import serve_detached

        return serve_detached(request)
    from oscar_zoo.cli.serving import serve

    return serve(request)
