"""What a tired person gets wrong: each one line, the right exit code, nothing half-written."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import os
import shutil
import socket
import subprocess
from pathlib import Path

import pytest
from cli_output import parsed
from hub_folders import hub_with
from measured_artifacts import measured_files
from random_moments import describe, random_moments
from tiny_artifacts import K_NAME, V_NAME, artifact_files, payload, write_folder

from oscar_zoo.artifact.specs import Geometry
from oscar_zoo.cli import main as cli
from oscar_zoo.cli import streams
from oscar_zoo.compute.moments_file import save_moments

MODEL = Path(__file__).resolve().parents[2] / "examples/models/tiny-qwen3-hard"
NARROW = Geometry(
    num_layers=4,
    num_q_heads=4,
    num_kv_heads=2,
    head_dim=32,
    v_head_dim=32,
    attention_layers=(0, 1, 2, 3),
)
SHALLOW = Geometry(
    num_layers=2, num_q_heads=4, num_kv_heads=2, head_dim=64, v_head_dim=64, attention_layers=(0, 1)
)


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    """A command line, run in this process: what the heavy libraries cost is paid once."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = cli.run([str(argument) for argument in arguments])
    return subprocess.CompletedProcess(arguments, status, out.getvalue(), err.getvalue())


def refused(code: int, *arguments: object) -> str:
    """Run a command that must fail with `code` and one line on stderr; returns the line."""
    done = run(*arguments)
    assert done.returncode == code, (done.returncode, done.stdout, done.stderr)
    lines = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1 and "Traceback" not in done.stderr, done.stderr
    return lines[0]


@pytest.fixture
def artifact(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "artifact", measured_files())


@pytest.fixture
def hub(tmp_path: Path) -> Path:
    root = tmp_path / "hub"
    for tag, seed in (("seq512_prompt2_group64", 0), ("seq1024_prompt4_group64", 1)):
        name = f"tiny-qwen3-hard/{tag}"
        write_folder(root / name, artifact_files(artifact=name, seed=seed))
    return root


@pytest.mark.parametrize("command", ["verify", "publish", "eval", "serve"])
def test_a_wrong_path(command: str, tmp_path: Path) -> None:
    line = refused(3, command, tmp_path / "nowhere")
    assert str(tmp_path / "nowhere") in line


@pytest.mark.parametrize(
    "words",
    [
        "verify EMPTY",
        "verify ARTIFACT --model EMPTY",
        "info EMPTY",
        "card EMPTY",
        "compare EMPTY ARTIFACT",
        "scores EMPTY",
        "pull EMPTY",
        "pull EMPTY --compute",
        "publish EMPTY --hub file:hub --create",
        "serve EMPTY",
        "serve EMPTY --print --device cpu",
        "serve ARTIFACT --model EMPTY",
        "serve ARTIFACT --model EMPTY --device cpu --print",
        "compute EMPTY",
        f"compute {MODEL} --calib-data EMPTY --output-dir out",
        "fit EMPTY --method oscar --output-dir out",
        "merge-moments EMPTY EMPTY --output out",
        "plot EMPTY",
        "eval EMPTY",
        "eval ARTIFACT --model EMPTY",
        "ruler EMPTY",
        "bench serve EMPTY",
        "bench serve --dummy-weights EMPTY",
        "fit-gpu EMPTY --gpu-memory 24GiB",
        "cache rm EMPTY",
    ],
)
def test_an_empty_folder_has_one_exit_code(
    words: str, artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    given = words.replace("EMPTY", "./empty").replace("ARTIFACT", "./artifact").split()
    assert "empty" in refused(3, *given)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["artifact", "empty"]


def test_a_wrong_name_lists_close_ones(hub: Path) -> None:
    line = refused(3, "pull", "tiny-qwen3-hrad", "--hub", f"file:{hub}")
    assert "tiny-qwen3-hard" in line


def test_an_ambiguous_name_lists_the_choices(hub: Path) -> None:
    line = refused(2, "pull", "tiny-qwen3-hard", "--hub", f"file:{hub}")
    assert "seq512_prompt2_group64" in line and "seq1024_prompt4_group64" in line


def test_a_wrong_hub() -> None:
    assert "not a hub" in refused(2, "pull", "Qwen3-8B", "--hub", "nonsense")
    assert refused(3, "pull", "Qwen3-8B", "--hub", "file:/nowhere/at/all")


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (b"", "empty"),
        (b"<!DOCTYPE html><html>404</html>", "web page"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 3\n", "LFS"),
        (b"\x80\x02}q\x00.", "pickle"),
        (b"GIF89a" + b"\0" * 100, ""),
    ],
)
def test_a_foreign_file(tmp_path: Path, content: bytes, word: str) -> None:
    path = tmp_path / "k_rotation.pt"
    path.write_bytes(content)
    done = run("verify", path)
    assert done.returncode == 4 and "FAILED" in done.stdout and word in done.stdout
    assert "Traceback" not in done.stderr


