"""Words in front of `--` that are no arguments of ours. For flags of SGLang the error shows the
command line that works."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence, Set

import click

from oscar_zoo.cli.optional_choice import OptionalChoice
from oscar_zoo.errors import UsageError

Ours = Mapping[str, tuple[str | None, str | None]]
OURS: Ours = {
    "--host": ("--expose", "other addresses than loopback need an API key"),
    "--model-path": ("--model", None),
    "--kv-cache-dtype": (None, "serve always runs the INT2 cache"),
    "--api-key": (
        None,
        "arguments are visible to every local user; put the key into a file: --api-key-file FILE",
    ),
    "--background": ("--detach", None),
    "--daemon": ("--detach", None),
}
"""Flags of other programs: our option that does the same, and a remark."""
SWITCHES = (
    "--enable-",
    "--disable-",
    "--skip-",
    "--trust-remote-code",
    "--show-",
    "--log-requests",
)
"""Beginnings of flags without a value."""
KNOWN = frozenset(
    "--tp --tp-size --tensor-parallel-size --dp --dp-size --data-parallel-size --pp --pp-size --ep"
    " --ep-size --context-length --mem-fraction-static --max-running-requests --max-total-tokens"
    " --chunked-prefill-size --max-prefill-tokens --page-size --dtype --quantization --load-format"
    " --served-model-name --tokenizer-path --chat-template --reasoning-parser --tool-call-parser"
    " --schedule-policy --log-level --random-seed --cuda-graph-max-bs --attention-backend"
    " --speculative-algorithm --lora-paths --api-key --trust-remote-code --enable-metrics"
    " --enable-cache-report --enable-mixed-chunk --enable-dp-attention --disable-radix-cache"
    " --disable-cuda-graph --disable-overlap-schedule --skip-server-warmup --log-requests"
    " --schedule-conservativeness --max-queued-requests --stream-interval --watchdog-timeout"
    " --base-gpu-id --enable-lora".split()
)
"""The most common flags of SGLang. None is a misspelt option of ours, and only these are
suggested."""


class FlagsCommand(click.Command):
    """A command with one argument, and `engine_flags` that stand behind `--`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse; raises `UsageError` for a second word in front of `--`, which click would take for
        a flag."""
        behind = len(args) - args.index("--") - 1 if "--" in args else 0
        rest = super().parse_args(ctx, args)
        flags: tuple[str, ...] = ctx.params.get("engine_flags") or ()
        if len(flags) > behind and not ctx.resilient_parsing:
            word = shlex.quote(flags[0])
            raise UsageError(
                f"{ctx.command_path} takes one argument in front of --, and {word} is another.",
                hint=f"leave {word} out, or give it to the option that it is for",
            )
        return rest


class EngineCommand(FlagsCommand):
    """A command whose arguments behind `--` go to SGLang; the error for a flag of SGLang in front
    of it shows the command line that was meant.

    Attributes:
        ours: flags for which the command has an option.
    """

    ours: Ours = OURS

    def check(self, words: Sequence[str]) -> None:
        """Raise `UsageError` when `words` hold a flag that is refused behind `--`."""
        from oscar_zoo.engines.sglang.launch.denied_flags import check_extra_flags

        check_extra_flags(words)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse; the error for an unknown option shows the command line that was meant."""
        given = list(args)
        for param in self.get_params(ctx):
            if isinstance(param, OptionalChoice):
                args = param.spelled_out(args)
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            flag = _whole(error.option_name)
            if not flag.startswith("--") or (
                error.possibilities and flag not in KNOWN | self.ours.keys()
            ):
                raise
            options = {
                name
                for param in self.get_params(ctx)
                for name in (*param.opts, *param.secondary_opts)
            }
            raise self._refusal(ctx.command_path, flag, given, options) from None

    def _refusal(
        self, command: str, flag: str, given: Sequence[str], options: Set[str]
    ) -> UsageError:
        """The error for `flag`, which is not among the `options` of `command`."""
        if flag not in self.ours:
            front, moved = _sorted(given, options)
            self.check(moved)
            return _behind(command, flag, given, front, moved)
        option, remark = self.ours[flag]
        what = f"{command} has no {flag}{f': {remark}' if remark else ''}."
        if option is None:
            return UsageError(what, hint=f"{command} --help")
        return UsageError(what, hint=_line(command, _renamed(given, flag, option)))


def _behind(
    command: str, flag: str, given: Sequence[str], front: Sequence[str], moved: Sequence[str]
) -> UsageError:
    """The error for `flag`, which belongs behind `--`, as all of `moved` do."""
    behind = given[given.index("--") + 1 :] if "--" in given else ()
    unknown = next(
        (
            word
            for word in map(_name, moved)
            if word not in KNOWN and word not in map(_name, behind)
        ),
        None,
    )
    if unknown is not None:
        return UsageError(
            f"{command} has no {unknown}.",
            hint=(
                f"see {command} --help; if it is a flag of SGLang, put it behind -- at the end of"
                " the line"
            ),
        )
    return UsageError(
        f"{flag} is no option of {command}; flags of SGLang go behind --.",
        hint=_line(command, [*front, "--", *moved]),
    )


def _renamed(given: Sequence[str], flag: str, option: str) -> list[str]:
    """`given` with `option` in place of `flag`, and with what `option` needs beside it."""
    words = []
    for word in given:
        name, equals, value = word.partition("=")
        words.append(option + equals + value if _whole(name) == flag else word)
    needs_key = option == "--expose" and not any(
        word.startswith(("--api-key-file", "--require-key")) for word in words
    )
    place = words.index("--") if "--" in words else len(words)
    return [*words[:place], *(["--require-key"] if needs_key else []), *words[place:]]


def _sorted(given: Sequence[str], options: Set[str]) -> tuple[list[str], list[str]]:
    """Split `given` into our arguments and flags for SGLang.

    Flags for SGLang are unknown options, and everything behind `--`.
    """
    cut = given.index("--") if "--" in given else len(given)
    words, front, moved = list(given[:cut]), [], list(given[cut + 1 :])
    while words:
        word = words.pop(0)
        name, equals, _ = word.partition("=")
        if not word.startswith("--") or name in options:
            front.append(word)
            continue
        takes_value = not equals and not _whole(name).startswith(SWITCHES)
        if takes_value and words and not words[0].startswith("-"):
            word = f"{word}={words.pop(0)}"
        moved.append(word)
    return front, moved


def _name(word: str) -> str:
    """The flag of `--flag=value`."""
    return _whole(word.partition("=")[0])


def _whole(flag: str) -> str:
    return flag.replace("_", "-")


def _line(command: str, words: Sequence[str]) -> str:
    return f"{command} {shlex.join(words)}"
