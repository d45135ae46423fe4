"""The report: its numbers survive their file; its page and its picture need and trust nothing."""

from __future__ import annotations

import base64
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from random_moments import describe, random_moments
from site_pages import BF16, METHODS, sample_report

from oscar_zoo.compute.estimators import estimate
from oscar_zoo.compute.report import text
from oscar_zoo.compute.report.data import (
    MAX_POINTS,
    Candidate,
    Comparison,
    ReportData,
    Spectrum,
    kept_ranks,
)
from oscar_zoo.compute.report.of_moments import report_of_moments
from oscar_zoo.compute.report.page import render_html, render_png, write_report
from oscar_zoo.errors import ComputeFailed, MalformedFile, MissingDependency, StorageError

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


@pytest.mark.parametrize("fast", [False, True])
def test_a_report_survives_its_file(fast: bool) -> None:
    data = sample_report(fast=fast)
    again = ReportData.from_bytes(data.to_bytes())
    assert again == data
    assert again.to_bytes() == data.to_bytes()


def test_numbers_have_six_digits_from_the_start() -> None:
    row = Candidate(method="wush", output_error=1 / 3)
    assert row.output_error == 0.333333


@pytest.mark.parametrize(
    ("change", "reason"),
    [
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
def test_what_is_no_report_is_refused(change: dict[str, Any], reason: str) -> None:
    with pytest.raises(MalformedFile) as caught:
        ReportData.from_json(sample_report().to_json() | change, what="r.json")
    assert caught.value.reason == reason
    assert "r.json" in caught.value.message and "\n" not in caught.value.message


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "file.empty"),
        (b"<html>", "file.html"),
        (b"[1]", "report.version"),
        (b'{"a": NaN}', "json.number"),
    ],
)
def test_what_is_no_json_of_ours_is_refused(content: bytes, reason: str) -> None:
    with pytest.raises(MalformedFile) as caught:
        ReportData.from_bytes(content)
    assert caught.value.reason == reason


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_are_finite(value: float) -> None:
    with pytest.raises(ValidationError):
        Candidate(method="wush", perplexity=value)


def test_a_spectrum_is_descending_shares() -> None:
    spectrum = Spectrum.of("qqt/1", [[1.0, -1e-18, 3.0, 4.0]])
    assert spectrum.layers == ((0.5, 0.375, 0.125, 0.0),)
    assert spectrum.ranks == (1, 2, 3, 4)


@given(st.integers(1, 5000))
def test_a_spectrum_keeps_few_points_and_both_ends(dim: int) -> None:
    ranks = kept_ranks(dim)
    assert len(ranks) <= MAX_POINTS and ranks[0] == 1 and ranks[-1] == dim
    assert list(ranks) == sorted(set(ranks))


def test_the_table_names_every_candidate_and_marks_the_one_that_was_kept() -> None:
    comparison = sample_report().comparison
    assert comparison is not None
    table = text.table(comparison)
    assert [row.cells[0] for row in table.rows] == ["BF16", *METHODS]
    assert [row.cells[0] for row in table.rows if row.kept] == ["wush"]
    perplexities = [row.cells[table.heads.index("Perplexity")] for row in table.rows]
    assert perplexities == ["9.654", "4,754", "14.10", "11.45", "12.43", "9.675"]
    assert table.rows[-1].cells[table.heads.index("vs BF16")] == "+0.22 %"


def test_what_was_not_measured_says_so_or_has_no_column() -> None:
    rows = (Candidate(method="oscar", perplexity=10.0), Candidate(method="wush"))
    table = text.table(Comparison(candidates=rows))
    assert table.heads == ("Method", "Perplexity")
    assert [row.cells for row in table.rows] == [
        ("BF16", text.NOT_MEASURED),
        ("oscar", "10.00"),
        ("wush", text.NOT_MEASURED),
    ]


@pytest.mark.parametrize(
    ("value", "want"),
    [
        (9.6544, "9.654"),
        (9.9996, "10.00"),
        (20.5, "20.50"),
        (4753.6, "4,754"),
        (0.001234, "0.001234"),
        (0.0, "0"),
    ],
)
def test_perplexities_have_four_digits(value: float, want: str) -> None:
    assert text.perplexity(value) == want