def test_a_truncated_file_is_refused_everywhere(tmp_path: Path, artifact: Path) -> None:
    path = artifact / K_NAME
    path.write_bytes(path.read_bytes()[:-1000])
    assert run("verify", artifact).returncode == 4
    hub = tmp_path / "hub"
    refused(4, "publish", artifact, "--hub", f"file:{hub}")
    assert not hub.exists() or not list(hub.rglob("*.pt"))
    refused(4, "eval", artifact, "--model", MODEL)
    refused(4, "serve", artifact, "--model", MODEL)


def test_one_flipped_byte_and_a_known_digest(artifact: Path) -> None:
    digest = parsed(run("verify", artifact / K_NAME, "--json").stdout)["results"][0]["files"][0][
        "sha256"
    ]
    data = bytearray((artifact / K_NAME).read_bytes())
    data[len(data) // 2] ^= 1
    (artifact / K_NAME).write_bytes(data)
    done = run("verify", artifact / K_NAME, "--digest", f"sha256:{digest}", "--json")
    assert done.returncode == 4
    result = parsed(done.stdout)["results"][0]
    assert (
        result["outcome"] == "digest_mismatch"
        and digest in result["want"]
        and result["got"] != result["want"]
    )
    assert run("verify", artifact).returncode == 4  # the manifest knows the digest too


def test_swapped_k_and_v(tmp_path: Path) -> None:
    files = payload()
    folder = write_folder(
        tmp_path / "swapped", {"k_rotation.pt": files[V_NAME], "v_rotation.pt": files[K_NAME]}
    )
    done = run("verify", folder, "--json")
    assert done.returncode == 4
    result = parsed(done.stdout)["results"][0]
    assert result["outcome"] == "rejected" and result["stage"] == "roles"
    assert "swap" in run("verify", folder).stderr


@pytest.mark.parametrize("geometry", [NARROW, SHALLOW])
@pytest.mark.parametrize("command", ["eval", "serve"])
def test_an_artifact_of_another_geometry_than_the_model(
    tmp_path: Path, geometry: Geometry, command: str
) -> None:
    folder = write_folder(tmp_path / "other", payload(geometry=geometry))
    line = refused(1, command, folder, "--model", MODEL)
    assert "this K rotation" in line and "tiny-qwen3-hard has" in line


def test_a_port_in_use(artifact: Path) -> None:
    if importlib.util.find_spec("sglang") is None:
        pytest.skip("sglang is not installed")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        line = refused(7, "serve", artifact, "--model", MODEL, "--port", taken.getsockname()[1])
    assert "taken" in line and "--port" in line


@pytest.mark.parametrize(
    ("missing", "word"),
    [("model.safetensors", "weights"), ("config.json", "config"), ("tokenizer.json", "tokenizer")],
)
def test_a_model_without_something(tmp_path: Path, artifact: Path, missing: str, word: str) -> None:
    model = tmp_path / "model"
    shutil.copytree(MODEL, model)
    (model / missing).unlink()
    if missing == "tokenizer.json":
        (model / "tokenizer_config.json").unlink()
    text = tmp_path / "text.txt"
    text.write_text("some words " * 500)
    for line in (
        refused(
            1,
            "compute",
            model,
            "--calib-data",
            text,
            "--calib-tokens",
            64,
            "--output-dir",
            tmp_path / "out",
        ),
        refused(1, "serve", artifact, "--model", model),
    ):
        assert word in line
    assert not (tmp_path / "out").exists()


def test_no_space_left_is_one_line_and_leaves_nothing(tmp_path: Path, artifact: Path) -> None:
    """A real full disk: a tmpfs too small for the artifact, where the machine allows mounting
    one."""
    small = tmp_path / "small"
    small.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", small], capture_output=True
    )
    if mounted.returncode:
        pytest.skip("mounting a tmpfs is not allowed here")
    try:
        line = refused(8, "publish", artifact, "--hub", f"file:{small}/zoo", "--create")
        assert "No space left" in line or "no space left" in line
        assert not list(small.rglob("*.pt"))
    finally:
        subprocess.run(["umount", small], check=True)


