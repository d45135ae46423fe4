"""Commands as forks of a process that has imported what most of them import, which is two thirds of
their time.

They import clients of hubs themselves, as a fresh process does. What a command imports, and what
another version of a client changes, is for a fresh process: `cli_child.Cli`.
"""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

from cli_child import Cli, Finished
from forked_commands import forked_by
from sglang_forks import Forks, connect_to


class QuickCli(Cli):
    """`Cli` whose commands that run to their end are forks, where they have the first version of
    huggingface_hub."""

    def __call__(self, *arguments: str, timeout: float = 300, **variables: str) -> Finished:
        """Run a command to its end; only the patience of `sglang_forks` ends it."""
        if self.version != 1:
            return super().__call__(*arguments, timeout=timeout, **variables)
        command = ["-m", "oscar_zoo", *arguments]
        environment = {**self.variables, **variables}
        with tempfile.TemporaryDirectory() as results:
            return forked_by(_commands(), command, environment, self.folder, Path(results))


@functools.cache
def _commands() -> Forks:
    return connect_to("command_fork_server")
