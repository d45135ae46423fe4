"""Building and serving the site: its folder, its command, its server, and that its scripts agree
with Python."""

import html
import json
import re
import shutil
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from importlib import resources
from pathlib import Path

import pytest
from cli_output import Cli
from site_pages import BARE, write_hub

from oscar_zoo import build_site
from oscar_zoo.engines.sglang.capacity import Cache, room
from oscar_zoo.engines.sglang.sizing import Layout
from oscar_zoo.errors import ConflictError

QWEN = "artifacts/Qwen3-8B/seq20000_prompt83_group128.html"
BROWSER = next(filter(None, map(shutil.which, ("chromium", "google-chrome", "chrome"))), None)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site of the package alone."""
    return build_site(tmp_path_factory.mktemp("site")).output


def test_the_command_says_where_it_is_and_builds_it_again(cli: Cli, tmp_path: Path) -> None:
    out, hub = tmp_path / "made" / "site", f"file:{write_hub(tmp_path / 'hub')}"
    facts = cli.json(0, "site", "--output", out, "--hub", hub)
    assert facts["schema"] == "oscar-zoo.site/1"
    assert facts["index"] == f"{out}/index.html" and facts["artifacts"] == 8
    assert sum(1 for path in out.rglob("*.html")) == 9 and facts["files"] == 10
    (out / "CNAME").write_text("zoo.example\n")
    assert f"{out}/index.html" in cli(0, "site", "--output", out)
    assert not (out / f"artifacts/{BARE}.html").exists()  # the hub was not named again
    assert (out / "CNAME").read_text() == "zoo.example\n"
    assert [path.name for path in (tmp_path / "made").iterdir()] == ["site"]


def test_a_folder_with_other_files_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ConflictError, match="no site of oscar-zoo"):
        build_site(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_it_is_served_on_this_machine_until_ctrl_c(tmp_path: Path) -> None:
    words = ["site", "--output", str(tmp_path / "site"), "--serve", "--port", "0"]
    code = f"import sys; sys.argv = {['oscar-zoo', *words]!r}\n"
    code += "from oscar_zoo.cli.main import main; main()"
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            found = re.search(r"http://127\.0\.0\.1:\d+/", process.stderr.readline())
            assert found
            with urllib.request.urlopen(found[0], timeout=30) as reply:
                assert b"<h1>The zoo</h1>" in reply.read()
            with pytest.raises(urllib.error.HTTPError):
                urllib.request.urlopen(f"{found[0]}artifacts/", timeout=30)
            process.send_signal(signal.SIGINT)
            rest = process.communicate(timeout=60)[1]
        finally:
            process.kill()  # the block waits for its end, however the test ends
    assert (process.returncode, rest) == (0, "")


def needs(page: Path) -> dict[str, object]:
    """What a page gives to its script."""
    found = re.search(r'data-needs="([^"]+)"', page.read_text("utf-8"))
    assert found
    value = json.loads(html.unescape(found[1]))
    assert isinstance(value, dict)
    return value


def test_the_table_counts_the_memory_of_a_gpu_in_gib(site: Path) -> None:
    """The memory of a card is what its driver and `fit-gpu` mean by 80 GiB."""
    page = (site / QWEN).read_text("utf-8")
    given = needs(site / QWEN)
    weights = float(re.findall(r'id="weights"[^>]* value="([0-9.]+)"', page)[0]) * 1e9
    contexts, caches = given["contexts"], given["caches"]
    assert isinstance(contexts, list) and isinstance(caches, dict)
    kinds = [Cache(**kind) for kind in caches["1"]]
    rows = re.findall(r"<tr>.*?</tr>", page[page.index('id="fits"') :], re.DOTALL)
    left = room(80 << 30, int(weights), Layout(tp=1))
    for context, row in zip(contexts, rows, strict=False):
        cells = [re.sub(r"\D", "", cell) for cell in re.findall(r"<t[hd][^>]*>([^<]+)<", row)]
        assert int(cells[0]) == context
        counts = [kind.requests(left, context) for kind in kinds]
        assert list(map(int, cells[1:])) == pytest.approx(counts, abs=1)
    assert "1 GPU of 80 GiB" in page and "Memory of a GPU, GiB" in page


@pytest.mark.skipif(shutil.which("node") is None, reason="no node to run the script of the page")
def test_the_script_counts_requests_as_python_does(site: Path) -> None:
    """Also with sliding windows and states, which no packaged artifact has."""
    kinds = [Cache("INT2", 20736, 0, 0, 56623104), Cache("BF16", 24576, 98304, 128, 7_000_001)]
    cases = [
        (memory, gpus, weights, context)
        for memory in (24 * 10**9, 80 * 10**9)
        for gpus in (1, 8)
        for weights in (0, 16_380_854_272, 65 * 10**9)
        for context in (1, 100, 4097, 131072)
    ]
    asked = [
        {"memory": memory, "gpus": gpus, "weights": weights, "context": context}
        for memory, gpus, weights, context in cases
    ]
    code = resources.files("oscar_zoo.site").joinpath("fit.js").read_text("utf-8")
    given = json.dumps(
        {"needs": needs(site / QWEN), "kinds": [vars(k) for k in kinds], "asked": asked}
    )
    code += f"""
const {{ needs, kinds, asked }} = {given};
const counts = (one) => kinds.map((kind) => requestsThatFit(needs, kind, one));
console.log(JSON.stringify(asked.map(counts)));
"""
    done = subprocess.run(["node", "-"], input=code, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [
        [kind.requests(room(memory, weights, Layout(tp=gpus)), context) for kind in kinds]
        for memory, gpus, weights, context in cases
    ]


@pytest.mark.skipif(BROWSER is None, reason="no Chromium to open the pages with")
def test_the_scripts_run_under_the_policy_in_a_browser(site: Path, tmp_path: Path) -> None:
    def opened(page: str) -> str:
        """The page after its scripts."""
        flags = [
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            f"--user-data-dir={tmp_path}/profile",
        ]
        command = [str(BROWSER), *flags, "--dump-dom", f"file://{site / page}"]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
        return done.stdout

    index, artifact = opened("index.html"), opened(QWEN)
    assert index.count("<button") == 10 and 'aria-sort="ascending"' in index
    assert re.search(r'<div class="controls" id="controls">', index)
    assert artifact.count('class="copy"') == 2
    assert re.search(r'<div class="controls" id="fit-form">', artifact)
    table = re.compile(r'<tbody id="fits">.*?</tbody>', re.DOTALL)
    before, after = table.findall((site / QWEN).read_text("utf-8")), table.findall(artifact)
    assert re.sub(r"\s", "", before[0]) == re.sub(r"\s", "", after[0])