def test_an_output_folder_that_is_taken(tmp_path: Path, artifact: Path) -> None:
    before = {path.name: path.read_bytes() for path in artifact.iterdir()}
    text = tmp_path / "text.txt"
    text.write_text("some words " * 500)
    line = refused(
        7, "compute", MODEL, "--calib-data", text, "--calib-tokens", 64, "--output-dir", artifact
    )
    assert "--force" in line
    assert {path.name: path.read_bytes() for path in artifact.iterdir()} == before


@pytest.mark.parametrize(
    "flag", ["--host=0.0.0.0", "--trust-remote-code", "--api-key=x", "--trust-rem"]
)
def test_engine_flags_that_would_open_the_server(artifact: Path, flag: str) -> None:
    assert "not allowed" in refused(2, "serve", artifact, "--model", MODEL, "--", flag)


def test_exposing_needs_a_key(artifact: Path) -> None:
    assert "API key" in refused(2, "serve", artifact, "--model", MODEL, "--expose", "0.0.0.0")


@pytest.mark.parametrize("clip", ["0.9", "a,b", "2,1", "0.9,0.9,0.9"])
def test_a_clip_that_is_none(artifact: Path, clip: str) -> None:
    if importlib.util.find_spec("sglang") is None:
        pytest.skip("sglang is not installed")
    assert "--clip" in refused(2, "serve", artifact, "--model", MODEL, "--clip", clip)


