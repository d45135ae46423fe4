"""The documents say what is true: their Python runs, their commands exist."""

import inspect
import re
from pathlib import Path

import pytest
from documents import ROOT, blocks
from hub_uses import put_version
from measured_artifacts import measured_files
from tiny_artifacts import payload, write_folder

import oscar_zoo
from oscar_zoo.cli.main import COMMANDS
from oscar_zoo.registry.catalog import Catalog
from oscar_zoo.registry.hubs.local import LocalHub

PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")])
NEEDS_TORCH = re.compile(r"oscar_zoo\.(compute_artifact|fit|evaluate_artifact|draw_report)\(")


def test_the_python_of_documents_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = Catalog.packaged().recipe("Qwen3-8B")
    assert recipe is not None
    hub = LocalHub(tmp_path / "public", must_exist=False)
    put_version(hub, f"Qwen3-8B/{recipe.default_tag}", payload(geometry=recipe.geometry))
    write_folder(tmp_path / "my-rotation", measured_files())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OSCAR_ZOO_HUB", hub.name)
    (tmp_path / "team-zoo").mkdir()
    code = [block for block in python_blocks() if not NEEDS_TORCH.search(block)]
    assert len(code) >= 5
    run_blocks(code)


def test_the_python_that_needs_torch_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    from tiny_models import write_model

    write_model(tmp_path / "my-model")
    monkeypatch.chdir(tmp_path)
    code = [block for block in python_blocks() if NEEDS_TORCH.search(block)]
    assert len(code) >= 4
    run_blocks(["import oscar_zoo\n", *code])
    for name in ("oscar", "wush", "hadamard"):
        assert (tmp_path / "made" / name / "oscar.json").is_file()


def python_blocks() -> list[str]:
    return blocks(ROOT / "docs" / "python.md", "python")


def run_blocks(code: list[str]) -> None:
    """Run blocks one after the other, as one program."""
    scope: dict[str, object] = {}
    for number, block in enumerate(code):
        exec(compile(block, f"docs/python.md, block {number + 1}", "exec"), scope)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_in_the_documentation_exists(page: Path) -> None:
    text = page.read_text("utf-8")
    quoted = re.findall(r"`oscar-zoo ([a-z]+)", text)
    assert set(quoted) <= set(COMMANDS)


def test_the_steps_of_the_examples_write_only_where_git_looks_away() -> None:
    ignored = (ROOT / ".gitignore").read_text("utf-8").splitlines()
    (steps,) = re.findall(
        r"^## All steps.*?(?=^## )",
        (ROOT / "examples/README.md").read_text("utf-8"),
        re.MULTILINE | re.DOTALL,
    )
    written = re.findall(r"(?:--output-dir |OSCAR_ZOO_HUB=file:|--hub file:)(\S+)", steps)
    assert len(written) >= 4
    assert "/try/" in ignored and all(place.startswith("./try/") for place in written)
    assert all("--no-lock" in line for line in re.findall(r"^oscar-zoo pull .*", steps, re.M))


def test_everything_the_package_offers_can_be_imported() -> None:
    for name in oscar_zoo.__all__:
        assert getattr(oscar_zoo, name) is not None
    assert set(oscar_zoo.__all__) <= set(dir(oscar_zoo))
    for call in (oscar_zoo.evaluate_artifact, oscar_zoo.ask_long_prompts):
        assert {"artifact", "model", "device", "observer"} <= {*inspect.signature(call).parameters}
    with pytest.raises(AttributeError):
        oscar_zoo.nothing  # noqa: B018
