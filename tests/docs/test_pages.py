"""What the documents point to exists: links, headings, make targets, error messages, figures."""

from __future__ import annotations

import ast
import csv
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from documents import PAGES, README, ROOT

from oscar_zoo.engines.sglang.setting_flags import OPTIONS

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
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text("utf-8")):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), f"{page.name} links to {target}"
        assert not anchor or anchor in anchors(there), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_make_targets_exist(page: Path) -> None:
    text = page.read_text("utf-8")
    named = re.findall(r"(?:^ {4}|`)make ([a-z][a-z-]*)", text, re.MULTILINE)
    targets = re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
    assert set(named) <= set(targets)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_lines_are_short(page: Path) -> None:
    """Except rows of tables, which cannot be broken, and drawings in blocks."""
    for number, line in enumerate(page.read_text("utf-8").splitlines(), 1):
        drawing = page == DRAWINGS and line.startswith("    ")
        breakable = not drawing and not line.startswith("|")
        assert len(line) <= LONGEST or not breakable, f"{page.name}:{number} is too long"


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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_flags_of_the_plugin_exist(page: Path) -> None:
    named = re.findall(r"--oscar-[a-z0-9-]+", page.read_text("utf-8"))
    assert set(named) <= {option.flag for option in OPTIONS.values()}


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


def test_a_table_with_fp8_is_drawn_with_the_best_backend_of_each_cache(tmp_path: Path) -> None:
    rows = ["cache,batch,context,job_turn,capacity_tokens,ms_per_token"]
    rows += ["bf16,1,8000,,100000,9", "bf16,1,8000,,100000,8", "fp8,1,8000,,200000,6"]
    rows += ["int2,1,8000,,700000,4", "bf16,2,8000,,100000,9"]
    table, target = tmp_path / "a.csv", tmp_path / "a.svg"
    table.write_text("\n".join(rows))
    subprocess.run([sys.executable, str(FIGURES / "draw.py"), str(table), str(target)], check=True)
    drawn = texts(target)
    assert {"Tokens that fit: 7.0x BF16, 3.5x FP8", "A step: up to 2.0x BF16, 1.5x FP8"} <= {*drawn}
    assert "BF16  8 ms" in drawn and "FP8  6 ms" in drawn and "BF16  9 ms" not in drawn


def texts(svg: Path) -> list[str]:
    """What a picture says; its letters are outlines, with the text in a comment beside them."""
    return re.findall(r"<!-- (.*?) -->", svg.read_text("utf-8"))
