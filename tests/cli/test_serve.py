"""`oscar-zoo serve` for real: what it says of its server, and what the server says of itself."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest
from cli_output import parsed
from engines import MODEL, needs_sglang
from served_model import (
    CANARY,
    KEY,
    Running,
    alive,
    all_children,
    cmdline,
    fitted,
    oscar_zoo,
    serving,
)

from oscar_zoo.artifact.manifest import FILE_NAME, Manifest
from oscar_zoo.engines.sglang.hooks.observation import METRICS, PREFIX
from oscar_zoo.engines.sglang.launch.plan import check_port_free

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(600), needs_sglang]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    artifact = fitted(tmp_path_factory.mktemp("fitted") / "rotation")
    with serving(artifact, tmp_path_factory.mktemp("temp")) as running:
        yield running


def test_it_says_what_it_serves(served: Running) -> None:
    manifest = Manifest.from_bytes((served.artifact / FILE_NAME).read_bytes())
    assert served.ready["url"] == f"http://127.0.0.1:{served.port}/v1"
    assert served.ready["digest"] == manifest.digest
    assert served.ready["recipe"] == manifest.recipe.model_dump(mode="json")


def test_its_log_calls_the_artifact_by_its_digest(served: Running) -> None:
    """The copy that the server reads has other bytes, and the log calls it a copy."""
    log = Path(served.ready["log"]).read_text("utf-8")
    named = set(re.findall(r"artifact (sha256:[0-9a-f]{64}), read from a verified copy", log))
    assert named == {served.ready["digest"]}


def test_what_it_says_comes_from_the_server(served: Running) -> None:
    """The id of the model is its name on its hub, never a path."""
    (model,) = json.loads(served.ask("/v1/models"))["data"]
    assert served.ready["model_id"] == model["id"] == "oscar-zoo/tiny-qwen3-hard"
    assert served.ready["context_tokens"] == model["max_model_len"]
    info = json.loads(served.ask("/server_info"))
    told = info["internal_states"][0]["oscar_int2"]
    assert (
        served.ready["capacity_tokens"]
        == info["max_total_num_tokens"]
        == told["memory"]["token_slots"]
    )
    assert served.ready["bits_per_element"] == told["bits_per_element"] == 2.5
    assert served.ready["windows"] == {
        "sink": told["recipe"]["sink"],
        "recent": told["recipe"]["recent"],
    }
    assert served.ready["max_running_requests"] == 16 and served.ready["sglang"] == version(
        "sglang"
    )
    assert served.ready["bf16_capacity_tokens"] is None  # a flag limits the tokens


def test_the_curl_line_works_when_pasted(served: Running) -> None:
    line = served.ready["curl"]
    assert KEY not in line and '"model": "oscar-zoo/tiny-qwen3-hard"' in line
    done = subprocess.run(
        ["sh", "-c", f"{line} -sS"], capture_output=True, text=True, timeout=300, check=True
    )
    reply = json.loads(done.stdout)  # a sampled answer of a tiny model, which may end at once
    assert (
        reply["choices"][0]["message"]["role"] == "assistant"
        and reply["usage"]["completion_tokens"] > 0
    )


def test_its_metrics_are_on_the_page_of_the_engine(served: Running) -> None:
    page = served.ask("/metrics").decode()
    found = set(re.findall(r"^(oscar_int2_[a-z_]+)\{", page, re.MULTILINE))
    assert found == {PREFIX + name for name in METRICS}
    for name in METRICS:
        kind = "counter" if name.endswith("_total") else "gauge"
        assert f"# TYPE {PREFIX}{name} {kind}" in page
    (rows,) = re.findall(r"^oscar_int2_capacity_ring_rows\{(.*)\} (\S+)$", page, re.MULTILINE)
    (running,) = re.findall(r"^sglang:num_running_reqs\{(.*)\} \S+$", page, re.MULTILINE)
    assert sorted(rows[0].split(",")) == sorted(running.split(",")) and float(rows[1]) == 16
    assert f'digest="{served.ready["digest"]}"' in page and f'@{served.ready["digest"]}"' in page


def test_server_info_names_artifact_and_recipe(served: Running) -> None:
    for path in ("/get_server_info", "/server_info"):
        (state,) = json.loads(served.ask(path))["internal_states"]
        told, recipe = state["oscar_int2"], served.ready["recipe"]
        assert told["artifact"]["name"].endswith(f"@{served.ready['digest']}")
        assert told["artifact"]["digest"] == served.ready["digest"]
        assert told["artifact"]["copy_digest"] not in (None, served.ready["digest"])
        assert told["artifact"]["format_version"] == 1
        windows = recipe["windows"]
        assert (told["recipe"]["sink"], told["recipe"]["recent"]) == (
            windows["sink"],
            windows["recent"],
        )
        assert told["recipe"]["group_size"] == recipe["group_size"]
        origins = dict(told["origins"])
        assert origins.pop("bits") == "default" and set(origins.values()) == {"flag"}
        assert told["memory"]["request_rows"] == 17


def test_another_terminal_sees_it(served: Running) -> None:
    (row,) = parsed(oscar_zoo(served.temp, "ps", "--json").stdout)["servers"]
    assert (row["port"], row["pid"], row["state"]) == (served.port, served.process.pid, "ready")
    (record,) = (served.temp / "servers").glob("*.json")
    assert record.stat().st_mode & 0o777 == 0o600 and record.parent.stat().st_mode & 0o777 == 0o700
    again = oscar_zoo(
        served.temp,
        "serve",
        str(served.artifact),
        "--model",
        str(MODEL),
        "--port",
        str(served.port),
    )
    assert again.returncode == 7 and f"oscar-zoo stop {served.port}" in again.stderr
    assert oscar_zoo(served.temp, "stop", "Qwen3-8B").returncode == 3


def test_the_api_key_is_needed_and_never_an_argument(served: Running) -> None:
    request = urllib.request.Request(f"http://127.0.0.1:{served.port}/v1/models")
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(request, timeout=300)
    assert caught.value.code == 401
    for pid in [served.process.pid, *all_children(served.process.pid)]:
        assert KEY.encode() not in cmdline(pid)


def test_secrets_and_loaders_stay_out_of_the_children(served: Running) -> None:
    children = all_children(served.process.pid)
    engine = [pid for pid in children if b"watchdog.py" not in cmdline(pid)]
    assert engine and len(children) > len(engine)
    for pid in children:
        assert b"--trust-remote-code" not in cmdline(pid)
        assert CANARY.encode() not in Path(f"/proc/{pid}/environ").read_bytes()
    for pid in engine:
        assert b"TORCH_FORCE_WEIGHTS_ONLY_LOAD=1" in Path(f"/proc/{pid}/environ").read_bytes()


def test_keys_are_in_no_log_and_no_child(served: Running) -> None:
    """SGLang prints its arguments, with the keys that it was given; these are not the client's."""
    log, servers = Path(served.ready["log"]), served.temp / "servers"
    (administration,) = (path.read_text().strip() for path in servers.glob("*.administration-key"))
    said = log.read_text()
    assert re.search(r"admin_api_key'?[:=] ?'\*\*\*'", said)
    assert log.stat().st_mode & 0o777 == 0o600
    told = [said, served.ask("/server_info").decode(), json.dumps(served.ready)]
    told.append(oscar_zoo(served.temp, "ps", "--json").stdout)
    for pid in all_children(served.process.pid):
        told.append(cmdline(pid).decode("utf-8", "replace"))
        told.append(Path(f"/proc/{pid}/environ").read_text("utf-8", "replace"))
    assert [one for one in told if KEY in one or administration in one] == []


def test_only_loopback_is_listened_on(served: Running) -> None:
    tables = [Path(f"/proc/net/{name}").read_text().splitlines()[1:] for name in ("tcp", "tcp6")]
    port = f"{served.port:04X}"
    local = [line.split()[1] for table in tables for line in table if line.split()[3] == "0A"]
    assert [address.split(":")[0] for address in local if address.endswith(f":{port}")] == [
        "0100007F"
    ]


def test_sigterm_leaves_nothing_behind(served: Running) -> None:
    """Last of the server's tests: it ends it."""
    tree = all_children(served.process.pid)
    assert len(tree) > 2
    served.process.send_signal(signal.SIGTERM)
    assert served.process.wait(timeout=300) == 0
    assert not [pid for pid in tree if alive(pid)]
    assert not list(served.temp.glob("oscar-zoo-serve-*"))
    check_port_free("127.0.0.1", served.port)
