"""The command group: a command's module is loaded when it is called, and an exception becomes an
exit code and a printed error, nowhere but here."""

from __future__ import annotations

import contextlib
import errno
import importlib
import os
import re
import signal
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import click

from oscar_zoo import errors
from oscar_zoo.cli import help_format, options, streams, verbs
from oscar_zoo.version import __version__

INTERRUPTED = 130
TERMINATED = 128 + signal.SIGTERM
OUTPUT_CLOSED = 128 + signal.SIGPIPE
COMPLETION_VARIABLE = "_OSCAR_ZOO_COMPLETE"
"""Set by the script of a shell when it asks what fits."""
EXIT_CODES: tuple[tuple[type[BaseException], int], ...] = (
    (errors.UsageError, 2),
    (click.UsageError, 2),
    (errors.NotFoundError, 3),
    (errors.IntegrityError, 4),
    (errors.NetworkError, 5),
    (errors.AccessError, 6),
    (errors.ConflictError, 7),
    (BrokenPipeError, OUTPUT_CLOSED),
    (errors.StorageError, 8),
    (SystemExit, TERMINATED),
    (KeyboardInterrupt, INTERRUPTED),
    (click.Abort, INTERRUPTED),
    (BaseException, 1),
)
GROUPS = {
    "Get": {
        "list": "Show the artifacts that can be had, and what is installed.",
        "info": "Everything known about one model or artifact.",
        "search": "Find artifacts and models by words.",
        "compare": "Put two artifacts side by side.",
        "leaderboard": "Rank artifacts by a benchmark.",
        "pull": "Fetch an artifact by name, verify it and keep it in the local store.",
    },
    "Make": {
        "compute": "Fit a rotation for a model from calibration text.",
        "fit": "Fit another method from the moments that compute left.",
        "merge-moments": "Join the moments of several captures in one file.",
        "plot": "Draw the report of a fit again, as a page or as a picture.",
        "eval": "Measure perplexity and recall of an INT2 cache against BF16.",
        "ruler": "Ask for facts in long prompts, over length and depth.",
    },
    "Serve": {
        "fit-gpu": "Estimate how many tokens and requests of a model fit a GPU.",
        "serve": "Serve a model with an INT2 KV cache in stock SGLang or vLLM.",
        "chat": "Talk to a server that runs, or to a model.",
        "ps": "Show the servers that run.",
        "logs": "Show the log of a server.",
        "stop": "Stop a server; requests that run may finish.",
        "bench": "Measure INT2 serving against BF16 on this machine.",
    },
    "Publish": {
        "publish": "Put an artifact folder on a hub, as a version that never changes.",
        "scores": "Show the scores of artifacts, or attach measured ones.",
        "card": "Write the model card of an artifact or of a hub.",
        "site": "Build the zoo's page: a static catalogue with a page for each artifact.",
        "mirror": "Copy artifacts from hub to hub and compare their digests.",
        "yank": "Withdraw a version: no longer found by name.",
        "unyank": "Offer a withdrawn or deprecated version again.",
        "deprecate": "Advise against a version, with the reason.",
    },
    "Look after": {
        "verify": "Check rotation files, artifact folders or whole trees of them.",
        "cache": "List, check, remove and clean up what is stored on this machine.",
        "login": "Log in to a hub, with the login of its own client.",
        "doctor": "Check hubs, versions, tokens, disk, GPU and engine.",
        "completion": "Print a script that completes commands and options in a shell.",
    },
}
COMMANDS = {name: line for group in GROUPS.values() for name, line in group.items()}
OTHER_WORDS = {
    "help": ("--help",),
    "version": ("--version",),
    "show": ("info",),
    "models": ("list",),
    "ls": ("list",),
    "rm": ("cache", "rm"),
    "remove": ("cache", "rm"),
    "push": ("publish",),
    "upload": ("publish",),
    "download": ("pull",),
    "start": ("serve",),
    "status": ("ps",),
    "run": (),
}
"""Words of other programs, and what they stand for here; `run` is two commands. No shell offers
them."""


class LazyGroup(click.Group):
    """A group whose commands are imported when first used."""

    context_class = help_format.Context

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args[:1] == ["run"] and not ctx.resilient_parsing:
            raise _two_commands(args[1:])
        return super().parse_args(ctx, _ours(args))

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        if cmd_name in verbs.VERBS:
            command = verbs.verb(cmd_name)
        elif cmd_name in verbs.GROUPS:
            command = verbs.group(cmd_name)
        else:
            place = f"oscar_zoo.cli.commands.{cmd_name.replace('-', '_')}"
            command = importlib.import_module(place).command
        assert isinstance(command, click.Command)
        help_format.format_help(command)
        options.accept_quiet(command)
        return command

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except (BrokenPipeError, SystemExit) as error:
            closed = isinstance(error.__context__, BrokenPipeError)  # rich exits with 1 then
            if isinstance(error, SystemExit) and not closed:
                raise
            # without an errno, of which click would make an exit with code 1
            raise BrokenPipeError("nobody reads the output") from error

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        widest = max(map(len, COMMANDS))
        for title, group in GROUPS.items():
            with formatter.section(title):
                formatter.write_dl([(name.ljust(widest), line) for name, line in group.items()])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        import difflib

        known = ctx.resilient_parsing or not args or args[0] in COMMANDS or args[0].startswith("-")
        if not known:
            close = difflib.get_close_matches(args[0], (*COMMANDS, *OTHER_WORDS), n=1)
            hint = None if close else "oscar-zoo --help lists the commands"
            what = f"there is no command {args[0]!r}."
            raise errors.UsageError(what, hint=hint, suggestions=close)
        return super().resolve_command(ctx, args)