def test_a_method_tried_with_and_without_clipping_has_one_row_and_its_best_number() -> None:
    rows = tuple(
        Candidate(
            method="wush",
            clip_k=clip,
            clip_v=clip,
            perplexity=BF16 * (1 + change / 100),
            change_percent=change,
        )
        for clip, change in ((0.96, 1.36), (0.0, 2.2))
    )
    data = ReportData(
        title="x", layers=(0,), comparison=Comparison(candidates=rows, bf16_perplexity=BF16)
    )
    page = render_html(data).decode()
    (drawn,) = drawings(page)
    assert drawn.count(">wush<") == 1 and "+1.36 %" in drawn and "+2.20 %" not in drawn
    assert page.count(">wush<") == 2


def test_a_broken_model_is_called_broken() -> None:
    row = Candidate(method="identity", perplexity=1e9, change_percent=1e9, standard_error=1e9)
    table = text.table(Comparison(candidates=(row,)))
    assert table.rows[1].cells == ("identity", "1.000e+09", "broken", text.NOT_APPLICABLE)


def test_the_page_says_the_answer_before_anything_is_drawn(html: str) -> None:
    before = Tags(html).before
    answer = before.index("wush was kept: perplexity 9.675 (+0.22 % against BF16)")
    assert (
        answer
        < before.index("Why: lowest perplexity.")
        < before.index("Output error")
        < before.index("org/tiny")
    )
    assert len(drawings(html)) == 5 and html.count("<figcaption>") == 5


def test_the_kept_method_is_marked_where_a_narrow_screen_shows_it(html: str) -> None:
    """In the first column, which stays in sight while the table scrolls inside its own box."""
    assert html.count("← kept") == 1
    assert re.search(
        r'<tr class="kept"><th scope="row">wush <span class="mark">← kept</span></th>', html
    )
    assert re.search(r'<div class="table">\n<table>', html) and "width=device-width" in html
    assert re.search(r"\.table \{[^}]*overflow-x: auto", html)
    assert re.search(r"th:first-child \{[^}]*position: sticky; left: 0", html)


def test_a_narrow_screen_says_that_wide_blocks_scroll(html: str) -> None:
    body = html.split("</style>")[1]
    blocks = re.findall(r'^(.*)\n<div class="(?:table|chart)">', body, re.MULTILINE)
    assert len(blocks) == 6 and all('class="sideways"' in before for before in blocks)
    style = html.split("</style>")[0]
    assert ".sideways { display: none;" in style
    narrow = style[style.index("@media screen and (max-width: 760px)") :]
    assert ".sideways { display: block; }" in narrow[: narrow.index("@media print")]


def test_no_label_of_an_axis_shows_markup(html: str) -> None:
    drawings = [base64.b64decode(part) for part in re.findall(r"svg\+xml;base64,([^\"]+)", html)]
    assert drawings and not any(b"mathdefault" in drawing for drawing in drawings)


def test_the_page_asks_nobody_and_runs_nothing(html: str) -> None:
    tags = Tags(html).tags
    assert not {tag for tag, _ in tags} & {
        "script",
        "link",
        "iframe",
        "object",
        "embed",
        "image",
        "a",
        "base",
    }
    for _, attributes in tags:
        for name, value in attributes.items():
            assert not name.startswith("on") and name not in ("href", "action", "srcset")
            assert name != "src" or str(value).startswith("data:image/svg+xml;base64,")
    assert "url(" not in html and "@import" not in html and "://" not in html
    assert "default-src 'none'; img-src data:;" in html


def test_a_drawing_refers_to_nothing_outside(html: str) -> None:
    for drawing in drawings(html):
        assert "<script" not in drawing and set(re.findall(r"url\((.)", drawing)) <= {"#"}
        places = re.findall(r'xlink:href="([^"]*)"', drawing)
        assert all(place.startswith(("#", "data:image/png;base64,")) for place in places)


def test_the_page_has_the_same_colours_on_light_and_on_dark_ground(html: str) -> None:
    light, dark = re.findall(r":root \{(.*?)\}", html, flags=re.DOTALL)
    used = set(re.findall(r"var\(--(\w+)", html)) - {"font"}
    assert used <= set(re.findall(r"--(\w+): #", light)) == set(re.findall(r"--(\w+): #", dark))
    assert "img {" in html and "background: #ffffff" in html


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
        value[where] = {
            "title": HOSTILE,
            "facts": [{"label": HOSTILE, "value": HOSTILE}],
            "notes": [HOSTILE],
        }[where]
    page = render_html(ReportData.from_json(value)).decode()
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page and "frac{1}" in page
    assert "<script" not in page and "\u202e" not in page
    assert "script" not in {tag for tag, _ in Tags(page).tags}
    for drawing in drawings(page):
        assert "<script" not in drawing and "\u202e" not in drawing
    alts = [attributes["alt"] for tag, attributes in Tags(page).tags if tag == "img"]
    assert alts == ["Perplexity against BF16", "Output error and headroom by layer"]


