"""Every test: state of its own, no network beyond loopback, skips that say why."""

import gc
import importlib
import importlib.util
import ipaddress
import os
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

import oscar_zoo.models.torchvision_ops  # noqa: F401 (some tests import transformers before anything of ours)
from oscar_zoo.engines.sglang.launch import plan
from oscar_zoo.models import model_hub

os.environ.setdefault("HF_HUB_OFFLINE", "1")
importlib.import_module("huggingface_hub.constants")  # reads variables: those of no single test
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # the cores are shared among the workers
    # No two workers take the same port, nor one that a program under test takes for itself.
    share = 10_000 // int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    first = 10_000 + share * int(os.environ["PYTEST_XDIST_WORKER"].removeprefix("gw"))
    plan.NEVER_GIVEN = range(first, first + share)
HAS_GPU = Path("/dev/nvidiactl").exists()
if not HAS_GPU:  # Triton looks at it when it is imported, and much imports Triton
    os.environ["TRITON_INTERPRET"] = "1"
MEMORY = Path("/dev/shm")
if MEMORY.is_dir():
    # Thousands of small files are made durable here, and a disk takes milliseconds for each.
    place = os.statvfs(MEMORY)
    if place.f_bavail * place.f_frsize > 6 * 2**30 and not place.f_flag & os.ST_NOEXEC:
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))
# The same examples in every run, however long the machine takes for one; others are tried with
# --hypothesis-profile=random.
settings.register_profile(
    "suite",
    database=None,
    deadline=None,
    derandomize=True,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("random", settings.get_profile("suite"), derandomize=False)
settings.load_profile("suite")
gc.set_threshold(50_000)  # what the tests import stays; there is little garbage among it
# A shell starts what runs in its background with Ctrl-C ignored, and children inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def own_state(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Cache, data, state, configuration and current folder of this test alone; children inherit
    them."""
    folder = tmp_path_factory.mktemp("state")
    (folder / "work").mkdir()
    monkeypatch.chdir(folder / "work")
    for name in ("CACHE", "DATA", "STATE", "CONFIG"):
        monkeypatch.setenv(f"OSCAR_ZOO_{name}", str(folder / name.lower()))
    for name in ("HUB", "OFFLINE", "DEBUG", "SIGN_KEY"):
        monkeypatch.delenv(f"OSCAR_ZOO_{name}", raising=False)
    monkeypatch.setenv("OSCAR_ZOO_PORT", str(plan.free_port()))  # the usual one may be taken
    model_hub._connect.cache_clear()  # a port may be that of a hub of an earlier test
    return folder


@pytest.fixture(autouse=True)
def loopback_only(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A connection to anywhere else fails the test at once."""
    connect = socket.socket.connect

    def guarded(self: socket.socket, address: Any) -> None:
        if self.family in (socket.AF_INET, socket.AF_INET6):
            host = "127.0.0.1" if address[0] == "localhost" else address[0]
            try:
                allowed = ipaddress.ip_address(host).is_loopback
            except ValueError:
                allowed = False
            if not allowed:
                raise AssertionError(f"a test tried to connect to {address!r}")
        connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", guarded)
    yield


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Command lines in this process: `cli_output.Cli`. They start no Python that imports SGLang for
    its parser alone."""
    forked = importlib.import_module("forked_commands")
    monkeypatch.setattr("oscar_zoo.children.output", forked.output)
    return importlib.import_module("cli_output").Cli(capsys)


@pytest.fixture
def artifact(tmp_path: Path) -> Path:
    """A folder with an artifact for the example model."""
    tiny = importlib.import_module("tiny_artifacts")
    return Path(tiny.write_folder(tmp_path / "artifact", tiny.artifact_files()))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--light", action="store_true", help="run as if torch were not installed")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--light"):  # `make quick` has no time for what needs torch
        sys.modules["torch"] = None  # type: ignore[assignment]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip by capability, with the reason; files with slow tests first, so that the workers end
    together."""
    slow = {
        item.path
        for item in items
        if item.get_closest_marker("slow") or item.get_closest_marker("sglang")
    }
    items.sort(key=lambda item: item.path not in slow)
    skips = {}
    if importlib.util.find_spec("sglang") is None:
        skips["sglang"] = "sglang is not installed"
    if not HAS_GPU:
        skips["gpu"] = "no CUDA device"
    for item in items:
        for marker, reason in skips.items():
            if item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))


def pytest_collection_finish() -> None:
    """From here on, no collection walks through what was imported and collected."""
    gc.freeze()
