import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from measured_artifacts import measured_files
from tiny_artifacts import write_folder

ROOT = Path(__file__).resolve().parents[2]
SECOND = Path(sys.prefix) / "hub-2"

CHILD = """
import json, sys, threading
from raw_server import closed_port
from raw_server import RawServer, answer, reset
from oscar_zoo.errors import OscarZooError
from oscar_zoo.registry.hubs.http import http_client
from oscar_zoo.registry.hubs.base import Limits
from oscar_zoo.registry.hubs.http import Transport

def ask(url, read=60):
    limits = Limits(connect=60, read=read, tries=1)
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
        "silent": "network.timeout: Some Hub a/b fell silent.",
        "closed": unreachable + "connection refused.",
        "derived": unreachable + "connection refused.",
        "name": unreachable + "its name cannot be resolved.",
        "scheme": unreachable + "its address is not valid.",
        "port": unreachable + "its address is not valid.",
        "offline": "network.offline: Some Hub a/b is not asked: HF_HUB_OFFLINE is set.",
    }


BAD = [
    ("ALL_PROXY", "socks9://127.0.0.1:9", "proxy"),
    ("HTTPS_PROXY", "http://user:canary#x@127.0.0.1:9", "proxy"),
    ("NO_PROXY", "a:b:c", "proxy"),
    ("SSL_CERT_FILE", "/nonexistent/canary", "certificate"),
]
TOKENS = {"HF_TOKEN": "hf_canary", "MODELSCOPE_API_TOKEN": "ms-canary"}
ON_A_TERMINAL = "import os, pty, sys; sys.exit(os.waitstatus_to_exitcode(pty.spawn(sys.argv[1:])))"


def with_environment(**variables: str) -> dict[str, str]:
    """The environment without proxies and certificates but these."""
    kept = {k: v for k, v in os.environ.items() if not k.lower().endswith(("_proxy", "_bundle"))}
    return kept | TOKENS | {"HF_HUB_OFFLINE": "0"} | variables


SEARCH = (5, "search qwen --hub hf:nobody/zoo")
OTHERS = [
    (5, "publish ./artifact --hub ms:nobody/zoo"),
    (5, "publish ./artifact --hub hf:nobody/zoo"),
    (5, "login"),
    (0, "login ms"),
]


@pytest.mark.parametrize(
    ("code", "words", "name", "value", "word"),
    [*((*SEARCH, *bad) for bad in BAD), *((*other, *BAD[1]) for other in OTHERS)],
)
def test_what_is_wrong_in_the_environment_is_named_without_its_value(
    code: int, words: str, name: str, value: str, word: str
) -> None:
    """The variables of the kind that is at fault are named, and no others."""
    write_folder(Path("artifact"), measured_files())
    good = {"HTTP_PROXY": "http://user:canary@127.0.0.1:9", "SSL_CERT_DIR": "/etc"}
    command = [sys.executable, "-m", "oscar_zoo", *words.split()]
    if words == "login":
        command = [sys.executable, "-c", ON_A_TERMINAL, *command]
    done = subprocess.run(
        command,
        env=with_environment(**(good | {name: value})),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    told = done.stdout + done.stderr
    assert done.returncode == code, told
    assert "canary" not in told and "internal" not in told and "Traceback" not in told
    if code:
        assert word in told and name in told
        other = "HTTP_PROXY" if word == "certificate" else "SSL_CERT_DIR"
        assert other not in told
        assert ("password" in told) == (word == "proxy")


CHILD_6 = """
import os, socket, threading
from http.server import BaseHTTPRequestHandler, HTTPServer
class Six(HTTPServer):
    address_family = socket.AF_INET6
class Answer(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(204)
        self.end_headers()
    log_message = print
server = Six(("::1", 0), Answer)
threading.Thread(target=server.serve_forever, daemon=True).start()
port = str(server.server_port)
os.environ["NO_PROXY"] = os.environ["NO_PROXY"].replace("PORT", port)
from oscar_zoo.registry.hubs.http import http_client
print(http_client().get(f"http://[::1]:{port}/").status_code)
"""


@pytest.mark.parametrize("value", ["[::1]", "localhost, [::1]:PORT", "[::1],fd00::/8,[fd00::]/8"])
@pytest.mark.parametrize("version", [1, 2])
def test_an_ipv6_address_is_excepted_from_a_proxy(version: int, value: str) -> None:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        pytest.skip("no IPv6 on loopback")
    if version == 2 and not SECOND.is_dir():
        pytest.skip("the second version of huggingface_hub is not installed")
    path = os.pathsep.join(map(str, [SECOND, ROOT] if version == 2 else [ROOT]))
    environment = with_environment(HTTP_PROXY="http://127.0.0.1:9", NO_PROXY=value, PYTHONPATH=path)
    done = subprocess.run(
        [sys.executable, "-c", CHILD_6],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout.split()[-1:] == ["204"], done.stderr[-2000:]
