"""The documents as data: their code blocks, the commands in them, their links."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
README, EXAMPLES, PYTHON = ROOT / "README.md", ROOT / "examples/README.md", ROOT / "docs/python.md"
PAGES = sorted(
    [
        README,
        EXAMPLES,
        ROOT / "CONTRIBUTING.md",
        ROOT / "CHANGELOG.md",
        *(ROOT / "kernels").glob("*.md"),
        ROOT / "docs/schemas/README.md",
        *(ROOT / "docs").glob("*.md"),
    ]
)
_ENDS = {"|", "||", "&&", ";", ">", ">>", "<", "&"}
"""Words of a shell line after which the arguments of a command are over."""


@dataclass(frozen=True)
class Line:
    """One shell command of a document: `variables` for `export`, else the words of the command."""

    page: Path
    number: int
    words: tuple[str, ...]

    @property
    def name(self) -> str:
        """For messages: where it stands, and what it says."""
        return f"{self.page.relative_to(ROOT)}:{self.number}: {shlex.join(self.words)}"

    @property
    def arguments(self) -> tuple[str, ...]:
        """What follows the program."""
        return self.words[1:]


def blocks(page: Path, language: str) -> list[str]:
    text = page.read_text("utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def shell_lines(page: Path) -> Iterator[Line]:
    """Every command in fenced and indented blocks, continued lines joined and comments gone."""
    number, started, text = 0, 0, ""
    for number, line in _code(page):
        text, started = (text + line.strip(), started) if text else (line.strip(), number)
        if text.endswith("\\"):
            text = text[:-1]
            continue
        words, text = _words(text), ""
        if words:
            yield Line(page, started, tuple(words))


def commands(page: Path) -> list[Line]:
    return [line for line in shell_lines(page) if line.words[0] == "oscar-zoo"]


def _code(page: Path) -> Iterator[tuple[int, str]]:
    """Numbered lines of blocks in a shell's language, or in none."""
    fence: str | None = None
    for number, line in enumerate(page.read_text("utf-8").splitlines(), 1):
        if line.startswith("```"):
            fence = None if fence is not None else line[3:].strip()
        elif (fence is None and line.startswith("    ")) or fence in ("", "sh", "bash", "console"):
            yield number, line


def _words(text: str) -> list[str]:
    """The first command of a shell line; of one that is no shell, as good as nothing."""
    try:
        words = shlex.split(text.removeprefix("$ "), comments=True)
    except ValueError:
        return []
    end = next((place for place, word in enumerate(words) if word in _ENDS), len(words))
    return words[:end]
