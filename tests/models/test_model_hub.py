"""A hub that cannot be reached is found out once, quickly and quietly."""

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants
from raw_server import closed_port

from oscar_zoo.errors import HubUnreachable, NetworkError
from oscar_zoo.evaluate.benchmarks.tasks import hub_rows
from oscar_zoo.models import model_hub

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)


@pytest.fixture
def closed() -> Iterator[str]:
    """Address of a hub that refuses connections."""
    with closed_port() as port:
        yield f"http://127.0.0.1:{port}"


def test_one_attempt_tells(free: None, closed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        assert model_hub.unreachable() is None and model_hub.search_limits() == {}
    monkeypatch.setenv("HF_ENDPOINT", closed)
    assert model_hub.unreachable() == "connection refused"
    assert model_hub.search_limits() == {"local_files_only": True}
    monkeypatch.setenv("HF_ENDPOINT", "http://[")
    assert model_hub.unreachable() == "no connection"


def test_a_slow_resolver_is_not_waited_for(free: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Resolving a name has no timeout of its own."""
    released = threading.Event()

    def connect(*_: object, **__: object) -> socket.socket:
        released.wait(60)
        raise TimeoutError

    monkeypatch.setattr(socket, "create_connection", connect)
    monkeypatch.setattr(model_hub, "SECONDS", 0.1)
    monkeypatch.setenv("HF_ENDPOINT", "http://a-slow-resolver")
    try:
        assert model_hub.unreachable() == "no connection within 0.1 s"
        monkeypatch.setenv("HF_HUB_ETAG_TIMEOUT", "0.3")
        monkeypatch.setenv("HF_ENDPOINT", "http://another-slow-resolver")
        assert model_hub.unreachable() == "no connection within 0.3 s"
    finally:
        released.set()


def test_what_cannot_be_fetched_is_known_before_anything_heavy_is_imported(
    free: None, closed: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "empty"))
    model_hub.check_fetchable(str(tmp_path))  # a folder
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        model_hub.check_fetchable("org/model")
    monkeypatch.setenv("HF_ENDPOINT", closed)
    with pytest.raises(NetworkError, match=r"org/model is not complete .* connection refused"):
        model_hub.check_fetchable("org/model")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(NetworkError, match="org/model is not on this machine, and offline mode"):
        model_hub.check_fetchable("org/model")


@pytest.mark.parametrize(
    "name, value", [("HF_HUB_OFFLINE", "1"), ("HTTPS_PROXY", "http://127.0.0.1:1")]
)
def test_nobody_looks_offline_or_behind_a_proxy(
    free: None, closed: str, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", closed)
    monkeypatch.setenv(name, value)
    assert model_hub.unreachable() is None


def run_alone(endpoint: str, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """A command line in a process of its own, which asks the hub at `endpoint` and no proxy."""
    dropped = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE")
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.lower().endswith("_proxy") and name not in dropped
    }
    own = {"HF_ENDPOINT": endpoint, "HF_HOME": str(folder / "hf"), "PYTHONPATH": str(ROOT)}
    code = "import sys; from oscar_zoo.cli.main import run; raise SystemExit(run(sys.argv[1:]))"
    command = [sys.executable, "-c", code, *words]
    return subprocess.run(command, env=kept | own, capture_output=True, text=True)


@pytest.mark.slow
def test_data_that_cannot_be_fetched_is_one_line(closed: str, tmp_path: Path) -> None:
    """The client would try six times, with a line for each."""
    pytest.importorskip("datasets", reason="datasets is not installed")
    model = str(ROOT / "examples/models/tiny-qwen3-hard")
    output = ["--output-dir", str(tmp_path / "out")]
    done = run_alone(closed, tmp_path, "compute", model, "--calib-data", "wikitext", *output)
    assert done.returncode == 5 and done.stderr.count("\n") == 1, done.stderr
    assert "connection refused" in done.stderr
    assert "--calib-data FILE" in done.stderr


def test_rows_of_a_benchmark_that_cannot_be_fetched_are_one_line(
    free: None, closed: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("datasets", reason="datasets is not installed")
    monkeypatch.setenv("HF_ENDPOINT", closed)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.delenv("HF_DATASETS_OFFLINE", raising=False)
    monkeypatch.delenv("OSCAR_ZOO_OFFLINE", raising=False)
    with pytest.raises(HubUnreachable, match="cannot be reached: connection refused"):
        hub_rows("openai/no-such-rows", None)
    assert not caplog.records and not constants.HF_HUB_OFFLINE
