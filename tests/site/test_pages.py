"""The files of the site, built once from the package and a hub in a folder: what they say, whether
everybody can use them, and that nothing in a manifest becomes markup."""

import itertools
import re
from pathlib import Path

import pytest
from hub_uses import HARD
from site_pages import BARE, EVIL, HOSTILE, Page, write_hub

from oscar_zoo import build_site
from oscar_zoo.registry.catalog import Catalog
from oscar_zoo.site.build import BuiltSite
from oscar_zoo.site.pages import PAPER

HUGGING_FACE = r"https://huggingface\.co/[\w.-]+/[\w.-]+"
HEADINGS = ("h1", "h2", "h3", "h4")


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"file:{write_hub(tmp_path_factory.mktemp('hub'))}"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory, hub: str) -> BuiltSite:
    return build_site(tmp_path_factory.mktemp("built") / "site", hubs=hub)


@pytest.fixture(scope="module")
def pages(built: BuiltSite) -> dict[str, Page]:
    """Every page by its path."""
    return {
        path.relative_to(built.output).as_posix(): Page(path.read_text("utf-8"))
        for path in sorted(built.output.rglob("*.html"))
    }


def test_every_artifact_has_a_page_that_is_linked(pages: dict[str, Page], built: BuiltSite) -> None:
    known = {manifest.id for manifest in Catalog.packaged().manifests()}
    wanted = {f"artifacts/{name}.html" for name in {*known, str(HARD), EVIL, BARE}}
    assert set(pages) == {"index.html"} | wanted
    links = {one["href"] for one in pages["index.html"].all("a")}
    assert wanted <= links
    assert built.artifacts == len(wanted) and built.index.is_file()


def test_the_same_input_gives_the_same_bytes(built: BuiltSite, hub: str, tmp_path: Path) -> None:
    again = build_site(tmp_path / "again", hubs=[hub])
    assert again.nbytes == built.nbytes
    for path in sorted(built.output.rglob("*")):
        other = again.output / path.relative_to(built.output)
        assert path.is_dir() or path.read_bytes() == other.read_bytes(), path


def test_every_page_has_landmarks_a_skip_link_and_headings_in_order(pages: dict[str, Page]) -> None:
    for path, page in pages.items():
        assert page.all("html")[0]["lang"] == "en"
        assert page.inside["title"][0] and page.all("meta")[0] == {"charset": "utf-8"}, path
        for landmark in ("header", "main", "footer"):
            assert len(page.all(landmark)) == 1, path
        levels = [int(tag[1]) for tag, _ in page.tags if tag in HEADINGS]
        assert levels[0] == 1 and levels.count(1) == 1, path
        assert all(after - before <= 1 for before, after in itertools.pairwise(levels))
        ids = [one["id"] for _, one in page.tags if "id" in one]
        assert len(set(ids)) == len(ids), path
        skip = page.all("a")[0]
        assert skip["class"] == "skip" and skip["href"].removeprefix("#") in ids
        labels = {one["for"] for one in page.all("label")}
        assert {one["id"] for one in page.all("input", "select")} == labels, path


def test_links_resolve_and_nothing_is_loaded(pages: dict[str, Page], built: BuiltSite) -> None:
    for path, page in pages.items():
        folder = (built.output / path).parent
        for link in page.all("a"):
            href = link["href"]
            if href.startswith("https://"):
                assert href == PAPER or re.fullmatch(HUGGING_FACE, href), href
            elif not href.startswith("#"):
                assert (folder / href).is_file(), (path, href)
        for tag, attributes in page.tags:
            assert tag not in ("img", "iframe", "object", "embed", "base", "form"), path
            loaded = [attributes.get("src", "")]
            loaded += [attributes.get("href", "")] if tag == "link" else []
            assert all(one == "" or one.startswith("data:") for one in loaded), path


def test_the_policy_allows_exactly_the_code_of_the_page(pages: dict[str, Page]) -> None:
    for path, page in pages.items():
        (policy,) = (
            one["content"]
            for one in page.all("meta")
            if one.get("http-equiv") == "Content-Security-Policy"
        )
        assert policy.startswith("default-src 'none';")
        assert set(re.findall(r"'sha256-[^']+'", policy)) == set(page.codes()), path
        assert "unsafe" not in policy and "http" not in policy
        for _, attributes in page.tags:
            assert not [name for name in attributes if name.startswith("on") or name == "style"]


def test_texts_of_a_manifest_are_text(pages: dict[str, Page]) -> None:
    page = pages[f"artifacts/{EVIL}.html"]
    assert HOSTILE.replace("\u202e", "") in page.words  # as written, without what turns a line
    assert "\u202e" not in page.text and "<img" not in page.text
    assert len(page.all("script")) == len(pages[f"artifacts/{HARD}.html"].all("script"))
    assert not [one for one in page.all("a") if "script" in one["href"]]


def test_the_table_shows_quality_with_reporters_and_what_is_missing(pages: dict[str, Page]) -> None:
    text = pages["index.html"].text
    rows = dict(
        re.findall(r'<tr role="row".*?href="artifacts/([^"]+)\.html"(.*?)</tr>', text, re.DOTALL)
    )
    measured, upstream = rows[str(HARD)], rows["Qwen3-8B/seq20000_prompt83_group128"]
    assert 'data-sort="0.9"' in measured and "+0.90 %" in measured and "98.4 %" in measured
    assert "active" in measured and re.search(r"<code title=\"sha256:[0-9a-f]{64}\">", measured)
    assert "56.67" in upstream and "55.56" in upstream and "upstream" in upstream
    assert upstream.count('class="gap">–') == 4  # perplexity, recall, size and digest
    assert "87 models" not in rows  # models without an artifact stand below the table
    assert f"{len(rows)} artifacts" in pages["index.html"].words


def test_an_artifact_has_the_charts_that_there_are_numbers_for(pages: dict[str, Page]) -> None:
    charts = {
        path: [one["aria-label"].split(".")[0] for one in page.all("svg") if "role" in one]
        for path, page in pages.items()
    }
    spectra = ["Spectrum of Keys", "Spectrum of Values"]
    clip = ["Clip of Keys: output error", "Clip of Values: output error"]
    assert charts[f"artifacts/{HARD}.html"] == [*clip, *spectra]  # of the report
    assert charts[f"artifacts/{EVIL}.html"] == [
        "Clip of Keys: retrieval error",  # of the manifest
        "Clip of Values: output error",
        *spectra,  # of the rotation files
        "Error of the attention output",
    ]
    assert charts[f"artifacts/{BARE}.html"] == spectra
    assert charts["artifacts/Qwen3-8B/seq20000_prompt83_group128.html"] == []
    assert "lowest perplexity" not in pages["index.html"].words


def test_what_a_reader_must_know_stands_above_the_figures(pages: dict[str, Page]) -> None:
    page = pages["artifacts/Qwen3-8B/seq20000_prompt83_group128.html"]
    assert "calibration text has questions of gpqa_diamond" in page.words
    assert "Earlier value of INT2 in gpqa_diamond: 55.05" in page.words
    assert "Spread of BF16: 2.3, of a kind that the source does not name." in page.words
    assert "oscar-zoo serve Qwen3-8B:seq20000_prompt83_group128" in page.inside["code"]
    bare = pages[f"artifacts/{BARE}.html"]
    assert "Nobody has reported how good it is" in bare.words
    assert re.search(r"sha256:[0-9a-f]{64}", bare.words)  # as the hub lists its files
    assert not [one for one in bare.all("section") if one.get("id") == "fit-section"]
