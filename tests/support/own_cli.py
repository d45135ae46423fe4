"""The command line in this process, for tests of what it prints."""

from __future__ import annotations

import re
from typing import Any

import pytest
from cli_output import parsed

from oscar_zoo.cli.main import run


class Cli:
    """Runs command lines; what was printed stays for looking at."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self.capsys, self.out, self.err = capsys, "", ""

    def __call__(self, code: int, *words: object) -> str:
        """What is printed on stdout; the exit code must be `code`."""
        assert run([str(word) for word in words]) == code
        self.out, self.err = self.capsys.readouterr()
        return self.out

    def json(self, code: int, *words: object) -> Any:
        """The JSON object that is printed; nothing is printed on stderr beside it."""
        value = parsed(self(code, *words, "--json"))
        assert self.err == ""
        return value


def numbers(line: str) -> list[int]:
    """The whole numbers of a line, with commas or without."""
    return [int(found.replace(",", "")) for found in re.findall(r"\d[\d,]*", line)]
