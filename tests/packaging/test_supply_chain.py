"""What a release is made of is pinned, and comes from one place."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
HASHED = ("run.txt", "release.txt")


def project() -> dict[str, Any]:
    with (ROOT / "pyproject.toml").open("rb") as stream:
        return tomllib.load(stream)


def pinned(name: str) -> dict[str, tuple[str, int]]:
    """Package -> version and number of hashes of a file of requirements."""
    text = (ROOT / "requirements" / name).read_text("utf-8").replace("\\\n", " ")
    found = {}
    for line in filter(None, text.splitlines()):
        wanted = line.split("--hash")[0].split(";")[0]
        package, version = wanted.strip().split("==")
        found[canonicalize_name(package)] = (version, line.count("--hash=sha256:"))
    return found


@pytest.mark.parametrize("name", HASHED)
def test_every_version_has_hashes_and_no_file_names_an_index(name: str) -> None:
    assert all(count >= 1 for _, count in pinned(name).values())
    text = (ROOT / "requirements" / name).read_text("utf-8")
    assert re.search(r"https?://|file:|--(extra-)?index-url|--find-links", text) is None


def test_the_hashed_versions_are_those_that_are_tested() -> None:
    tested = dict(
        line.split("==")
        for line in (ROOT / "requirements/constraints.txt").read_text("utf-8").splitlines()
        if "==" in line
    )
    known = {canonicalize_name(package): version for package, version in tested.items()}
    for package, (version, _) in pinned("run.txt").items():
        assert known.get(package, version) == version


def test_every_dependency_of_the_package_is_hashed_in_its_range() -> None:
    run = pinned("run.txt")
    for text in project()["project"]["dependencies"]:
        wanted = Requirement(text)
        assert wanted.specifier.contains(run[canonicalize_name(wanted.name)][0]), text


def test_the_build_requires_exact_versions_that_are_hashed() -> None:
    tools = pinned("release.txt")
    for text in project()["build-system"]["requires"]:
        name, version = text.split("==")
        assert tools[canonicalize_name(name)][0] == version


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_pin_their_actions_and_mix_no_indexes(workflow: Path) -> None:
    text = workflow.read_text("utf-8")
    for action in re.findall(r"uses:\s*(\S+)", text):
        assert re.fullmatch(r"[\w.-]+/[\w./-]+@[0-9a-f]{40}", action), action
    assert "EXTRA_INDEX" not in text and "docker push" not in text and "--push" not in text
    assert re.search(r"^permissions: \{\}$", text, re.MULTILINE)
    assert "secrets." not in text


def test_a_release_is_published_by_its_identity_alone() -> None:
    text = (ROOT / ".github/workflows/release.yml").read_text("utf-8")
    assert "--require-hashes" in text
    assert "attest-build-provenance@" in text
    assert not re.search(r"password|token: *\$", text)
