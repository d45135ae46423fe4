import subprocess
import sys
import tomllib
from importlib import resources
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
DATA_FOLDERS = {"zoo", "manifests"}
DATA = {".toml", ".json", ".cu", ".cuh", ".css", ".js", ".html"}
STUBS = "cpu_site"
"""Folder of modules for another process; shipped as data, not as a package."""


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    with (ROOT / "pyproject.toml").open("rb") as stream:
        return tomllib.load(stream)


def source_packages() -> set[str]:
    """Dotted names of every folder with an `__init__.py` below the two import packages."""
    found = set()
    for top, base in (("oscar_zoo", ROOT), ("oscar_kernels", ROOT / "kernels")):
        for init in (base / top).rglob("__init__.py"):
            parts = init.parent.relative_to(base).parts
            if STUBS not in parts:
                found.add(".".join(parts))
    return found


def test_the_package_list_is_what_is_on_disk(project: dict[str, Any]) -> None:
    setuptools = project["tool"]["setuptools"]
    elsewhere = {
        name for name in setuptools["package-dir"] if name not in ("oscar_zoo", "oscar_kernels")
    }
    assert set(setuptools["packages"]) - elsewhere == source_packages()
    assert len(setuptools["packages"]) == len(set(setuptools["packages"]))
    for folder in setuptools["package-dir"].values():
        assert (ROOT / folder / "__init__.py").is_file()


def test_every_folder_with_modules_is_a_package() -> None:
    for base in (ROOT / "oscar_zoo", ROOT / "kernels" / "oscar_kernels"):
        for module in base.rglob("*.py"):
            assert STUBS in module.parts or (module.parent / "__init__.py").is_file(), module


def test_what_is_no_module_is_shipped(project: dict[str, Any]) -> None:
    setuptools = project["tool"]["setuptools"]
    shipped, folders = set(), setuptools["package-dir"]
    for name, patterns in setuptools["package-data"].items():
        top, _, below = name.partition(".")
        folder = ROOT / folders.get(name, f"{folders[top]}/{below.replace('.', '/')}")
        shipped |= {path for pattern in patterns for path in folder.glob(pattern)}
    found = [path for folder in folders.values() for path in (ROOT / folder).rglob("*")]
    wanted = {path for path in found if path.suffix in DATA or STUBS in path.parts[:-1]}
    wanted = {path for path in wanted if path.is_file() and "__pycache__" not in path.parts}
    assert {path.suffix for path in wanted} == {*DATA, ".py"}
    assert wanted <= shipped, wanted - shipped


def test_recipes_manifests_and_schema_are_importable_resources() -> None:
    recipes = {
        e.name for e in resources.files("oscar_zoo.recipes").iterdir() if e.name.endswith(".toml")
    }
    assert recipes == {path.name for path in (ROOT / "zoo").glob("*.toml")}
    manifests = resources.files("oscar_zoo.manifests")
    assert (manifests / "manifest.schema.json").is_file()
    assert (manifests / "known_digests.json").is_file()
    assert (manifests / "Qwen3-8B" / "seq20000_prompt83_group128.json").is_file()


def test_entry_points_load(project: dict[str, Any]) -> None:
    declared = [
        ("console_scripts", project["project"]["scripts"]),
        *project["project"].get("entry-points", {}).items(),
    ]
    for group, names in declared:
        installed = {point.name: point for point in entry_points(group=group)}
        for name, target in names.items():
            point = installed[name]
            assert point.value == target
            assert callable(point.load())


def test_no_top_level_package_shadows_another_and_tests_are_none() -> None:
    """Except the plugin of the tests, which an engine's processes import."""
    assert {path.parent.name for path in ROOT.glob("*/__init__.py")} == {"oscar_zoo"} | DATA_FOLDERS
    assert not (ROOT / "kernels" / "__init__.py").exists()
    found = [path.parent.name for path in (ROOT / "tests").rglob("__init__.py")]
    assert found == ["int2_test_plugin"]


def test_the_registry_works_where_torch_cannot_be_imported() -> None:
    code = (
        "import sys; sys.modules['torch'] = None; import oscar_zoo.registry.pull,"
        " oscar_zoo.registry.publish"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=300).returncode == 0
