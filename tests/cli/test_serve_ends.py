"""How servers of `oscar-zoo serve` end: by themselves, by Ctrl-C, before they are ready, and in the
background.

Servers are forks (`forked_commands`) but for those that a signal ends while they start.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
from pathlib import Path

import pytest
from cli_output import parsed
from engines import needs_sglang
from forked_commands import forked
from served_model import (
    alive,
    all_children,
    cmdline,
    fitted,
    fork,
    oscar_zoo,
    serve,
    start,
    variables,
)
from tiny_artifacts import K_NAME, artifact_files, write_folder

from oscar_zoo.engines.sglang.launch.plan import check_port_free, free_port

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(600), needs_sglang]
SCHEDULER = b"sglang::scheduler"
"""How the command line of SGLang's scheduler begins."""


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fitted(tmp_path_factory.mktemp("fitted") / "rotation")


def test_a_server_without_its_detokenizer_ends_at_once(artifact: Path, tmp_path: Path) -> None:
    """By itself SGLang holds all requests for a minute after a crash, to write dumps."""
    process = fork(artifact, free_port(), tmp_path)
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


@pytest.mark.parametrize(
    ("options", "number", "code", "word"),
    [
        ((), signal.SIGINT, 130, "interrupted"),
        (("--detach",), signal.SIGINT, 130, "interrupted"),
        ((), signal.SIGTERM, 143, "terminated"),
    ],
)
def test_a_signal_while_starting_leaves_nothing_behind(
    artifact: Path,
    tmp_path: Path,
    options: tuple[str, ...],
    number: signal.Signals,
    code: int,
    word: str,
) -> None:
    process = start(artifact, free_port(), tmp_path, options=options)
    while not (
        tree := [pid for pid in all_children(process.pid) if b"sglang.launch" in cmdline(pid)]
    ):
        assert process.poll() is None
    process.send_signal(number)
    out, _ = process.communicate(timeout=300)
    assert process.returncode == code and parsed(out)["error"]["code"] == word
    assert not [pid for pid in tree if alive(pid)] and not list(tmp_path.glob("oscar-zoo-serve-*"))
    assert not list((tmp_path / "servers").iterdir())


def test_a_port_that_is_lost_while_it_starts_is_told(artifact: Path, tmp_path: Path) -> None:
    """By itself SGLang stays there for ever and listens nowhere."""
    port = free_port()
    process = fork(artifact, port, tmp_path)
    while not any(cmdline(pid).startswith(SCHEDULER) for pid in all_children(process.pid)):
        assert process.poll() is None  # SGLang listens once its scheduler has loaded the model
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))  # and answers nobody: a listener might keep clients waiting
        out, _ = process.communicate(timeout=300)
    error = parsed(out)["error"]
    assert (process.returncode, error["code"]) == (7, "port_in_use")
    assert f"port {port} was taken" in error["message"] and "--port" in error["hint"]


def test_a_server_that_cannot_start_says_why(artifact: Path, tmp_path: Path) -> None:
    """In the background, too: the child of `--detach` fails as `serve` does, and its words are
    passed on."""
    command = serve(artifact, free_port(), "--oscar-k-clip=0.9x3", options=("--detach",))
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


def test_a_server_in_the_background_from_start_to_stop(artifact: Path, tmp_path: Path) -> None:
    port = free_port()
    options = ("--detach", "--require-key")
    command = serve(artifact, port, "--served-model-name=my-model", options=options)
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
