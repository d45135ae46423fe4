"""The command of `serve --print`, for a shell and as data."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from oscar_zoo.app.serve_command import ServeCommand
from oscar_zoo.cli.streams import with_bytes


def for_shell(argv: Sequence[str], env: Mapping[str, str], unset: Sequence[str] = ()) -> str:
    """One command that a shell runs as it stands, with one flag or variable per line."""
    program = next((i for i, part in enumerate(argv) if part.startswith("--")), len(argv))
    words = ["env", *(f"-u {shlex.quote(name)}" for name in unset)]
    words += [f"{name}={shlex.quote(value)}" for name, value in env.items()]
    words.append(shlex.join(argv[:program]))
    words += [shlex.quote(part) for part in argv[program:]]
    return " \\\n  ".join([" ".join(words[:2]), *words[2:]])


def shell_text(made: ServeCommand) -> str:
    """`for_shell` of a command; it unsets only variables that are set here."""
    unset = [name for name in made.unset if name in os.environ]
    return with_bytes(for_shell(made.argv, made.environment, unset))


def command_facts(made: ServeCommand) -> dict[str, Any]:
    """The command for `--json`."""
    return {
        "schema": "oscar-zoo.serve-command/1",
        "engine": "sglang",
        "argv": list(made.argv),
        "env": dict(made.environment),
        "unset": list(made.unset),
        "artifact": made.artifact,
        "digest": made.digest,
        "model": made.model,
        "recipe": made.recipe.model_dump(mode="json"),
        "device": made.device,
        "tensor_parallel": made.tensor_parallel,
        "drafts": made.drafts,
        "warnings": [*made.artifact_warnings, *made.warnings],
    }
