"""The container files agree with each other and with the package, without a Docker daemon."""

import re
import tomllib
from typing import Any

import pytest
import yaml
from documents import ROOT

from oscar_zoo.cli.commands.serve import command as serve
from oscar_zoo.engines.sglang.compat.releases import BEYOND, FIRST
from oscar_zoo.engines.sglang.launch.plan import DEFAULT_PORT
from oscar_zoo.engines.sglang.launch.server import DRAIN_SECONDS
from oscar_zoo.engines.sglang.launch.user_flags import check_extra_flags

DOCKER = ROOT / "docker"


@pytest.fixture(scope="module")
def dockerfile() -> str:
    """The instructions, one a line."""
    lines = (DOCKER / "Dockerfile").read_text("utf-8").splitlines()
    text = "\n".join(line for line in lines if not line.startswith("#"))
    return re.sub(r"\\\n\s*", "", text)


@pytest.fixture(scope="module")
def server() -> dict[str, Any]:
    """The service of the compose file."""
    service: dict[str, Any] = load("docker/compose.yaml")["services"]["server"]
    return service


def load(path: str) -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load((ROOT / path).read_text("utf-8"))
    return content


def test_the_wheel_is_built_from_everything_it_needs(dockerfile: str) -> None:
    """What the Dockerfile copies exists, passes its ignore file, and holds every package."""
    lines = re.findall(r"^COPY (.*)", dockerfile, re.M)
    copied = [word for line in lines for word in line.split()[:-1]]
    ignore = (DOCKER / "Dockerfile.dockerignore").read_text("utf-8").split("\n")
    for source in copied:
        assert (ROOT / source).exists() and f"!{source}" in ignore, source
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    for folder in project["tool"]["setuptools"]["package-dir"].values():
        assert folder in copied
    assert project["project"]["readme"] in copied
    assert set(project["project"]["license-files"]) <= set(copied)


def test_the_base_is_the_sglang_that_is_tested(dockerfile: str) -> None:
    found = re.search(r"^ARG SGLANG_VERSION=(.*)$", dockerfile, re.M)
    assert found is not None
    assert f"SGLANG ?= sglang=={found[1]}\n" in (ROOT / "Makefile").read_text("utf-8")
    assert FIRST <= tuple(map(int, found[1].split("."))) < BEYOND
    assert f"lmsysorg/sglang:v{found[1]}" in (ROOT / "docs/docker.md").read_text("utf-8")
    assert re.findall(r"^FROM (\S+)", dockerfile, re.M) == ["${SGLANG_IMAGE}"] * 2


def test_the_image_runs_without_root_and_drains(dockerfile: str, server: dict[str, Any]) -> None:
    user = re.search(r"^USER (.*)$", dockerfile, re.M)
    assert user is not None and user[1] == server["user"] and not user[1].startswith("0")
    assert "STOPSIGNAL SIGTERM" in dockerfile and server["stop_signal"] == "SIGTERM"
    assert int(server["stop_grace_period"].removesuffix("s")) > DRAIN_SECONDS
    assert server["read_only"] and server["cap_drop"] == ["ALL"]


def test_ports_and_paths_agree(dockerfile: str, server: dict[str, Any]) -> None:
    assert f"EXPOSE {DEFAULT_PORT}\n" in dockerfile
    assert f'"http://127.0.0.1:{DEFAULT_PORT}/health"' in dockerfile
    assert server["ports"] == [f"127.0.0.1:{DEFAULT_PORT}:{DEFAULT_PORT}"]
    mounted = [volume.split(":")[1] for volume in server["volumes"]]
    assert f"VOLUME {str(mounted).replace(chr(39), chr(34))}" in dockerfile
    named = re.findall(r"(?:HOME|_DIR|OSCAR_ZOO_\w+)=(/\S+)", dockerfile)
    assert len(named) >= 6 and all(path.startswith(tuple(mounted)) for path in named)
    scrape = load("docker/prometheus.yml")["scrape_configs"][0]
    assert scrape["static_configs"][0]["targets"] == [f"server:{DEFAULT_PORT}"]


def test_the_command_is_one_that_serve_takes(server: dict[str, Any]) -> None:
    """It listens beyond loopback, so it has a key, which comes as a secret."""
    first, *words = server["command"]
    assert first == "serve"
    extra = words[words.index("--") + 1 :]
    context = serve.make_context("serve", list(words))
    assert context.params["expose"] == "0.0.0.0"
    assert str(context.params["api_key_file"]) == f"/run/secrets/{server['secrets'][0]}"
    check_extra_flags(tuple(extra))
    assert "--enable-metrics" in extra
    (secret,) = load("docker/compose.yaml")["secrets"].values()
    assert "/docker/secrets/" in (ROOT / ".gitignore").read_text("utf-8")
    assert secret["file"].startswith("./secrets/")