@click.group(
    cls=LazyGroup,
    context_settings={
        "help_option_names": ["-h", "--help"],
        "max_content_width": help_format.WIDEST,
    },
    epilog=(
        "Exit codes: 0 ok, 1 error, 2 usage, 3 not found, 4 integrity or verification, 5 network, 6"
        " access, 7 conflict, 8 disk, 130 interrupted, 141 output closed, 143 terminated (0"
        " for a server that was ready). OSCAR_ZOO_DEBUG=1 shows the traceback of an error."
        "\n\nOther words: "
        + ", ".join(f"{word} is {' '.join(ours)}" for word, ours in OTHER_WORDS.items() if ours)
        + "."
    ),
)
@click.version_option(
    __version__, "-V", "--version", prog_name="oscar-zoo", message="%(prog)s %(version)s"
)
def cli() -> None:
    """2-bit KV caches that people can use: find, verify, compute, publish and serve OSCAR
    rotations.

    A word such as Qwen3-8B or Qwen3-8B:TAG is a name, also when a folder of that name is here. A
    path begins with ./, ../, / or ~, ends in /, or names a file that ends in .pt, .json or
    .safetensors.

    \b
    Examples:
      oscar-zoo list
      oscar-zoo pull Qwen3-8B
      oscar-zoo serve Qwen3-8B
    """


def _ours(words: list[str]) -> list[str]:
    """A command line with the first word as we call it; `help` may stand in front of a command."""
    if not words:
        return words
    if words[0] == "help" and words[1:]:
        return [*_ours(words[1:]), "--help"]
    return [*OTHER_WORDS.get(words[0], words[:1]), *words[1:]]


def _two_commands(words: list[str]) -> errors.UsageError:
    """The error of `run`, with what was typed behind it: a model, a question, serve's options."""
    from itertools import takewhile
    from shlex import join

    from oscar_zoo.artifact.names import is_path
    from oscar_zoo.cli.commands.serve import command

    names = list(takewhile(lambda word: not word.startswith("-"), words))
    ours = list(takewhile(lambda word: word != "--", words))
    target = command.make_context("serve", ours, resilient_parsing=True).params["target"]
    serve = ["oscar-zoo", "serve", *(names[:1] or ["NAME"] * (target is None)), "--detach"]
    serve += words[len(names) :]
    chat = ["oscar-zoo", "chat", *(name for name in names if not is_path(name))]
    return errors.UsageError(
        "there is no command 'run'.",
        hint=f"start a server and talk to it: {join(serve)} && {join(chat)}",
    )


def exit_code(error: BaseException | None) -> int:
    """The exit code for `error`, and 0 without one; see the table in the group's help."""
    return next((code for kind, code in EXIT_CODES if isinstance(error, kind)), 0)


def run(arguments: Sequence[str]) -> int:
    """Run one command line; returns the exit code. Prints errors as one line, or as one JSON object
    with `--json`."""
    ours = arguments[: arguments.index("--")] if "--" in arguments else arguments
    if COMPLETION_VARIABLE in os.environ:
        from oscar_zoo.cli import completing

        completing.register()
    try:
        _refuse_empty(ours)
        words = list(arguments)
        result = cli.main(words, prog_name="oscar-zoo", standalone_mode=False, obj=tuple(words))
        sys.stdout.flush()  # what a full disk refuses is an error now, not a remark at exit
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        return 2
    except (Exception, KeyboardInterrupt, SystemExit) as error:
        other_end = isinstance(error, SystemExit) and error.code != TERMINATED
        if other_end or os.environ.get("OSCAR_ZOO_DEBUG") == "1":
            raise
        shown = _as_ours(error)
        try:
            sys.stdout.flush()  # or what it still holds would fail again at exit, with another code
            _report(shown, ours, "--json" in ours)
            sys.stdout.flush()
        except OSError:  # stdout takes nothing any more
            _discard_output()
            _report(shown, ours, as_json=False)
        return exit_code(shown)
    return result if isinstance(result, int) else 0


