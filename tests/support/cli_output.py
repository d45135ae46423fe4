"""What commands print with `--json`: read, and checked against the schemas in `docs/schemas`."""

import contextlib
import io
import json
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from jsonschema.exceptions import best_match

from oscar_zoo.cli import main, streams
from oscar_zoo.cli.main import run
from oscar_zoo.evaluate.shared import Phase

SCHEMAS = Path(__file__).resolve().parents[2] / "docs/schemas"


def parsed(text: str) -> Any:
    """The one JSON object in `text`; it must name a schema of ours and keep to it."""
    value = json.loads(text)
    check(value)
    return value


def check(value: Any) -> None:
    """Raise `AssertionError` where `value` is not what its schema says."""
    name = re.fullmatch(r"oscar-zoo\.([a-z-]+)/([0-9]+)", value["schema"])
    assert name is not None, value["schema"]
    error = best_match(_validator(f"{name[1]}-{name[2]}").iter_errors(value))
    assert error is None, f"{value['schema']}: {error.json_path}: {error.message}"


@cache
def _validator(name: str) -> Draft202012Validator:
    return Draft202012Validator(json.loads((SCHEMAS / f"{name}.json").read_bytes()))


class Cli:
    """Runs command lines; what was printed stays for looking at."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self.capsys, self.out, self.err = capsys, "", ""

    def __call__(self, code: int, *words: object) -> str:
        """What is printed on stdout; the exit code must be `code`."""
        assert run([str(word) for word in words]) == code, self.capsys.readouterr()
        self.out, self.err = self.capsys.readouterr()
        return self.out

    def json(self, code: int, *words: object) -> Any:
        """The JSON object that is printed; nothing is printed on stderr beside it."""
        at = words.index("--") if "--" in words else len(words)
        value = parsed(self(code, *words[:at], "--json", *words[at:]))
        assert self.err == "", self.err
        return value

    def refused(self, code: int, *words: object) -> str:
        """The one line on stderr of what must fail; the same facts come as JSON."""
        assert self(code, *words) == "" and self.err.startswith("error: "), (self.out, self.err)
        line = self.err
        assert line.count("\n") == 1, line
        error = self.json(code, *words)["error"]
        assert error["code"] and error["message"].strip()
        return line


def numbers(line: str) -> list[int]:
    """The whole numbers of a line, with commas or without."""
    return [int(found.replace(",", "")) for found in re.findall(r"\d[\d,]*", line)]


TINY = "tiny-qwen3-hard"
"""A model of the zoo that is on no hub."""


PHASES = (
    Phase("load", "", 10),
    Phase("capture", "tokens", 30),
    Phase("perplexity", "sequences", 60),
)


@dataclass
class Clock:
    """Time that passes when somebody says so."""

    now: float = 100.0

    def __call__(self) -> float:
        return self.now


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
