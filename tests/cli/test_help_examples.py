"""The examples in every `--help` parse: their commands, options and names exist, and nothing is
run."""

from __future__ import annotations

import re
import shlex

import click
import pytest

from oscar_zoo.artifact.names import Reference, is_path, parse_digest
from oscar_zoo.cli.main import COMMANDS, EXIT_CODES, cli, run

NAMED = "artifact first second name names targets replaced_by dummy_weights".split()
"""Parameters that take names of artifacts, some of them paths too."""


def every_command() -> list[tuple[str, ...]]:
    """The words of every command and of every command of a group."""
    context = click.Context(cli)
    found: list[tuple[str, ...]] = [()]
    for name in COMMANDS:
        found.append((name,))
        found += [
            (name, inner) for inner in getattr(cli.get_command(context, name), "commands", {})
        ]
    return found


def examples(capsys: pytest.CaptureFixture[str], words: tuple[str, ...]) -> list[str]:
    """The lines below `Examples:`, with continued ones put together."""
    assert run([*words, "--help"]) == 0
    text = capsys.readouterr().out
    block = text.partition("  Examples:\n")[2].partition("\n\n")[0]
    return [line.strip() for line in re.sub(r" \\\n\s+", " ", block).splitlines()]


def parsed(arguments: list[str]) -> click.Context:
    """The innermost context of a command line, from click's own parser; wrong ones raise
    `click.UsageError`."""
    command: click.Command = cli
    context = cli.make_context("oscar-zoo", [*arguments])
    while isinstance(command, click.Group):
        name, found, rest = command.resolve_command(
            context, [*context._protected_args, *context.args]
        )
        assert found is not None
        command, context = found, found.make_context(name, rest, parent=context)
    return context


@pytest.mark.parametrize("words", every_command(), ids=lambda words: " ".join(words) or "oscar-zoo")
def test_every_example_parses(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    lines = examples(capsys, words)
    assert len(lines) >= 2
    assert sum(line.startswith(" ".join(("oscar-zoo", *words))) for line in lines) >= 1
    for line in (line.rpartition(" | ")[2] for line in lines):
        if not line.startswith("oscar-zoo "):
            assert "$(oscar-zoo " in line, line
            continue
        context = parsed(shlex.split(line.partition(" > ")[0])[1:])
        for parameter, value in context.params.items():
            given = value if isinstance(value, tuple) else (value,)
            for text in given if parameter in NAMED else ():
                flag = text is not None and text.startswith("-")  # of an engine, behind the --
                assert text is None or flag or is_path(text) or Reference.parse(text), line
            if parameter == "digest" and value is not None:
                parse_digest(value)


def test_a_wrong_example_is_found() -> None:
    for line in ("pull --nonsense", "eval", "bench nothing", "list --hub", "serve X --port many"):
        with pytest.raises((click.UsageError, ValueError)):
            parsed(line.split())


def test_the_help_of_the_group_has_every_exit_code_and_the_rule_of_names(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(["--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    codes = text.partition("Exit codes: ")[2]
    for code in {code for _, code in EXIT_CODES} | {0, 130, 141, 143}:
        assert f"{code} " in codes
    assert "A path begins with ./, ../, / or ~" in text
