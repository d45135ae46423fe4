from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SECOND = Path(sys.prefix) / "hub-2"

CHILD = """
import json, sys, threading
from closed_ports import closed_port
from raw_server import RawServer, answer, reset
from oscar_zoo.errors import OscarZooError
from oscar_zoo.hubs.session import http_client
from oscar_zoo.hubs.transport import Limits, Transport

def ask(url, answer=60):
    limits = Limits(connect=60, answer=answer, read=60, tries=1)
    ask_token, refuse = lambda: "canary-token", lambda reply, sent: KeyError()
    transport = Transport("Some Hub a/b", url, token=ask_token, refusal=refuse, limits=limits)
    try:
        return transport.get(url + "/file", limit=1000).body.decode()
    except OscarZooError as error:
        return f"{error.code}: {error.message}"

def early(connection, seen):
    connection.sendall(answer(b"x" * 10, Content_Length=20))
    reset(connection)

silent = threading.Event()
found = {"library": type(http_client()).__module__.split(".")[0]}
with closed_port() as port, RawServer(lambda c, s: c.sendall(answer(b"content"))) as good, RawServer(early) as short:
    with RawServer(lambda c, s: reset(c)) as rude, RawServer(lambda c, s: silent.wait(60)) as mute:
        found |= {"good": ask(good.url), "early": ask(short.url), "reset": ask(rude.url), "silent": ask(mute.url, 0.5)}
    class Derived(type(http_client())):
        "as a factory of the user may return"
    Derived.__module__ = "elsewhere"
    import huggingface_hub
    huggingface_hub.set_client_factory(lambda: Derived(follow_redirects=True))
    found |= {"derived": ask(f"http://127.0.0.1:{port}"), "redirected": ask(good.url)}
    huggingface_hub.set_client_factory(huggingface_hub.utils._http.default_client_factory)
    found |= {"closed": ask(f"http://127.0.0.1:{port}"), "name": ask("http://no-such-host.invalid")}
    found |= {"scheme": ask("gopher://127.0.0.1"), "port": ask("http://127.0.0.1:99999")}
    huggingface_hub.constants.HF_HUB_OFFLINE = True
    found["offline"] = ask(good.url)
print(json.dumps(found))
"""  # noqa: E501


def run(*path: Path) -> dict[str, str]:
    environment = {
        name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")
    }
    folders = (*path, ROOT, ROOT / "tests" / "support")
    environment |= {"HF_HUB_OFFLINE": "0", "PYTHONPATH": os.pathsep.join(map(str, folders))}
    child = subprocess.run(
        [sys.executable, "-c", CHILD], env=environment, capture_output=True, text=True, timeout=300
    )
    assert child.returncode == 0, child.stderr
    assert "canary" not in child.stdout + child.stderr
    return dict(json.loads(child.stdout))


@pytest.mark.parametrize("version", [1, 2])
def test_both_clients_of_the_hub_fail_in_the_same_words(version: int) -> None:
    if version == 2 and not SECOND.is_dir():
        pytest.skip("the second version of huggingface_hub is not installed")
    found = run(SECOND) if version == 2 else run()
    library = found.pop("library")
    assert library == ("httpx2" if version == 2 else "httpx")
    unreachable = "network.unreachable: Some Hub a/b cannot be reached: "
    assert found == {
        "good": "content",
        "redirected": "content",
        "early": unreachable + "the connection broke off.",
        "reset": unreachable + "the connection broke off.",
        "silent": "network.timeout: Some Hub a/b did not answer within 0.5 s.",
        "closed": unreachable + "connection refused.",
        "derived": unreachable + "connection refused.",
        "name": unreachable + "its name cannot be resolved.",
        "scheme": unreachable + "its address is not valid.",
        "port": unreachable + "its address is not valid.",
        "offline": "network.offline: Some Hub a/b is not asked: HF_HUB_OFFLINE is set.",
    }


@pytest.mark.parametrize(
    ("name", "value", "word"),
    [
        ("ALL_PROXY", "socks9://127.0.0.1:9", "proxy"),
        ("HTTPS_PROXY", "http://user:canary#x@127.0.0.1:9", "proxy"),
        ("HTTPS_PROXY", "http://127.0.0.1:port", "proxy"),
        ("NO_PROXY", "[::1]", "proxy"),
        ("SSL_CERT_FILE", "/nonexistent", "certificate"),
        ("SSL_CERT_FILE", __file__, "certificate"),
    ],
)
def test_a_bad_environment_is_named_without_its_value(name: str, value: str, word: str) -> None:
    command = [sys.executable, "-m", "oscar_zoo", "search", "qwen", "--hub", "hf:nobody/zoo"]
    environment = os.environ | {name: value, "HF_HUB_OFFLINE": "0"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 5, done.stderr
    assert word in done.stderr
    assert name in done.stderr
    assert "canary" not in done.stderr
    assert "internal" not in done.stderr
