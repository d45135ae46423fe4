"""Commands whose words behind `--` go to an engine, and an option of theirs whose value may be left
out."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any

import click

from oscar_zoo.cli.options import Once
from oscar_zoo.errors import UsageError
from oscar_zoo.serving.params import ENGINES

OURS = {
    "--host": "use --expose ADDRESS with --require-key",
    "--max-model-len": "put -- --context-length=N at the end",
    "--tensor-parallel-size": "put -- --tp=N at the end",
    "--tp": "put -- --tp=N at the end",
    "--gpu-memory-utilization": "put -- --mem-fraction-static=X at the end",
}
"""Options of vLLM's and SGLang's servers, and what they are here."""


class FlagsCommand(click.Command):
    """A command with one argument, and `engine_flags` that stand behind `--`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse; raises `UsageError` for a second word in front of `--`, which click would take for
        a flag, and for an option that may be a flag of its engine."""
        behind = len(args) - args.index("--") - 1 if "--" in args else 0
        named = [text for key, text in ENGINES.items() if {key, f"--engine={key}"} & {*args}]
        engine = named[0] if named else None if self.name == "eval" else "SGLang"
        for param in self.get_params(ctx):
            if isinstance(param, OptionalChoice):
                args = param.spelled_out(args)
        try:
            rest = super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            if engine is None or not error.option_name.startswith("--"):
                raise
            name = error.option_name
            own = OURS.get(name) if engine == "SGLang" or name == "--host" else None
            raise UsageError(
                f"No such option {name!r}; a flag of {engine} goes behind --.",
                hint=own or f"for {engine}: -- {name}; what is ours: {ctx.command_path} --help",
                suggestions=() if own else error.possibilities or (),
            ) from None
        flags: tuple[str, ...] = ctx.params.get("engine_flags") or ctx.params.get("flags") or ()
        if len(flags) > behind and not ctx.resilient_parsing:
            word = shlex.quote(flags[0])
            raise UsageError(
                f"{ctx.command_path} takes one argument in front of --, and {word} is another.",
                hint=f"leave {word} out, or give it to the option that it is for",
            )
        return rest


class OptionalChoice(Once):
    """A choice that means `usual` where no value stands behind it, that is, none of the choices.
    click alone takes any word that is no option."""

    def __init__(self, names: Sequence[str], *, usual: str = "auto", **others: Any) -> None:
        super().__init__(names, **others)
        self.usual = usual

    def spelled_out(self, words: Sequence[str]) -> list[str]:
        """`words` with `usual` behind this option where it stands alone; nothing behind `--`
        changes."""
        assert isinstance(self.type, click.Choice)
        cut = words.index("--") if "--" in words else len(words)
        spelled = list[str]()
        for place, word in enumerate(words[:cut]):
            valued = place + 1 < cut and words[place + 1] in self.type.choices
            spelled += [word, self.usual] if word in self.opts and not valued else [word]
        return [*spelled, *words[cut:]]
