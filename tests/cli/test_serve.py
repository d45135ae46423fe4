"""`oscar-zoo serve` for real: the command line, stock SGLang on loopback, the example model, a
fitted rotation.

The server that most tests ask is started as users do. Those that say why they cannot start, or run
in the background, are forks (`forked_commands`).
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from cli_output import check, parsed
from engines import MODEL, REPOSITORY, needs_sglang, recall_prompts, text_tokens
from forked_commands import forked, running_in
from reference_server import ReferenceServer, equal_tokens

from oscar_zoo.artifact.manifest import FILE_NAME, Manifest
from oscar_zoo.artifact.reader import read_rotation
from oscar_zoo.cli.main import run
from oscar_zoo.engines.sglang.launch.ports import check_port_free
from oscar_zoo.engines.sglang.metrics import METRICS
from oscar_zoo.evaluate.simulated_cache import CacheSpec
from oscar_zoo.models.loading import load_model

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(600), needs_sglang]

PROGRAM = (sys.executable, "-c", "from oscar_zoo.cli.main import main; main()")
NEW = 16
KEY = "key-with-#-and-'quotes'"
CANARY = "token-that-no-child-may-see"
WHOLE_PROMPTS = 8192  # chunks as long as this never cut a prompt, whatever else is in the batch


@dataclass(frozen=True)
class Running:
    process: subprocess.Popen[str]
    ready: dict[str, Any]
    port: int
    temp: Path
    artifact: Path

    def post(self, path: str, body: dict[str, Any]) -> Any:
        return json.loads(self.ask(path, json.dumps(body).encode()))

    def ask(self, path: str, body: bytes | None = None) -> bytes:
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", body, headers)
        with urllib.request.urlopen(request, timeout=300) as response:
            return bytes(response.read())


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def variables(folder: Path) -> dict[str, str]:
    """Those of a user whose servers' state is in `folder`."""
    own = {"TMPDIR": str(folder), "OSCAR_ZOO_STATE": str(folder), "OMP_NUM_THREADS": "1"}
    return os.environ | own | {"HF_TOKEN": CANARY}


def serve(artifact: Path, port: int, *extra: str, options: tuple[str, ...] = ()) -> list[str]:
    """A command line."""
    command = ["serve", str(artifact), "--model", str(MODEL), "--port", str(port), "--json"]
    return [*command, *options, "--", *extra]


