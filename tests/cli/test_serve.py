"""`oscar-zoo serve` for real: what it says of its server, what the server answers, and how servers
end by themselves, by signals, and in the background.

One server is started as users do; the others are forks (`forked_commands`) but for those that a
signal ends while they start.
"""

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path

import pytest
from cli_output import Cli, parsed
from engines import MODEL, needs_sglang, recall_prompts, text_tokens
from forked_commands import forked
from forked_process import POLL_SECONDS
from reference_server import ReferenceServer, equal_tokens
from served_model import (
    CANARY,
    KEY,
    WHOLE_PROMPTS,
    Running,
    alive,
    all_children,
    cmdline,
    fitted,
    fork,
    oscar_zoo,
    serve,
    serving,
    start,
    variables,
)
from tiny_artifacts import K_NAME, artifact_files, write_folder

from oscar_zoo.artifact.manifest import FILE_NAME, Manifest
from oscar_zoo.artifact.reader import read_rotation
from oscar_zoo.engines.metrics import METRICS, PREFIX
from oscar_zoo.engines.sglang.launch.plan import check_port_free, free_port
from oscar_zoo.evaluate.simulated_cache import CacheSpec
from oscar_zoo.models.loading import load_model

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(600), needs_sglang]
NEW, PAGE = 16, 64
TOKEN_BYTES, ROW_BYTES = (4 * 2 * 2 * row for row in (64 // 4 + 2 * 2, 64 * 4))
"""Of the example model, for its layers, heads and sides: in a slot, and in float32."""


@pytest.fixture(scope="module")
def rotation(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Fitted for the example model."""
    return fitted(tmp_path_factory.mktemp("fitted") / "rotation")


@pytest.fixture(scope="module")
def served(rotation: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with serving(rotation, tmp_path_factory.mktemp("temp")) as running:
        yield running


def test_it_says_what_it_serves(served: Running) -> None:
    """The copy that it reads has other bytes; the log calls the artifact by its own digest."""
    manifest = Manifest.from_bytes((served.artifact / FILE_NAME).read_bytes())
    assert served.ready["url"] == f"http://127.0.0.1:{served.port}/v1"
    assert served.ready["digest"] == manifest.digest
    assert served.ready["recipe"] == manifest.recipe.model_dump(mode="json")
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
    engine = served.ready["engine"], served.ready["version"]
    assert served.ready["max_running_requests"] == 16
    assert engine == ("sglang", version("sglang"))
    assert served.ready["bf16_capacity_tokens"] is None  # a flag limits the tokens


def test_the_curl_line_works_when_pasted(served: Running) -> None:
    line = served.ready["curl"]
    assert KEY not in line and '"model": "oscar-zoo/tiny-qwen3-hard"' in line
    done = subprocess.run(
        ["sh", "-c", f"{line} -sS"], capture_output=True, text=True, timeout=300, check=True
    )
    reply = json.loads(done.stdout)  # a sampled answer of a tiny model, which may end at once
    assert reply["choices"][0]["message"]["role"] == "assistant"
    assert reply["usage"]["completion_tokens"] > 0


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
        assert told["recipe"]["sink"] == windows["sink"]
        assert told["recipe"]["recent"] == windows["recent"]
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
    assert [one.split(":")[0] for one in local if one.endswith(f":{port}")] == ["0100007F"]


def test_it_answers_over_the_openai_api(served: Running) -> None:
    reply = served.post(
        "/v1/completions",
        {"model": "any", "prompt": "The quick", "max_tokens": 4, "temperature": 0},
    )
    assert reply["choices"][0]["text"] and reply["usage"]["completion_tokens"] == 4
    chat = {"model": "any", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 3}
    assert served.post("/v1/chat/completions", chat)["choices"][0]["message"]["content"]


def test_it_is_asked_for_facts_in_long_prompts(served: Running, cli: Cli) -> None:
    url, key = f"http://127.0.0.1:{served.port}", served.temp / "key"
    asked = ["--family", "single", "--depths", "2", "--samples", "1", "--lengths", "600"]
    model = ["--model", MODEL, "--url", url, "--api-key-file", key]
    found = parsed(cli(0, "ruler", served.artifact, *model, *asked, "--json"))
    assert found["servers"][url]["cache_dtype"] == "int2"
    assert [(one["depth"], one["asked"]) for one in found["cells"]] == [(0.0, 1), (1.0, 1)]


def test_ten_requests_at_once_give_the_tokens_of_the_reference(served: Running) -> None:
    """Prompts far longer than both windows, so that every decode step reads INT2 history."""
    ids = text_tokens()
    prompts = recall_prompts() + [ids[at : at + 350 + at // 50] for at in range(1000, 8000, 1000)]
    assert len(prompts) == 10

    def ask(prompt: list[int]) -> list[int]:
        sampling = {"temperature": 0, "max_new_tokens": NEW, "ignore_eos": True}
        body = {"input_ids": prompt, "sampling_params": sampling}
        return list(served.post("/generate", body)["output_ids"])

    with ThreadPoolExecutor(10) as pool:
        answers = list(pool.map(ask, prompts))
    reference = reference_server(served.artifact)
    equal = sum(
        equal_tokens(answer, reference.generate(prompt, NEW))
        for prompt, answer in zip(prompts, answers, strict=True)
    )
    assert equal > 0.8 * NEW * len(prompts)


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
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    content = [{"type": "text", "text": "The quick"}, image]
    body = {"model": "any", "messages": [{"role": "user", "content": content}], "max_tokens": 2}
    with pytest.raises(urllib.error.HTTPError) as caught:
        served.post("/v1/chat/completions", body)
    assert caught.value.code == 400
    assert "text" in caught.value.read().decode()
    content.pop()
    assert served.post("/v1/chat/completions", body)["choices"]


def test_sigterm_leaves_nothing_behind(served: Running) -> None:
    """Last of the server's tests: it ends it."""
    tree = all_children(served.process.pid)
    assert len(tree) > 2
    served.process.send_signal(signal.SIGTERM)
    assert served.process.wait(timeout=300) == 0
    assert not [pid for pid in tree if alive(pid)]
    assert not list(served.temp.glob("oscar-zoo-serve-*"))
    check_port_free("127.0.0.1", served.port)


def test_a_server_without_its_detokenizer_ends_at_once(rotation: Path, tmp_path: Path) -> None:
    """By itself SGLang holds all requests for a minute after a crash, to write dumps."""
    process = fork(rotation, free_port(), tmp_path)
    ready = "".join(iter(process.stdout.readline, "}\n"))
    tree = all_children(process.pid)
    (victim,) = (pid for pid in tree if cmdline(pid).startswith(b"sglang::detokenizer"))
    os.kill(victim, signal.SIGKILL)
    _, said = process.communicate(timeout=300)
    assert process.returncode == 1 and "its process detokenizer was killed" in said
    log = Path(json.loads(ready + "}")["log"]).read_text()
    assert "detokenizer" in log and "before crash diagnostics" not in log
    assert not [pid for pid in tree if alive(pid)]
    (told,) = parsed(oscar_zoo(tmp_path, "ps", "--json").stdout)["ended"]
    assert told["cause"] == "its process detokenizer was killed" and told["ended"]


def launched(process: subprocess.Popen[str]) -> list[int]:
    """Its processes that import SGLang, as soon as there are any: seconds before they listen."""
    while not (
        tree := [pid for pid in all_children(process.pid) if b"sglang.launch" in cmdline(pid)]
    ):
        assert process.poll() is None
        time.sleep(POLL_SECONDS)
    return tree


@pytest.mark.parametrize(
    ("options", "number", "code", "word"),
    [
        ((), signal.SIGINT, 130, "interrupted"),
        (("--detach",), signal.SIGINT, 130, "interrupted"),
        ((), signal.SIGTERM, 143, "terminated"),
    ],
)
def test_a_signal_while_starting_leaves_nothing_behind(
    rotation: Path,
    tmp_path: Path,
    options: tuple[str, ...],
    number: signal.Signals,
    code: int,
    word: str,
) -> None:
    process = start(rotation, free_port(), tmp_path, options=options)
    tree = launched(process)
    process.send_signal(number)
    out, _ = process.communicate(timeout=300)
    assert process.returncode == code and parsed(out)["error"]["code"] == word
    assert not [pid for pid in tree if alive(pid)] and not list(tmp_path.glob("oscar-zoo-serve-*"))
    assert not list((tmp_path / "servers").iterdir())


def test_a_port_that_is_lost_while_it_starts_is_told(rotation: Path, tmp_path: Path) -> None:
    """By itself SGLang stays there for ever and listens nowhere."""
    port = free_port()
    process = start(rotation, port, tmp_path)  # a fork listens half a second after it is seen
    launched(process)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))  # and answers nobody: a listener might keep clients waiting
        out, _ = process.communicate(timeout=300)
    error = parsed(out)["error"]
    assert (process.returncode, error["code"]) == (7, "port_in_use")
    assert f"port {port} was taken" in error["message"] and "--port" in error["hint"]


def test_a_server_that_cannot_start_says_why(rotation: Path, tmp_path: Path) -> None:
    """In the background, too: the child of `--detach` fails as `serve` does, and its words are
    passed on."""
    command = serve(rotation, free_port(), "--oscar-k-clip=0.9x3", options=("--detach",))
    ended = forked(["-m", "oscar_zoo", *command], variables(tmp_path), tmp_path)
    error = ended.json["error"]
    assert ended.code == 1 and error["message"].startswith("the server ended while starting: ")
    assert ": --oscar-k-clip has 3 entries, and the model has 4 layers" in error["message"]
    assert "Traceback" not in error["message"] and "log: " in error["hint"]
    log = Path(error["hint"].rpartition("log: ")[2]).read_text()
    assert "has 3 entries" in log and not list((tmp_path / "servers").iterdir())


def test_a_damaged_artifact_in_the_background_starts_nothing(tmp_path: Path) -> None:
    """Nothing is said to start before the artifact was verified."""
    folder = write_folder(tmp_path / "damaged", artifact_files())
    (folder / K_NAME).write_bytes(b"damaged")
    command = serve(folder, free_port(), options=("--detach",))
    command.remove("--json")
    ended = forked(["-m", "oscar_zoo", *command], variables(tmp_path), tmp_path)
    assert ended.code == 4 and "failed verification" in ended.err
    assert "tarting" not in ended.err, ended.err
    assert ended.err.startswith("checking model and artifact (0 s)\n")


def test_a_command_to_type_has_every_option(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "no model", artifact_files())
    words = ["serve", str(folder), "--offline", "--device", "cpu", "--detach"]
    ended = forked(["-m", "oscar_zoo", *words, "--json"], variables(tmp_path), tmp_path)
    typed = shlex.split(ended.json["error"]["hint"].partition("oscar-zoo ")[2])
    assert ended.code == 2 and {*words, "--model", "FOLDER"} <= {*typed}


def test_a_server_that_was_killed_knows_its_prompts_again(rotation: Path, tmp_path: Path) -> None:
    files, prompt, reused = tmp_path / "prompts", text_tokens()[1000:1700], list[int]()
    options = ("--host-cache", "2GiB", "--disk-cache", str(files))
    # The canary of a new server prefills a text while SGLang waits a second for the files.
    flags = ("--enable-cache-report", "--enable-metrics", "--oscar-canary-minutes=0")
    for _ in range(2):
        with serving(rotation, tmp_path, forked=True, flags=flags, options=options) as server:
            question = {"model": "m", "prompt": prompt, "max_tokens": NEW, "temperature": 0}
            answer = server.post("/v1/completions", question)
            told = answer["usage"]["prompt_tokens_details"] or {"cached_tokens": 0}
            reused.append(told["cached_tokens"])
            while len([*files.glob("oz1-*/*")]) < (len(prompt) + NEW - 1) // PAGE + 1:
                time.sleep(0.1)
            page = server.ask("/metrics").decode()
    recent = server.ready["windows"]["recent"]
    assert server.ready["host_tokens"] > 0 < server.ready["disk_bytes"]
    assert reused == [0, (len(prompt) - recent) // PAGE * PAGE]
    assert re.search(r"^oscar_int2_disk_broken_total\S* 0\.0$", page, re.MULTILINE)


def test_a_server_in_the_background_from_start_to_stop(rotation: Path, tmp_path: Path) -> None:
    port = free_port()
    options = ("--detach", "--require-key", "--host-cache", "2GiB")
    command = serve(rotation, port, "--served-model-name=my-model", options=options)
    command.remove("--json")
    begun = forked(["-m", "oscar_zoo", *command], variables(tmp_path), tmp_path)
    assert begun.code == 0, begun.err
    phases = [line.rpartition(" (")[0] for line in begun.err.splitlines()]
    assert phases[:2] == ["checking model and artifact", "Starting a server in the background"]
    assert {"loading weights", "warming up"} & set(phases)
    *rows, last = begun.out.splitlines()
    block, key = dict(line.split(maxsplit=1) for line in rows), last.removeprefix("OPENAI_API_KEY=")
    assert key.startswith("oscar-zoo-") and len(key) > 40 and key not in "".join(rows)
    kept = sorted(path for path in (tmp_path / "servers").iterdir() if path.suffix != ".json")
    assert [path.suffix for path in kept] == [".administration-key", ".key"]
    assert [path.stat().st_mode & 0o777 for path in kept] == [0o600, 0o600]
    assert kept[1].read_text().strip() == key != kept[0].read_text().strip()
    assert block["Model"].startswith("my-model, SGLang")
    assert f"stop with oscar-zoo stop {port}" in block["Ready"]
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
        told = r"INT2 KV cache: (\d+) tokens in 2.0 GB of the host's memory, and the first of (\d+)"
        (held,) = re.findall(told, log)
        assert int(held[0]) * TOKEN_BYTES == pytest.approx(2e9, rel=1e-3)
        assert (row["host_tokens"], row["disk_bytes"]) == (int(held[0]), 0)
        assert f"{int(held[0]):,} more tokens" in block["Host"]
        assert int(held[1]) == int(0.05 * 2e9 / (64 * ROW_BYTES))
    finally:
        stopped = oscar_zoo(tmp_path, "stop", "my-model")
    assert stopped.returncode == 0 and stopped.stdout == f"Stopped my-model on port {port}.\n"
    assert tree and not [pid for pid in (row["pid"], *tree) if alive(pid)]
    check_port_free("127.0.0.1", port)
    assert not list((tmp_path / "servers").iterdir())
    assert oscar_zoo(tmp_path, "stop").returncode == 3
    assert "fired up" in oscar_zoo(tmp_path, "logs", str(port), "-n", "1000").stdout
