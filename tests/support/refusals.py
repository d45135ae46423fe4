"""What a command line says that is refused, in process."""

from __future__ import annotations

import pytest
from cli_output import parsed

from oscar_zoo.cli.main import run

TINY = "tiny-qwen3-hard"
"""A model of the zoo that is on no hub."""


def refused(capsys: pytest.CaptureFixture[str], code: int, *arguments: object) -> str:
    """Run what must fail with `code`: one line on stderr (returned), nothing on stdout; the same
    facts as JSON."""
    words = [str(argument) for argument in arguments]
    assert run(words) == code
    text = capsys.readouterr()
    assert text.out == "" and text.err.count("\n") == 1 and text.err.startswith("error: "), text
    assert run([*words, "--json"]) == code
    structured = capsys.readouterr()
    assert structured.err == ""
    error = parsed(structured.out)["error"]
    assert error["code"] and error["message"].strip() and set(error) == {"code", "message", "hint"}
    return text.err
