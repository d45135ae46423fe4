"""Options that several commands share, each defined once."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from oscar_zoo.cli import completing
from oscar_zoo.errors import OFFLINE_OPTION
from oscar_zoo.registry.hubs.table import FORMS, WITHOUT_COMMITS

F = TypeVar("F", bound=Callable[..., Any])


def json_option(function: F) -> F:
    """`--json`: exactly one JSON object on stdout, on errors too."""
    return click.option(
        "--json", "as_json", is_flag=True, help="Print one JSON object instead of text."
    )(function)


def quiet_option(function: F) -> F:
    """`-q`: no progress, no notes."""
    return click.option("-q", "--quiet", is_flag=True, help="Print results and errors only.")(
        function
    )


def accept_quiet(command: click.Command) -> None:
    """Let `command`, or those of a group, take `-q` also where it only shows something: it then
    leaves out the notes."""
    for inner in getattr(command, "commands", {}).values():
        accept_quiet(inner)
    if not isinstance(command, click.Group) and not any(x.name == "quiet" for x in command.params):
        command.params.append(
            click.Option(
                ["-q", "--quiet"],
                is_flag=True,
                expose_value=False,
                callback=_leave_out_notes,
                help="Print results and errors only.",
            )
        )


def _leave_out_notes(context: click.Context, _: click.Parameter, value: bool) -> None:
    from oscar_zoo.cli.render import terminal

    terminal.NOTES.append(not value)
    context.call_on_close(terminal.NOTES.pop)


def hubs_option(function: F) -> F:
    """`--hub`, several times: where to read, in order."""
    return click.option(
        "--hub",
        "hubs",
        multiple=True,
        metavar="HUB",
        help=(
            f"Hub to use instead of the configured ones: {FORMS}; REPO@REV is the hub at a"
            " revision. Can be repeated: they are asked in order. [default: OSCAR_ZOO_HUB,"
            " config.toml, else your own zoo and the public ones]"
        ),
    )(function)


def targets_option(function: F) -> F:
    """`--hub`, several times: where to write."""
    return click.option(
        "--hub",
        "hubs",
        multiple=True,
        metavar="HUB",
        help=(
            f"Hub to write to: {FORMS}. Can be repeated: they are written in order, hubs without"
            f" commits ({WITHOUT_COMMITS}) last. [default: OSCAR_ZOO_HUB, `publish` of config.toml,"
            " else your own zoo]"
        ),
    )(function)


def signature_options(function: F) -> F:
    """`--require-signature` and `--key`: by whom an artifact has to be signed."""
    key = click.option(
        "--key",
        "keys",
        multiple=True,
        metavar="PUBLIC.pem",
        type=click.Path(path_type=Path),
        help=(
            "Public key of a publisher whose signatures are known, besides the key that the hub"
            " signs its index with and those shipped with oscar-zoo. Can be repeated."
        ),
    )
    required = click.option(
        "--require-signature",
        is_flag=True,
        help="Refuse an artifact without a valid signature of a known key (exit code 4).",
    )
    return required(key(function))


def create_pr_option(function: F) -> F:
    """`--create-pr`: for repositories of others."""
    return click.option(
        "--create-pr", is_flag=True, help="Open a pull request instead of committing."
    )(function)


def offline_option(function: F) -> F:
    """`--offline`: no request leaves."""
    return click.option("--offline", is_flag=True, help="Use what is on this machine; ask no hub.")(
        function
    )


def go_offline() -> None:
    """What `--offline` means for this process, for libraries imported later, and for servers that
    it starts."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "OSCAR_ZOO_OFFLINE": OFFLINE_OPTION}


def device_option(function: F) -> F:
    """`--device`: where torch runs."""
    return click.option(
        "--device",
        metavar="cpu|cuda[:N]",
        help="Where to run. [default: cuda if there is one, else cpu]",
    )(function)


def revision_option(function: F) -> F:
    """`--revision`: which commit of a model."""
    return click.option("--revision", metavar="COMMIT", help="Commit of a model on a hub.")(
        function
    )