def start(
    artifact: Path, port: int, folder: Path, *extra: str, options: tuple[str, ...] = ()
) -> subprocess.Popen[str]:
    """As users do: every process is a fresh one."""
    return subprocess.Popen(
        [*PROGRAM, *serve(artifact, port, *extra, options=options)],
        env=variables(folder),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def oscar_zoo(folder: Path, *arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """Another command of the user whose servers' state is in `folder`."""
    return subprocess.run(
        [*PROGRAM, *arguments],
        env=variables(folder),
        input=stdin,
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fitted") / "rotation"
    text = REPOSITORY / "examples/text/calibration.txt"
    arguments = [
        "--calib-data",
        text,
        "--calib-tokens",
        2048,
        "--dtype",
        "float32",
        "--output-dir",
        folder,
        "--method",
        "oscar",
        "-q",
    ]
    assert run(["compute", str(MODEL), *map(str, arguments)]) == 0
    return folder


@pytest.fixture(scope="module")
def served(artifact: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    port, temp = free_port(), tmp_path_factory.mktemp("temp")
    flags = (f"--chunked-prefill-size={WHOLE_PROMPTS}", "--disable-radix-cache", "--enable-metrics")
    (temp / "key").write_text(KEY + "\n")
    options = ("--expose", "127.0.0.1", "--api-key-file", str(temp / "key"))
    process = start(artifact, port, temp, *flags, options=options)
    assert process.stdout is not None
    text = ""
    for line in process.stdout:
        text += line
        if line.startswith("}"):
            break
    ready = json.loads(text or "{}")
    try:
        assert "url" in ready, (ready, process.stderr and process.stderr.read())
        check(ready)
        yield Running(process, ready, port, temp, artifact)
    finally:
        process.kill() if process.poll() is None else None
        process.wait()


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


def test_it_is_asked_for_facts_in_long_prompts(
    served: Running, capsys: pytest.CaptureFixture[str]
) -> None:
    url, key = f"http://127.0.0.1:{served.port}", served.temp / "key"
    asked = ["--family", "single", "--depths", "2", "--samples", "1", "--lengths", "600"]
    model = ["--model", str(MODEL), "--url", url, "--api-key-file", str(key)]
    assert run(["ruler", str(served.artifact), *model, *asked, "--json"]) == 0
    found = parsed(capsys.readouterr().out)
    assert found["servers"][url]["cache_dtype"] == "int2"
    assert [(one["depth"], one["asked"]) for one in found["cells"]] == [(0.0, 1), (1.0, 1)]


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
    assert again.returncode == 1 and f"oscar-zoo stop {served.port}" in again.stderr
    assert oscar_zoo(served.temp, "stop", "Qwen3-8B").returncode == 3


def test_it_answers_over_the_openai_api(served: Running) -> None:
    reply = served.post(
        "/v1/completions",
        {"model": "any", "prompt": "The quick", "max_tokens": 4, "temperature": 0},
    )
    assert reply["choices"][0]["text"] and reply["usage"]["completion_tokens"] == 4
    chat = {"model": "any", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 3}
    assert served.post("/v1/chat/completions", chat)["choices"][0]["message"]["content"]


def test_the_api_key_is_needed_and_never_an_argument(served: Running) -> None:
    request = urllib.request.Request(f"http://127.0.0.1:{served.port}/v1/models")
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(request, timeout=300)
    assert caught.value.code == 401
    for pid in [served.process.pid, *all_children(served.process.pid)]:
        assert KEY.encode() not in cmdline(pid)


def test_ten_requests_at_once_give_the_tokens_of_the_reference(served: Running) -> None:
    """Prompts far longer than both windows, so that every decode step reads INT2 history."""
    ids = text_tokens()
    prompts = recall_prompts() + [ids[at : at + 350 + at // 50] for at in range(1000, 8000, 1000)]
    assert len(prompts) == 10

    def ask(prompt: list[int]) -> list[int]:
        sampling = {"temperature": 0, "max_new_tokens": NEW, "ignore_eos": True}
        return list(
            served.post("/generate", {"input_ids": prompt, "sampling_params": sampling})[
                "output_ids"
            ]
        )

    with ThreadPoolExecutor(10) as pool:
        answers = list(pool.map(ask, prompts))
    reference = reference_server(served.artifact)
    equal = sum(
        equal_tokens(answer, reference.generate(prompt, NEW))
        for prompt, answer in zip(prompts, answers, strict=True)
    )
    assert equal > 0.8 * NEW * len(prompts)


def test_its_metrics_are_on_the_page_of_the_engine(served: Running) -> None:
    page = served.ask("/metrics").decode()
    found = set(re.findall(r"^(oscar_int2_[a-z_]+)\{", page, re.MULTILINE))
    assert found == {metric.full_name for metric in METRICS}
    for metric in METRICS:
        assert f"# TYPE {metric.full_name} {metric.kind}" in page
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


def test_beam_search_is_refused_and_the_server_goes_on(served: Running) -> None:
    body = {"text": "The quick", "sampling_params": {"max_new_tokens": 2, "beam_width": 2}}
    with pytest.raises(urllib.error.HTTPError) as caught:
        served.post("/generate", body)
    said = caught.value.read().decode()
    assert caught.value.code == 400 and "beam_width" in said
    assert "does not work with an INT2 KV cache" in said or version("sglang") < "0.5.21"
    assert served.post("/generate", {**body, "sampling_params": {"max_new_tokens": 2}})["text"]


def test_an_image_is_refused_by_a_model_that_reads_text_only(served: Running) -> None:
    """SGLang alone leaves the image out and answers."""
    body = {"text": "The quick", "sampling_params": {"max_new_tokens": 2}}
    with pytest.raises(urllib.error.HTTPError) as caught:
        served.post("/generate", {**body, "image_data": "data:image/png;base64,AAAA"})
    assert caught.value.code == 400
    assert "served with text only" in caught.value.read().decode()
    assert served.post("/generate", body)["text"]


def test_the_comparison_depends_on_the_rotation(served: Running) -> None:
    """INT2 history without a transform gives other tokens, so the test above does see the cache."""
    reference = reference_server(served.artifact)
    bare = ReferenceServer(
        reference.model, CacheSpec(None, None, reference.spec.recipe), WHOLE_PROMPTS
    )
    prompts = [text_tokens()[at : at + 450] for at in (1000, 4000)]
    assert any(bare.generate(p, NEW).answer != reference.generate(p, NEW).answer for p in prompts)


def reference_server(artifact: Path) -> ReferenceServer:
    manifest = Manifest.from_bytes((artifact / FILE_NAME).read_bytes())
    sides = []
    for role in ("k_rotation", "v_rotation"):
        entry = manifest.file(role)  # type: ignore[arg-type]
        assert entry is not None
        sides.append(read_rotation((artifact / entry.path).read_bytes(), what=entry.path))
    recipe = manifest.recipe
    return ReferenceServer(
        load_model(str(MODEL), dtype="float32"), CacheSpec(*sides, recipe), WHOLE_PROMPTS
    )


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


def test_without_its_detokenizer_it_ends_at_once(served: Running) -> None:
    """Last of the server's tests: it ends it. By itself SGLang holds all requests for a minute
    after a crash, to write dumps."""
    tree = all_children(served.process.pid)
    (victim,) = (pid for pid in tree if cmdline(pid).startswith(b"sglang::detokenizer"))
    os.kill(victim, signal.SIGKILL)
    assert served.process.wait(timeout=300) == 1
    assert served.process.stderr is not None
    assert "its process detokenizer was killed" in served.process.stderr.read()
    log = Path(served.ready["log"]).read_text()
    assert "detokenizer" in log and "before crash diagnostics" not in log
    assert not [pid for pid in tree if alive(pid)]


def test_sigterm_leaves_nothing_behind(artifact: Path, tmp_path: Path) -> None:
    port, printed = free_port(), tmp_path / "forked.out"
    command = ["-m", "oscar_zoo", *serve(artifact, port)]
    with ThreadPoolExecutor(1) as pool:
        serving = pool.submit(forked, command, variables(tmp_path), tmp_path)
        while not (printed.exists() and printed.read_text().endswith("}\n")):
            assert not serving.done(), serving.result()
            time.sleep(0.05)
        tree = running_in(tmp_path)
        os.kill(parsed(printed.read_text())["pid"], signal.SIGTERM)
        ended = serving.result()
    assert ended.code == 0, ended.err
    assert len(tree) > 3 and not [pid for pid in tree if alive(pid)]
    assert not list(tmp_path.glob("oscar-zoo-serve-*"))
    check_port_free("127.0.0.1", port)


@pytest.mark.parametrize("options", [(), ("--detach",)])
def test_ctrl_c_while_starting_leaves_nothing_behind(
    artifact: Path, tmp_path: Path, options: tuple[str, ...]
) -> None:
    process = start(artifact, free_port(), tmp_path, options=options)
    while not (
        tree := [pid for pid in all_children(process.pid) if b"sglang.launch" in cmdline(pid)]
    ):
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=300)
    assert process.returncode == 130 and parsed(out)["error"]["code"] == "interrupted"
    assert not [pid for pid in tree if alive(pid)] and not list(tmp_path.glob("oscar-zoo-serve-*"))
    assert not list((tmp_path / "servers").iterdir())


def test_a_server_that_cannot_start_says_why(artifact: Path, tmp_path: Path) -> None:
    """In the background, too: the child of `--detach` fails as `serve` does, and its words are
    passed on."""
    command = serve(artifact, free_port(), "--oscar-group-size=48", options=("--detach",))
    ended = forked(["-m", "oscar_zoo", *command], variables(tmp_path), tmp_path)
    error = ended.json["error"]
    assert ended.code == 1 and error["message"].startswith("the server ended while starting: ")
    assert error["message"].endswith(
        ": INT2 rows of this model: group_size 48 does not divide head_dim 64."
    )
    assert "Traceback" not in error["message"] and "log: " in error["hint"]
    log = Path(error["hint"].rpartition("log: ")[2]).read_text()
    assert "group_size 48" in log and not list((tmp_path / "servers").iterdir())


def test_a_server_in_the_background_from_start_to_stop(artifact: Path, tmp_path: Path) -> None:
    port = free_port()
    options = ("--detach", "--require-key")
    command = serve(artifact, port, "--served-model-name=my-model", options=options)
    command.remove("--json")
    begun = forked(["-m", "oscar_zoo", *command], variables(tmp_path), tmp_path)
    assert begun.code == 0, begun.err
    phases = [line.rpartition(" (")[0] for line in begun.err.splitlines()[1:]]
    assert phases[0] == "starting SGLang" and {"loading weights", "warming up"} & set(phases)
    *rows, last = begun.out.splitlines()
    block, key = dict(line.split(maxsplit=1) for line in rows), last.removeprefix("OPENAI_API_KEY=")
    assert key.startswith("oscar-zoo-") and len(key) > 40 and key not in "".join(rows)
    kept = sorted(path for path in (tmp_path / "servers").iterdir() if path.suffix != ".json")
    assert [path.suffix for path in kept] == [".administration-key", ".key"]
    assert [path.stat().st_mode & 0o777 for path in kept] == [0o600, 0o600]
    assert kept[1].read_text().strip() == key != kept[0].read_text().strip()
    assert (
        block["Model"].startswith("my-model, SGLang")
        and f"stop with oscar-zoo stop {port}" in block["Ready"]
    )
    (row,) = parsed(oscar_zoo(tmp_path, "ps", "--json").stdout)["servers"]
    assert (row["port"], row["model_id"]) == (port, "my-model")
    assert "my-model" in oscar_zoo(tmp_path, "ps").stdout
    try:
        answer = subprocess.run(
            ["sh", "-c", block["Try"]], capture_output=True, text=True, timeout=300, check=True
        )
        assert json.loads(answer.stdout)["model"] == "my-model"
        talked = oscar_zoo(tmp_path, "chat", "my-model", "--max-tokens", "4", stdin="Hello\n")
        assert talked.returncode == 0 and talked.stdout.endswith("\n")
        assert talked.stderr in (
            "",
            "note: the answer was cut off; for longer ones: --max-tokens N\n",
        )
        tree = all_children(row["pid"])
        log = oscar_zoo(tmp_path, "logs", "-n", "10000").stdout
        assert "The server is fired up" in log and key not in log
    finally:
        stopped = oscar_zoo(tmp_path, "stop", "my-model")
    assert stopped.returncode == 0 and stopped.stdout == f"Stopped my-model on port {port}.\n"
    assert tree and not [pid for pid in (row["pid"], *tree) if alive(pid)]
    check_port_free("127.0.0.1", port)
    assert not list((tmp_path / "servers").iterdir())
    assert oscar_zoo(tmp_path, "stop").returncode == 3
    assert "fired up" in oscar_zoo(tmp_path, "logs", str(port), "-n", "1000").stdout


def all_children(pid: int) -> list[int]:
    direct, tasks = [], list[Path]()
    with contextlib.suppress(OSError):  # a process that has ended meanwhile
        tasks += Path(f"/proc/{pid}/task").glob("*/children")
    for task in tasks:
        with contextlib.suppress(OSError):  # a thread that has ended meanwhile
            direct += [int(child) for child in task.read_text().split()]
    return [found for child in direct for found in (child, *all_children(child))]


def cmdline(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split(") ")[1][0] != "Z"
    except OSError:
        return False
