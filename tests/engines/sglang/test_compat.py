"""Which releases of SGLang the plugin accepts, and what it says about others."""

import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from engines import RELEASES, REPOSITORY, environment, needs_sglang
from forked_commands import forked

from oscar_zoo.engines.sglang.compat import releases
from oscar_zoo.engines.sglang.register import register
from oscar_zoo.errors import UnsupportedMachine


@pytest.fixture(autouse=True)
def process_as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A plugin changes how its process shows errors; this process goes on with other tests."""
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    yield


NEXT = ".".join([*RELEASES[-1].split(".")[:2], str(int(RELEASES[-1].split(".")[2]) + 1)])
"""The release after the last tested one, which is refused."""
RANGE = f">={RELEASES[0]},<{NEXT}"


def pretend(folder: Path, release: str) -> Path:
    """A folder that, in front of the others, makes the installed SGLang say it is `release`."""
    place = folder / f"sglang-{release}.dist-info"
    place.mkdir()
    (place / "METADATA").write_text(f"Metadata-Version: 2.1\nName: sglang\nVersion: {release}\n")
    return folder


@pytest.mark.parametrize(
    "release", [*RELEASES, "0.5.20", "0.5.22rc1", "0.5.23.post1", "0.5.21+cpu"]
)
def test_supported(release: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(pretend(tmp_path, release))
    assert releases.sglang_version() == release


@pytest.mark.parametrize(
    "release", ["0.4.9", "0.5.16", "0.5.2rc3", NEXT, f"{NEXT}rc1", "0.6.0", "1.0"]
)
def test_not_supported(release: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(pretend(tmp_path, release))
    with pytest.raises(UnsupportedMachine) as caught:
        releases.sglang_version()
    assert caught.value.message == f"sglang {release} is outside the supported range {RANGE}."
    assert caught.value.hint == f"pip install 'sglang{RANGE}'"


def test_the_package_asks_for_what_the_plugin_supports() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    assert f"sglang{RANGE}" in project["optional-dependencies"]["serve"]


@pytest.mark.parametrize("given", ["--kv-cache-dtype int2", "--kv-cache-dtype=int2"])
def test_a_server_that_is_asked_for_int2_ends(
    given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(pretend(tmp_path, NEXT))
    monkeypatch.setattr(sys, "argv", ["launch_server", *given.split()])
    with pytest.raises(SystemExit, match=rf"^error: sglang {re.escape(NEXT)} is outside"):
        register()


@pytest.mark.parametrize("given", ["", "--kv-cache-dtype auto int2", "--kv-cache-dtype"])
def test_any_other_server_is_told_once(
    given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.syspath_prepend(pretend(tmp_path, NEXT))
    monkeypatch.setattr(sys, "argv", ["launch_server", *given.split()])
    register()
    (record,) = caplog.records
    assert record.message.startswith(f"No INT2 KV cache: sglang {NEXT} is outside")


@pytest.mark.sglang
@needs_sglang
def test_sglang_does_not_swallow_it(tmp_path: Path) -> None:
    path = f"{pretend(tmp_path, NEXT)}:{environment()['PYTHONPATH']}"
    code = "from sglang.srt.plugins import load_plugins; load_plugins()"
    command = ["-c", code, "--kv-cache-dtype=int2"]
    done = forked(command, environment(PYTHONPATH=path), tmp_path)
    assert done.code == 1
    said = (
        f"error: sglang {NEXT} is outside the supported range {RANGE}. Pip install 'sglang{RANGE}'"
    )
    assert done.err.splitlines()[-1] == said
