"""The house gets smaller: no package is over its row in budget.toml, and every package has one.

Run as a program, `python tests/lint/test_budget.py`, it prints what each has now, as such rows.
"""

import ast
import functools
import re
import tomllib
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TABLE = Path(__file__).with_name("budget.toml")
SOURCES = {".py", ".cu", ".cuh"}
UNCOUNTED = {"contrib", "build", "dist"}
"""What maintainers run outside the wheel, and what is built."""
LONGEST = 600
ROUNDED = 50
"""A row's lines are rounded up to this, so that not every commit has to lower it."""


def files() -> list[str]:
    """Every source file of the checkout, seen from its root; hidden folders are nobody's."""
    folders = [folder for folder in ROOT.glob("[!.]*/") if folder.name not in UNCOUNTED]
    found = [path for folder in folders for path in folder.rglob("*") if path.suffix in SOURCES]
    return sorted(str(path.relative_to(ROOT)) for path in found if "__pycache__" not in path.parts)


def package(name: str, rows: Iterable[str]) -> str | None:
    """The deepest folder with a row; a folder of `oscar_zoo/` needs one of its own."""
    over = [str(folder) for folder in Path(name).parents]
    found = next((folder for folder in over if folder in rows), None)
    is_room = name.startswith("oscar_zoo/") and name.count("/") > 1
    return None if found == "oscar_zoo" and is_room else found


def count(text: str, suffix: str) -> Counter[str]:
    counts = Counter(lines=len(text.splitlines()), files=1)
    for node in ast.walk(ast.parse(text)) if suffix == ".py" else ():
        if isinstance(node, ast.ClassDef):
            marks = [ast.unparse(mark).split("(")[0] for mark in node.decorator_list]
            counts["dataclasses"] += any(mark.endswith("dataclass") for mark in marks)
        counts["raises"] += isinstance(node, ast.Raise)
    return counts


@functools.cache
def counts() -> dict[str, Counter[str]]:
    found: dict[str, Counter[str]] = {folder: Counter() for folder in budget()}
    for name in files():
        folder = package(name, found)
        if folder is not None:
            found[folder] += count((ROOT / name).read_text("utf-8"), Path(name).suffix)
    return found


def budget() -> dict[str, dict[str, int]]:
    return tomllib.loads(TABLE.read_text("utf-8"))["budget"]


@pytest.mark.parametrize(("folder", "most"), budget().items())
def test_no_package_is_over_its_budget(folder: str, most: dict[str, int]) -> None:
    assert {*most} == {"lines", "files", "dataclasses", "raises"}
    assert {what: n for what, n in counts()[folder].items() if n > most[what]} == {}


def test_every_file_belongs_to_a_row() -> None:
    rows = budget()
    assert [name for name in files() if package(name, rows) is None] == []
    assert package("oscar_zoo/new/room.py", rows) is None


def test_no_file_is_too_long() -> None:
    python = [name for name in files() if name.endswith(".py")]
    lengths = {name: len((ROOT / name).read_text("utf-8").splitlines()) for name in python}
    assert {name: lines for name, lines in lengths.items() if lines > LONGEST} == {}


def main() -> None:
    goals = dict(re.findall(r'^"([^"]+)".*# (goal: .+)$', TABLE.read_text("utf-8"), re.MULTILINE))
    for folder, have in counts().items():
        lines = -(-have["lines"] // ROUNDED) * ROUNDED
        rest = ", ".join(f"{what} = {have[what]}" for what in ("files", "dataclasses", "raises"))
        goal = f"  # {goals[folder]}" if folder in goals else ""
        print(f'"{folder}" = {{ lines = {lines}, {rest} }}{goal}')


if __name__ == "__main__":
    main()