def test_too_few_tokens_to_fit_anything(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("Once upon a time.\n" * 40)
    target = tmp_path / "out"
    line = refused(
        2, "compute", MODEL, "--calib-data", text, "--calib-tokens", 30, "--output-dir", target
    )
    assert "gives 30 tokens for 64 channels per head. Use more text" in line
    assert [path.name for path in tmp_path.iterdir()] == ["text.txt"]


def test_a_changed_bit_in_moments(tmp_path: Path) -> None:
    """Neither a fit nor a merge goes on with sums that are not those that were written."""
    moments = random_moments()
    for name in ("one", "other"):
        save_moments(tmp_path / name, moments, describe(moments))
    content = bytearray((tmp_path / "one").read_bytes())
    content[-1000] ^= 1
    (tmp_path / "one").write_bytes(content)
    output = tmp_path / "out"
    for command in (
        ("fit", tmp_path / "one", "--method", "oscar", "--output-dir", output),
        ("merge-moments", tmp_path / "one", tmp_path / "other", "--output", output),
    ):
        line = refused(4, *command)
        assert f"{tmp_path / 'one'} is damaged" in line and "Compute it again" in line
    assert not output.exists()


ODD = os.fsdecode(b"d\xff")


@pytest.fixture
def odd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with everything that a command takes in a folder whose name is no
    UTF-8."""
    monkeypatch.chdir(tmp_path)
    hub_with(tmp_path / "hub", measured_files())
    write_folder(tmp_path / ODD / "artifact", measured_files())
    shutil.copytree(MODEL, tmp_path / ODD / "model")
    (tmp_path / ODD / "text.txt").write_text("some words and others " * 3000)
    moments = random_moments()
    save_moments(tmp_path / ODD / "moments.safetensors", moments, describe(moments))
    (tmp_path / ODD / "file.json").write_text("{}")
    return tmp_path


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (0, "verify ./ODD/artifact"),
        (0, "verify ODD/"),
        (3, "verify ./ODD/none"),
        (0, "info ./ODD/artifact"),
        (0, "card ./ODD/artifact"),
        (2, "compare ./ODD/artifact ./ODD/artifact"),
        (0, "pull tiny-qwen3-hard --hub file:hub --no-lock --output ODD/out"),
        (2, "pull tiny-qwen3-hard --hub file:ODD/hub"),
        (2, "pull ./ODD/model --compute"),
        (2, "list --hub file:ODD/hub"),
        (0, "publish ./ODD/artifact --hub file:copy --create"),
        (0, "publish ./ODD/artifact --hub file:copy --create --dry-run"),
        (2, "publish ./ODD/artifact --hub file:ODD/copy --create"),
        (2, "mirror file:hub file:ODD/copy --all --create"),
        (0, f"serve ./ODD/artifact --model {MODEL} --device cpu --print"),
        (2, "serve ./ODD/artifact --model ./ODD/model --device cpu --print"),
        (2, "serve ./ODD/artifact --model ./ODD/model --device cpu"),
        (
            0,
            f"compute {MODEL} --calib-data ODD/text.txt --calib-tokens 600 --method hadamard"
            " --output-dir ODD/out",
        ),
        (2, "compute ./ODD/model --calib-data ODD/text.txt --output-dir out"),
        (3, f"compute {MODEL} --calib-data ODD/none.txt --output-dir out"),
        (0, "fit ODD/moments.safetensors --method hadamard --output-dir ODD/fitted"),
        (2, "merge-moments ODD/moments.safetensors ODD/moments.safetensors --output ODD/merged"),
        (0, "plot ODD/moments.safetensors --output ODD/plot.html"),
        (4, "plot ODD/file.json --output ODD/plot.html"),
        (2, "eval ./ODD/artifact --model ./ODD/model"),
        (3, "eval ./ODD/none"),
        (3, "ruler ./ODD/none"),
        (3, f"bench serve ./ODD/none --model {MODEL}"),
        (2, "bench serve ./ODD/artifact --model ./ODD/model"),
        (2, "cache rm ./ODD/artifact"),
        (3, "cache rm ODD"),
        (0, "scores ./ODD/artifact"),
        (4, "scores add ./ODD/artifact ODD/file.json"),
        (0, "site --hub file:hub --output ODD/site"),
        (2, "fit-gpu ./ODD/model --gpu-memory 24GiB"),
        (2, "login ODD"),
    ],
)
@pytest.mark.parametrize("as_json", [False, True])
def test_a_path_that_is_no_utf8_works_or_is_refused_in_one_line(
    odd: Path, as_json: bool, code: int, words: str
) -> None:
    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8") for _ in range(2))
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        streams.accept_any_text()
        given = [word.replace("ODD", ODD) for word in words.split()]
        status = cli.run([*given, "--json"] if as_json else given)
    out.flush()
    err.flush()
    told, remarks = (stream.buffer.getvalue().decode() for stream in (out, err))
    assert status == code, told + remarks
    assert "internal error" not in told + remarks and "udcff" not in remarks
    if as_json:
        json.loads(told)
        return
    assert "udcff" not in told
    lines = [line for line in remarks.splitlines() if line.startswith("error: ")]
    assert len(lines) == (code != 0)
    assert not lines or r"d\xff" in lines[0]


def test_a_command_for_a_shell_names_a_path_that_is_no_utf8(odd: Path) -> None:
    line = refused(2, "cache", "rm", f"./{ODD}/artifact")
    assert line.endswith(r"oscar-zoo verify $'./d\xff/artifact'")
    printed = run("serve", f"./{ODD}/artifact", "--model", MODEL, "--device", "cpu", "--print")
    words = ["bash", "-c", f"printf '%s\\n' {printed.stdout}"]
    said = subprocess.run(words, capture_output=True, check=True, timeout=60).stdout
    assert os.fsencode(odd / ODD / "artifact") in said
