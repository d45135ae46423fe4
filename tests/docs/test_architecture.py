"""docs/architecture.md agrees with the code: every file it names exists, every room is described,
and its map has the layers of the import contract."""

import re
import tomllib

from documents import ROOT

PAGE = (ROOT / "docs/architecture.md").read_text("utf-8")
PACKAGE = ROOT / "oscar_zoo"
NOT_ROOMS = {"__pycache__"}
ENTRY_POINT = "oscar_zoo/engines/sglang/register.py"
"""SGLang finds this file in its own processes by the package's entry point."""


def section(title: str) -> str:
    """The text under a heading of the second level."""
    found = re.search(rf"^## {title}$(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    assert found, title
    return found[1]


def contract() -> list[list[str]]:
    """The layers of the import contract, top first, without the name of the package."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    contracts = settings["tool"]["importlinter"]["contracts"]
    (layers,) = (one["layers"] for one in contracts if one["name"] == "one way down")
    return [re.findall(r"oscar_zoo\.(\w+)", layer) for layer in layers]


def test_every_file_and_folder_it_names_exists() -> None:
    named = re.findall(r"`((?:oscar_zoo|kernels|zoo|tests|manifests)/[\w/.-]*)`", PAGE)
    assert len(named) > 40
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_it_describes_every_room() -> None:
    rooms = {path.name for path in PACKAGE.iterdir() if path.is_dir()} - NOT_ROOMS
    described = set(re.findall(r"^\*\*`oscar_zoo/(\w+)`\*\*", section("The rooms"), re.MULTILINE))
    assert described == rooms


def test_its_map_has_the_layers_of_the_import_contract() -> None:
    drawn = re.findall(r"^    (\w+(?:  \w+)*)    ", section("The map"), re.MULTILINE)
    assert [set(row.split()) for row in drawn] == [set(layer) for layer in contract()]