def served_model_options(function: F) -> F:
    """`--model` and `--revision`: what an artifact is served with."""
    what = "Model folder, zoo name or hub id. [default: the artifact's base model]"
    return click.option("--model", metavar="MODEL", help=what, shell_complete=completing.models)(
        revision_option(function)
    )


def engine_flags_argument(function: F) -> F:
    """Everything after `--`, for the engine."""
    flags = click.argument(
        "engine_flags", nargs=-1, metavar="[-- ENGINE FLAGS]", type=click.UNPROCESSED
    )
    return flags(function)


def start_timeout_option(what: str) -> Callable[[F], F]:
    """`--timeout`: seconds, half an hour by default; `what` is its help."""
    kind = click.FloatRange(1)
    return click.option(
        "--timeout", type=kind, default=1800, show_default=True, metavar="SECONDS", help=what
    )


def computing_options(function: F) -> F:
    """`--compute` and what goes with it: for commands that can make an artifact that nobody has
    published."""
    for option in (
        click.option(
            "--calib-data",
            metavar="SOURCE",
            help=(
                "With --compute: text to calibrate on, as for oscar-zoo compute. [default: manuals]"
            ),
        ),
        click.option(
            "--compute",
            is_flag=True,
            help="Where no artifact exists, compute one and keep it in your zoo.",
        ),
    ):
        function = option(function)
    return function


def devices_option(function: F) -> F:
    """`--device`, for what can run on several."""
    return click.option(
        "--device",
        metavar="cpu|cuda[:N]|auto",
        help=(
            "Where to run; auto spreads the model over all GPUs. [default: cuda if there is"
            " one, else cpu]"
        ),
    )(function)


def stream_option(function: F) -> F:
    """`--stream-weights`: for models that are larger than memory."""
    return click.option(
        "--stream-weights/--no-stream-weights",
        default=None,
        help=(
            "Read weights layer by layer, so that one layer needs to fit. [default: when the"
            " model does not fit]"
        ),
    )(function)


def dtype_option(function: F) -> F:
    """`--dtype`: of the model's weights in memory."""
    return click.option(
        "--dtype",
        type=click.Choice(["auto", "float32", "bfloat16"]),
        default="auto",
        show_default=True,
        help="Type of the weights in memory; auto keeps the stored one.",
    )(function)


def api_key_file_option(function: F) -> F:
    """`--api-key-file`: the key that clients send."""
    return click.option(
        "--api-key-file",
        type=click.Path(path_type=Path),
        metavar="FILE",
        help="File holding the API key.",
    )(function)


def output_dir_option(function: F) -> F:
    """`--output-dir`: where a fitted artifact goes."""
    return click.option(
        "--output-dir",
        "output",
        type=click.Path(path_type=Path),
        metavar="DIR",
        help=(
            "Folder of the artifact. [default: ./<Model>/<tag>; where a model lies in ./<Model>,"
            " ./<Model>-rotation/<tag>]"
        ),
    )(function)


def recorded_clip_option(whose: str) -> Callable[[F], F]:
    """`--clip`, to record for serving; `whose` ratios are the default."""
    return click.option(
        "--clip",
        metavar="K,V",
        help=f"Clip ratios to record for serving. [default: {whose}, else 0.96,0.92]",
    )


def group_size_option(whose: str) -> Callable[[F], F]:
    """`--group-size`: channels per scale; `whose` is the default."""
    return click.option(
        "--group-size",
        type=click.IntRange(4),
        metavar="N",
        help=f"Channels per scale. [default: {whose}]",
    )


def max_loss_option(function: F) -> F:
    """`--max-loss`: bits by what they cost in perplexity."""
    return click.option(
        "--max-loss",
        metavar="PERCENT",
        help="In place of --bits: the fewest bits that raise perplexity by no more, such as 0.1%.",
    )(function)


def force_option(function: F) -> F:
    """`--force`: replace a fitted artifact."""
    return click.option(
        "--force", is_flag=True, help="Replace an artifact that is already in the output folder."
    )(function)