def _refuse_empty(arguments: Sequence[str]) -> None:
    """Refuse empty values, made by a shell of unset variables: they mean the current folder."""
    for argument in arguments:
        if not argument or (argument.startswith("--") and argument.endswith("=")):
            raise errors.UsageError(
                f"the argument {argument!r} is empty.", hint="is a shell variable unset?"
            )


def _as_ours(error: BaseException) -> BaseException:
    """Give operating-system errors that no use case translated, and bugs of ours, a cause and a
    next step."""
    known = BrokenPipeError | errors.OscarZooError | click.ClickException | click.Abort
    if isinstance(error, known) or not isinstance(error, Exception):
        return error
    if isinstance(error, ValueError) and (found := _settings_of_the_hub(error)):
        hint = "correct or unset it: a number of whole seconds, or a URL"
        return errors.UnusableEnvironment.of("hub setting", found, hint)
    if not isinstance(error, OSError):
        cause = next(filter(None, map(str.strip, str(error).splitlines())), "no message")
        return errors.OscarZooError(
            f"internal error, {type(error).__name__}: {cause[:300]}",
            hint="please report it with what OSCAR_ZOO_DEBUG=1 shows",
        )
    where = f" ({str(error.filename)[:200]})" if error.filename else ""
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    what = "no space left on the disk" if full else str(error.strerror or error)
    told = errors.StorageError.for_os("", error, otherwise="check the path and its permissions")
    return errors.StorageError(f"{what}{where}.", hint=told.hint)


def _settings_of_the_hub(error: ValueError) -> list[str]:
    """The variables that Hugging Face's client reads when it is imported, if that failed."""
    frames = traceback.walk_tb(error.__traceback__)
    if not any("huggingface_hub/constants.py" in x.f_code.co_filename for x, _ in frames):
        return []
    return [name for name in os.environ if re.fullmatch("HF_ENDPOINT|HF_HUB_.*TIMEOUT", name)]


def _report(error: BaseException, words: Sequence[str], as_json: bool) -> None:
    from oscar_zoo.cli.render import terminal

    code, message, hint = "error", str(error), None
    whole = "" if "chat" in words[:1] else "; nothing was left half-written"
    if isinstance(error, BrokenPipeError):
        _discard_output()
        return
    if isinstance(error, errors.OscarZooError):
        code, message, hint = error.code, error.message, error.hint
    elif isinstance(error, click.ClickException):
        code, (message, hint) = "usage", _said_by_click(error)
    elif isinstance(error, KeyboardInterrupt | click.Abort):
        code, message = "interrupted", f"interrupted{whole}"
        hint = _notes(error.__cause__ or error)  # click makes an Abort of what interrupted it
    elif isinstance(error, SystemExit):
        code, message, hint = "terminated", f"stopped by SIGTERM{whole}", _notes(error)
    terminal.print_error(code, message, hint, as_json=as_json)


def _said_by_click(error: click.ClickException) -> tuple[str, str | None]:
    """The message of click in one line, with the range that a number must be in, and a hint."""
    from oscar_zoo.next_step import rendered

    context = getattr(error, "ctx", None)
    hint = f"try: {context.command_path} --help" if context is not None else None
    if isinstance(error, click.NoSuchOption):
        close = tuple(error.possibilities or ())
        return f"No such option {error.option_name!r}.", rendered(close, hint, None)
    message = " ".join(error.format_message().split())  # choices are listed line by line
    if isinstance(error, click.BadOptionUsage) and "requires an argument" in message:
        return f"{error.option_name} needs a value.", "the command with --help says which"
    kind = error.param.type if isinstance(error, click.BadParameter) and error.param else None
    if isinstance(kind, click.IntRange | click.FloatRange):
        number = "whole number" if isinstance(kind, click.IntRange) else "number"
        wanted = f"is not a {number} in the range {kind._describe_range()}"  # as click writes it
        message = message.replace(f"is not a valid {kind.name}", wanted)
    return message, hint


def _notes(error: BaseException) -> str | None:
    """What was noted about an interrupt on its way here."""
    return "; ".join(getattr(error, "__notes__", ())) or None


def _discard_output() -> None:
    """Send what stdout still holds nowhere, so that the flush at exit does not fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def main() -> NoReturn:
    """Entry point of the console script. SIGTERM unwinds like Ctrl-C, so that nothing temporary is
    left."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # the shell closed it
            setattr(sys, name, Path(os.devnull).open(mode))  # noqa: SIM115  (stays open until the end)
    streams.accept_any_text()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(TERMINATED))
    code = run(sys.argv[1:])
    if code in (INTERRUPTED, TERMINATED):
        _leave(code)
    sys.exit(code)


def _leave(code: int) -> NoReturn:
    """End now, without what libraries do at exit. Everything of ours is put away by then, a second
    signal would show a traceback of theirs, and a thread of theirs that it cut off would abort."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # nobody reads it any more
            stream.flush()
    os._exit(code)
