"""A hub that cannot be reached is found out once, quickly and quietly."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from closed_ports import closed_port

from oscar_zoo.errors import NetworkError
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


def test_a_model_that_cannot_be_fetched_is_one_line(closed: str, tmp_path: Path) -> None:
    kept = {
        k: v
        for k, v in os.environ.items()
        if not k.lower().endswith("_proxy") and k != "HF_HUB_OFFLINE"
    }
    variables = {
        "HF_ENDPOINT": closed,
        "HF_HOME": str(tmp_path / "hf"),
        "PYTHONPATH": str(ROOT),
    }
    code = (
        "from oscar_zoo.cli.main import run; raise SystemExit(run(['compute',"
        " 'org/no-such-model']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=kept | variables, capture_output=True, text=True
    )
    assert done.returncode == 5, done.stderr
    assert done.stderr.count("\n") == 1
    assert (
        "org/no-such-model is not complete on this machine, and Hugging Face cannot be reached:"
        " connection refused" in done.stderr
    )
