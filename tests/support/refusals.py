"""What a command line says that is refused, in process."""

from __future__ import annotations

import contextlib
import io

import pytest
from cli_output import parsed

from oscar_zoo.cli import main, streams
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


def ran(given: list[str]) -> tuple[int, str, str]:
    """Exit code, stdout and stderr, as bytes that a terminal could show."""
    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8") for _ in range(2))
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        streams.accept_any_text()
        code = main.run(given)
    out.flush()
    err.flush()
    told, remarks = (stream.buffer.getvalue().decode() for stream in (out, err))  # type: ignore[attr-defined]
    return code, told, remarks
