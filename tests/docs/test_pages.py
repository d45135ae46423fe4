"""What the documents point to exists: links, headings, make targets, error messages, figures."""

import ast
import csv
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from documents import PAGES, README, ROOT

from oscar_zoo.engines.setting_flags import OPTIONS

FIGURES = ROOT / "docs/figures"
DRAWINGS = ROOT / "kernels/README.md"
"""Its indented blocks show how bytes lie."""
LONGEST = 100


def slug(heading: str) -> str:
    """The anchor that Markdown viewers make of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def anchors(page: Path) -> set[str]:
    text = re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    return {slug(heading) for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_names_is_there(page: Path) -> None:
    """Links, targets of make and flags of the plugin; and its lines are short, except rows of
    tables, which cannot be broken, and drawings in blocks."""
    text = page.read_text("utf-8")
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), f"{page.name} links to {target}"
        assert not anchor or anchor in anchors(there), f"{page.name} links to {target}"
    named = re.findall(r"(?:^ {4}|`)make ([a-z][a-z-]*)", text, re.MULTILINE)
    targets = re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
    assert {*named} <= {*targets}
    flags = re.findall(r"--oscar-[a-z0-9-]+", text)
    assert {*flags} <= {option.flag for option in OPTIONS.values()}
    whole = ("|", "    ") if page == DRAWINGS else "|"
    long = [line for line in text.splitlines() if len(line) > LONGEST]
    assert [line for line in long if not line.startswith(whole)] == []


def texts_of(tree: ast.AST) -> Iterator[str]:
    """Every text of a program as one piece, however it is broken over lines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def test_every_error_of_the_troubleshooting_page_is_one_of_ours() -> None:
    source = " ".join(
        part
        for path in sorted((ROOT / "oscar_zoo").rglob("*.py"))
        for part in texts_of(ast.parse(path.read_text("utf-8")))
    ).casefold()
    text = (ROOT / "docs/troubleshooting.md").read_text("utf-8")
    headings = re.findall(r"^### (.*)$", text, re.MULTILINE)
    quoted = [part for heading in headings for part in re.findall(r"`([^`]+)`", heading)]
    assert len(quoted) > 20
    for text in quoted:
        assert text.casefold() in source, f"no error says {text!r}"


def test_the_first_page_is_short() -> None:
    assert len(README.read_text("utf-8").splitlines()) <= 120


def test_the_picture_is_drawn_from_the_measured_figures(tmp_path: Path) -> None:
    """Drawing it again gives the same texts; a newer table needs a newer picture."""
    script, table = FIGURES / "draw.py", FIGURES / "h200-serving.csv"
    target = tmp_path / "serving.svg"
    subprocess.run([sys.executable, str(script), str(table), str(target)], check=True)
    drawn = texts(target)
    assert drawn == texts(FIGURES / "serving.svg")
    for row in csv.DictReader(table.open(encoding="utf-8")):
        if row["context"] == "100000":
            assert any(f"{float(row['ms_per_token']):.3g} ms" in text for text in drawn)


def texts(svg: Path) -> list[str]:
    """What a picture says; its letters are outlines, with the text in a comment beside them."""
    return re.findall(r"<!-- (.*?) -->", svg.read_text("utf-8"))