def test_the_same_data_gives_the_same_bytes_whatever_matplotlib_is_set_to(html: str) -> None:
    settings = {
        "lines.linewidth": 9.0,
        "font.size": 30.0,
        "text.parse_math": True,
        "svg.fonttype": "path",
    }
    with matplotlib.rc_context(settings):
        assert render_html(sample_report()).decode() == html
        assert matplotlib.rcParams["font.size"] == 30.0


@pytest.mark.parametrize("block", BLOCKS)
def test_any_block_alone_makes_a_page(block: str) -> None:
    empty: dict[str, Any] = {name: () if name == "errors" else None for name in BLOCKS}
    data = sample_report(layers=1)
    page = render_html(data.model_copy(update=empty | {block: getattr(data, block)})).decode()
    assert len(drawings(page)) == 1
    assert ("<table>" in page) == (block == "comparison")


def test_a_fast_fit_has_no_perplexity() -> None:
    data = sample_report(fast=True)
    page = render_html(
        data.model_copy(update={"spectra": None, "clip": None, "headroom": None})
    ).decode()
    before = Tags(page).before
    assert "wush was kept: output error" in before and "erplexity" not in before.replace(
        "Why: lowest perplexity.", ""
    )
    assert len(drawings(page)) == 1


@pytest.mark.parametrize("changes", [(0.1, -0.2), (1.0, 14.0), (0.2, 4e5)])
def test_perplexities_near_and_far_can_be_drawn(changes: tuple[float, float]) -> None:
    rows = [
        Candidate(
            method=name,
            perplexity=BF16 * (1 + change / 100),
            change_percent=change,
            standard_error=0.3,
        )
        for name, change in zip(("oscar", "wush"), changes, strict=True)
    ]
    data = ReportData(
        title="x", layers=(0,), comparison=Comparison(candidates=tuple(rows), bf16_perplexity=BF16)
    )
    page = render_html(data).decode()
    (drawn,) = drawings(page)
    assert all(text.change(change) in drawn for change in changes)


def test_the_picture_is_one_png_of_all_charts(tmp_path: Path) -> None:
    data = sample_report()
    write_report(data, tmp_path / "r.html", tmp_path / "r.png")
    content = (tmp_path / "r.png").read_bytes()
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = int.from_bytes(content[16:20]), int.from_bytes(content[20:24])
    assert 1500 <= width <= 1700 and height > width
    assert content == render_png(data)
    assert {path.name for path in tmp_path.iterdir()} == {"r.html", "r.png"}


def test_the_picture_of_a_report_in_any_script() -> None:
    data = ReportData(title=HOSTILE, layers=(7,), notes=("模型 " * 200, HOSTILE))
    assert render_png(data).startswith(b"\x89PNG")


def test_a_disk_that_refuses_is_one_error(tmp_path: Path) -> None:
    data = ReportData(title="x", layers=(0,))
    with pytest.raises(StorageError, match=r"cannot write .*gone"):
        write_report(data, tmp_path / "gone" / "r.html", tmp_path / "r.png")
    assert not list(tmp_path.iterdir())


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
    (drawn, *_) = reversed(drawings(render_html(data).decode()))
    assert "covariance of the queries" in drawn


def test_moments_without_the_second_pass_show_what_they_have() -> None:
    moments = random_moments(weighted=False)
    data = report_of_moments(moments, describe(moments))
    assert data.spectra is not None and data.spectra.v.target == "oo/1"
    for layer in moments.layers.values():
        layer.wo, layer.output_rows = None, 0
    data = report_of_moments(moments, describe(moments))
    assert data.headroom is None and data.spectra is not None and data.spectra.v.target == "vv/1"


def test_moments_that_lack_rows_are_refused() -> None:
    moments = random_moments(weighted=False)
    moments.layers[2].tokens -= 1
    with pytest.raises(ComputeFailed, match="layer 2"):
        report_of_moments(moments, describe(random_moments(weighted=False)))
