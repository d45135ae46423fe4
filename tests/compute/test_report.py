"""The report: its numbers survive their file; its page and its picture need and trust nothing."""

import base64
import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pytest
from random_moments import describe, random_moments
from site_pages import BF16, METHODS, sample_report

from oscar_zoo.compute.moments import estimate
from oscar_zoo.compute.report import page
from oscar_zoo.compute.report.build import report_of_moments
from oscar_zoo.compute.report.data import Candidate, Comparison, ReportData, Spectrum
from oscar_zoo.compute.report.page import render_html, render_png, write_report
from oscar_zoo.errors import MalformedFile, MissingDependency
from oscar_zoo.registry.publish import REPORT_HEAD

BLOCKS = ("comparison", "errors", "clip", "headroom", "spectra", "widths")
HOSTILE = "<script>alert(1)</script>\"'&\u202e$\\frac{1}"


@pytest.fixture(scope="module")
def html() -> str:
    return render_html(sample_report()).decode()


def drawings(page: str) -> list[str]:
    """Every chart of the page, as the SVG document that it is."""
    found = re.findall(r'src="data:image/svg\+xml;base64,([^"]*)"', page)
    return [base64.b64decode(one).decode() for one in found]


class Tags(HTMLParser):
    """Every tag with its attributes, and the text before the first drawing."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.before = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if all(tag != "img" for tag, _ in self.tags):
            self.before += data


def parsed(value: object) -> ReportData:
    return ReportData.from_bytes(json.dumps(value).encode(), what="r.json")


@pytest.mark.parametrize("fast", [False, True])
def test_a_report_survives_its_file(fast: bool) -> None:
    data = sample_report(fast=fast)
    again = ReportData.from_bytes(data.to_bytes())
    assert again == data and again.to_bytes() == data.to_bytes()


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "file.empty"),
        (b"<html>", "file.html"),
        (b"[1]", "report.version"),
        (b'{"a": NaN}', "json.number"),
        ({"schema": "oscar-zoo.report/2"}, "report.version"),
        ({"extra": 1}, "report.schema"),
        ({"layers": [0, 1, 2]}, "report.schema"),
        ({"layers": [3, 2, 1, 0]}, "report.schema"),
        ({"title": ""}, "report.schema"),
        ({"headroom": {"k": [1.0] * 4, "v": ["2"] * 4}}, "report.schema"),
        ({"headroom": {"k": [-1.0] * 4, "v": [1.0] * 4}}, "report.schema"),
        ({"comparison": {"candidates": [{"method": "a", "chosen": True}] * 2}}, "report.schema"),
        ({"comparison": {"candidates": []}}, "report.schema"),
        ({"errors": [{"method": "a", "layers": [1.0] * 4}] * 2}, "report.schema"),
    ],
)
def test_what_is_no_report_is_refused(content: bytes | dict[str, Any], reason: str) -> None:
    if isinstance(content, dict):
        content = json.dumps(sample_report().to_json() | content).encode()
    with pytest.raises(MalformedFile) as caught:
        ReportData.from_bytes(content, what="r.json")
    assert caught.value.reason == reason
    assert "r.json" in caught.value.message and "\n" not in caught.value.message


def test_a_spectrum_is_descending_shares() -> None:
    spectrum = Spectrum.of("qqt/1", [[1.0, -1e-18, 3.0, 4.0]])
    assert spectrum.layers == ((0.5, 0.375, 0.125, 0.0),)
    assert spectrum.ranks == (1, 2, 3, 4)


def test_the_table_names_every_candidate_and_marks_the_one_that_was_kept() -> None:
    comparison = sample_report().comparison
    assert comparison is not None
    heads, rows = page.table(comparison)
    assert [cells[0] for _, cells in rows] == ["BF16", *METHODS]
    assert [cells[0] for row, cells in rows if row and row.chosen] == ["wush"]
    perplexities = [cells[heads.index("Perplexity")] for _, cells in rows]
    assert perplexities == ["9.654", "4,754", "14.10", "11.45", "12.43", "9.675"]
    assert rows[-1][1][heads.index("vs BF16")] == "+0.22 %"


def test_the_page_says_the_answer_before_anything_is_drawn(html: str) -> None:
    before = Tags(html).before
    words = (
        "wush was kept, with 2.75 bits per element: perplexity +0.12 % against BF16, recall 99.8 %",
        "Why: lowest perplexity.",
        "Output error",
        "org/tiny",
    )
    places = [before.index(one) for one in words]
    assert places == sorted(places)
    assert len(drawings(html)) == 5 and html.count("<figcaption>") == 5


def test_the_page_asks_nobody_and_runs_nothing(html: str) -> None:
    assert html.encode().startswith(REPORT_HEAD)
    tags = Tags(html).tags
    active = {"script", "link", "iframe", "object", "embed", "image", "a", "base"}
    assert not {tag for tag, _ in tags} & active
    for _, attributes in tags:
        for name, value in attributes.items():
            assert not name.startswith("on") and name not in ("href", "action", "srcset")
            assert name != "src" or str(value).startswith("data:image/svg+xml;base64,")
    assert "url(" not in html and "@import" not in html and "://" not in html
    assert "default-src 'none'; img-src data:;" in html
    for drawing in drawings(html):
        assert "<script" not in drawing and set(re.findall(r"url\((.)", drawing)) <= {"#"}
        places = re.findall(r'xlink:href="([^"]*)"', drawing)
        assert all(place.startswith(("#", "data:image/png;base64,")) for place in places)


@pytest.mark.parametrize("where", ["title", "facts", "method", "reason", "notes"])
def test_text_of_others_stays_text(where: str) -> None:
    value = sample_report().to_json()
    for unused in ("clip", "headroom", "spectra", "widths"):
        del value[unused]
    if where == "method":
        value["comparison"]["candidates"][0]["method"] = value["errors"][0]["method"] = HOSTILE
    elif where == "reason":
        value["comparison"]["reason"] = HOSTILE
    else:
        fact = {"label": HOSTILE, "value": HOSTILE}
        value[where] = {"title": HOSTILE, "facts": [fact], "notes": [HOSTILE]}[where]
    page = render_html(parsed(value)).decode()
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page and "frac{1}" in page
    assert "<script" not in page and "\u202e" not in page
    assert "script" not in {tag for tag, _ in Tags(page).tags}
    for drawing in drawings(page):
        assert "<script" not in drawing and "\u202e" not in drawing
    alts = [attributes["alt"] for tag, attributes in Tags(page).tags if tag == "img"]
    assert alts == ["Perplexity against BF16", "Output error and headroom by layer"]


def test_the_same_data_gives_the_same_bytes_whatever_matplotlib_is_set_to(html: str) -> None:
    settings = {"lines.linewidth": 9.0, "font.size": 30.0, "text.parse_math": True}
    with matplotlib.rc_context(settings | {"svg.fonttype": "path"}):
        assert render_html(sample_report()).decode() == html
        assert matplotlib.rcParams["font.size"] == 30.0


@pytest.mark.parametrize("block", BLOCKS)
def test_any_block_alone_makes_a_page(block: str) -> None:
    empty: dict[str, Any] = {name: () if name == "errors" else None for name in BLOCKS}
    data = sample_report(layers=1)
    page = render_html(data.model_copy(update=empty | {block: getattr(data, block)})).decode()
    assert len(drawings(page)) == 1
    assert ("<table>" in page) == (block == "comparison")


@pytest.mark.parametrize("changes", [(0.1, -0.2), (1.0, 14.0), (0.2, 4e5)])
def test_perplexities_near_and_far_can_be_drawn(changes: tuple[float, float]) -> None:
    rows = tuple(
        Candidate(
            method=name,
            perplexity=BF16 * (1 + change / 100),
            change_percent=change,
            standard_error=0.3,
        )
        for name, change in zip(("oscar", "wush"), changes, strict=True)
    )
    comparison = Comparison(candidates=rows, bf16_perplexity=BF16)
    data = ReportData(title="x", layers=(0,), comparison=comparison)
    (drawn,) = drawings(render_html(data).decode())
    assert all(page.change(change) in drawn for change in changes)


def test_the_picture_is_one_png_of_all_charts(tmp_path: Path) -> None:
    data = sample_report()
    write_report(data, tmp_path / "r.html", tmp_path / "r.png")
    content = (tmp_path / "r.png").read_bytes()
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = int.from_bytes(content[16:20]), int.from_bytes(content[20:24])
    assert 1500 <= width <= 1700 and height > width
    assert {path.name for path in tmp_path.iterdir()} == {"r.html", "r.png"}
    data = ReportData(title=HOSTILE, layers=(7,), notes=("模型 " * 200, HOSTILE))
    assert render_png(data).startswith(b"\x89PNG")


def test_without_matplotlib_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingDependency, match="matplotlib") as caught:
        render_html(sample_report())
    assert "[compute]" in str(caught.value.hint)


def test_reading_a_report_needs_neither_torch_nor_matplotlib() -> None:
    code = (
        "import sys; import oscar_zoo.compute.report.page; sys.exit(bool({'torch', 'matplotlib'} &"
        " set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=300).returncode == 0


def test_moments_show_the_spectra_that_a_fit_would_see() -> None:
    moments = random_moments()
    data = report_of_moments(moments, describe(moments))
    assert data.layers == (0, 2) and data.spectra is not None and data.headroom is not None
    for spectrum, target in ((data.spectra.k, "qqt/1"), (data.spectra.v, "sst/1")):
        want = np.linalg.eigvalsh(estimate(moments, target))[:, ::-1]
        assert spectrum.target == target
        np.testing.assert_allclose(spectrum.layers, want / want.sum(-1, keepdims=True), rtol=1e-5)
    assert min(data.headroom.k + data.headroom.v) >= 1
    assert any("200 tokens" in fact.value for fact in data.facts)
    assert "covariance of the queries" in drawings(render_html(data).decode())[-1]


def test_moments_without_the_second_pass_show_what_they_have() -> None:
    moments = random_moments(weighted=False)
    data = report_of_moments(moments, describe(moments))
    assert data.spectra is not None and data.spectra.v.target == "oo/1"
    for layer in moments.layers.values():
        layer.wo, layer.output_rows = None, 0
    data = report_of_moments(moments, describe(moments))
    assert data.headroom is None and data.spectra is not None and data.spectra.v.target == "vv/1"
