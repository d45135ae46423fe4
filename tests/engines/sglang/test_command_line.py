"""The flags on SGLang itself, read by its own parser and resolution: what they mean, and what is
refused."""

import json
import subprocess
import sys
import urllib.request
import venv
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import MODEL, NOTED, card, environment, needs_sglang
from sglang_forks import shared
from tiny_artifacts import K_NAME, V_NAME, artifact_files, payload, write_folder

from oscar_zoo.artifact.manifest import FILE_NAME, Manifest
from oscar_zoo.artifact.names import ArtifactId
from oscar_zoo.engines.sglang.launch import plan, server, user_flags
from oscar_zoo.engines.sglang.launch.plan import free_port
from oscar_zoo.engines.sglang.sizing import CPU_FLAGS, CPU_SWITCHES
from oscar_zoo.registry.store import Store

pytestmark = [pytest.mark.sglang, needs_sglang, pytest.mark.timeout(600)]

REPOSITORY = Path(__file__).resolve().parents[3]
NAME = "tiny-qwen3-hard:seq512_prompt2_group64"
OTHER = "sha256:" + "1" * 64
FORK = {"SGLANG_OSCAR_K_CLIP_RATIO": "0.5", "SGLANG_MIXED_KV_RECENT_TOKENS": "128"}


def given(*flags: str, env: dict[str, str] | None = None) -> dict[str, Any]:
    """A case of `engine_calls`."""
    base = [
        f"--model-path={MODEL}",
        *(f"{n}={v}" for n, v in CPU_FLAGS.items()),
        *CPU_SWITCHES,
        "--kv-cache-dtype=int2",
    ]
    return {"argv": [*base, *flags], "env": env or {}}


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What SGLang made of every command line, by name."""
    folder = tmp_path_factory.mktemp("flags")
    pair = write_folder(folder / "pair", payload())
    cache = {"OSCAR_ZOO_CACHE": str(folder / "cache"), "HF_HUB_OFFLINE": "1"}
    identity = ArtifactId("tiny-qwen3-hard", "seq512_prompt2_group64")
    for name, files in (("cache", artifact_files()), ("rotten", artifact_files(seed=2))):
        Store(folder / name).put(identity, files, source="test")
    pair_files = {
        "SGLANG_OSCAR_K_ROTATION_PATH": str(pair / K_NAME),
        "SGLANG_OSCAR_V_ROTATION_PATH": str(pair / V_NAME),
    }
    for path in (folder / "rotten").rglob(K_NAME):
        path.unlink()  # the blob has another name and stays
        path.write_bytes(payload(seed=1)[K_NAME])
    zoo = folder / "zoo"
    for name in ("tiny-qwen3-hard/calibrated", "other-model/calibrated", "other-model/hadamard"):
        write_folder(zoo / name, artifact_files(artifact=name, with_manifest=False))
    published = ("--oscar-sink-size", "64", "--oscar-recent-size", "256")
    named, bare = ("--oscar-artifact", NAME), [f"--model-path={MODEL}", "--device=cpu"]
    rotten = {"OSCAR_ZOO_CACHE": str(folder / "rotten")}
    breakable = "--cuda-graph-backend-prefill=breakable"
    cases = {
        "name": given(*named, env=cache),
        "published": given("--oscar-rotation-path", str(pair), *published, "--tp", "2"),
        "fork": given(env=pair_files | FORK),
        "flag over fork": given("--oscar-recent-size=32", env=pair_files | FORK),
        "bare": {"argv": [*bare, "--kv-cache-dtype=int2"], "env": pair_files},
        "own graphs": given(breakable, env=pair_files),
        "card": card(MODEL, pair),
        "one group size twice": card(MODEL, pair, "--oscar-group-size=64"),
        "the last group size": given(
            "--oscar-group-size=64", "--oscar-group-size=32", env=pair_files
        ),
        "two group sizes": card(MODEL, pair, "--oscar-group-size=32"),
        "triton": given("--attention-backend=triton", env=pair_files),
        "flashinfer": given("--prefill-attention-backend=flashinfer", env=pair_files),
        "tree": given(f"--oscar-rotation-path={zoo}"),
        "misspelt": given(*named, env=cache | {"SGLANG_OSCAR_K_CLIPRATIO": "0.5"}),
        "rotten store": given(*named, env=rotten),
        "copy": given(*named, f"--oscar-copy-of={OTHER}", env=cache),
        "no digest": given(*named, "--oscar-copy-of=x", env=cache),
        "clip": given(*named, "--oscar-k-clip=1.5", env=cache),
        "without int2": {"argv": [*bare, "--oscar-sink-size=1"], "env": {}},
    }
    out, log = folder / "out.json", folder / "log"
    code = shared().call("engine_calls:read", folder, log, cases=list(cases.values()), out=str(out))
    assert code == 0, log.read_text()[-4000:]
    result = json.loads(out.read_text())
    return {
        "flags": result["flags"],
        "log": log.read_text(),
        **dict(zip(cases, result["cases"], strict=True)),
    }


def test_shapes_that_are_compiled_ahead_are_those_of_a_worker(answers: dict[str, Any]) -> None:
    whole, half = (answers[case]["ahead"]["worker"] for case in ("name", "published"))
    (rows,) = whole.pop("specs")
    assert [(x["head_dim"], x["bits"], x["group_size"]) for x in rows] == [(64, 2, 64)] * 2
    assert whole == {
        "num_q_heads": 4,
        "num_kv_heads": 2,
        "sink": 64,
        "recent": 256,
        "dtype": "float32",
        "cap": 0.0,
        "learned_sinks": False,
        "drafts": 1,
        "tree": True,
        "requests": int(CPU_FLAGS["--max-running-requests"]),
        "max_tokens": 2048,
    }
    assert (half["num_q_heads"], half["num_kv_heads"]) == (2, 1)  # of two workers
    assert answers["name"]["ahead"]["layers"] == [0]


SAID = {
    "name": ("(flag)", "sink 64 (recipe)"),
    "published": ("sink 64 (flag)", "recent 256 (flag)", "k_clip 0.96 (default)"),
    "fork": ("k_clip 0.5 (environment)", "recent 128 (environment)"),
    "flag over fork": ("recent 32 (flag)",),
    "card": ("group_size 64 (flag)", "sink 64 (environment)", "v_clip 0.92 (environment)"),
    "the last group size": ("group_size 32 (flag)",),
}


@pytest.mark.parametrize("case", SAID)
def test_settings_come_from_where_the_command_line_says(answers: dict[str, Any], case: str) -> None:
    assert all(part in answers[case]["settings"] for part in SAID[case])


def test_a_name_means_the_artifact_in_the_local_store(answers: dict[str, Any]) -> None:
    """A copy is called by the digest of its artifact."""
    answer, manifest = answers["name"], Manifest.from_bytes(artifact_files()[FILE_NAME])
    assert answer["digest"] == manifest.digest and answer["backend"] == "oscar_int2"
    copy = answers["copy"]
    assert copy["digest"] == OTHER and copy["copy_digest"] == manifest.digest
    assert answer["copy_digest"] is None


def test_prefill_runs_without_graphs_if_the_user_is_silent(answers: dict[str, Any]) -> None:
    assert answers["bare"]["graphs"] == [None, "disabled"]
    assert answers["own graphs"]["graphs"] == ["disabled", "breakable"]


def test_variables_of_the_fork_are_fallbacks(answers: dict[str, Any]) -> None:
    assert answers["fork"]["digest"] == answers["published"]["digest"]
    assert any("128 is ignored" in said for said in answers["flag over fork"]["warnings"])


def test_the_published_launch_command_is_understood(answers: dict[str, Any]) -> None:
    answer = answers["card"]
    assert answer["backends"] == ["oscar_int2", None, None]
    assert [warning.split("=")[0].split()[0] for warning in answer["warnings"]] == list(NOTED)
    for chosen in ("--prefill-attention-backend fa3", "--decode-attention-backend triton"):
        assert f"INT2 KV cache: {chosen}: oscar_int2 is used instead." in answers["log"]
    assert answers["one group size twice"] == answer
    assert answers["triton"]["backends"] == ["oscar_int2", None, None]


def test_the_artifact_of_the_model_is_found_in_a_folder_of_several(answers: dict[str, Any]) -> None:
    assert answers["tree"]["where"].endswith("/zoo/tiny-qwen3-hard/calibrated")


@pytest.mark.parametrize(
    ("case", "message", "hint"),
    [
        ("misspelt", "no setting is called SGLANG_OSCAR_K_CLIPRATIO", "SGLANG_OSCAR_K_CLIP_RATIO"),
        ("rotten store", K_NAME, ""),
        ("clip", "exit 2", ""),
        ("no digest", "exit 2", ""),
        ("two group sizes", "exit 2", ""),
        ("flashinfer", "--attention-backend does not work with an INT2 KV cache", "oscar_int2"),
        ("without int2", "--oscar-sink-size needs --kv-cache-dtype int2", "add it"),
    ],
)
def test_what_is_refused_before_a_worker_starts(
    answers: dict[str, Any], case: str, message: str, hint: str
) -> None:
    answer = answers[case]
    assert message in answer["error"]
    assert hint in (answer["hint"] or "")
    assert "\n" not in answer["error"]


def test_refused_flags_are_those_of_this_sglang_and_no_others(answers: dict[str, Any]) -> None:
    """An abbreviation that is refused must not be the whole name of another flag."""
    flags = [flag for flag in answers["flags"] if flag.startswith("--")]
    refused = {flag for flag in flags if user_flags._reason_against(flag) is not None}
    meant = {
        flag
        for flag in flags
        if flag in user_flags.DENIED_FLAGS or flag.startswith(tuple(user_flags.DENIED_FAMILIES))
    }
    assert refused == meant and len(flags) > 300
    allowed = "--ssl-keyfile --tp-size --context-length --chat-template --enable-metrics"
    for flag in allowed.split():
        assert flag in flags and flag not in refused


@pytest.mark.skipif(torch.version.cuda is not None, reason="torch supports CUDA")
@pytest.mark.timeout(900)
def test_the_documented_command_answers_on_a_cpu(tmp_path: Path) -> None:
    """In an environment like the one `make install` makes: nothing but its script prepares the
    command."""
    home = tmp_path / "venv"
    venv.create(home, symlinks=True)
    python = home / "bin" / "python"
    (packages,) = home.glob("lib/python*/site-packages")
    shared_packages = [folder for folder in sys.path if folder.endswith("site-packages")]
    (packages / "base.pth").write_text(
        "".join(f"import site; site.addsitedir({f!r})\n" for f in shared_packages)
    )
    env = environment()
    del env["PYTHONPATH"], env["TRITON_INTERPRET"]
    subprocess.run([python, REPOSITORY / "requirements" / "cpu_site.py"], env=env, check=True)
    zoo = tmp_path / "zoo"
    for name in ("tiny-qwen3-hard/calibrated", "other-model/calibrated"):
        write_folder(zoo / name, artifact_files(artifact=name))
    port = free_port()
    command = [python, "-P", "-m", "sglang.launch_server", "--model-path", MODEL]
    command += ["--kv-cache-dtype", "int2", "--oscar-rotation-path", zoo, "--device", "cpu"]
    command += ["--port", port]
    made = plan.LaunchPlan(tuple(map(str, command)), env, f"http://127.0.0.1:{port}")
    with server.running(made, tmp_path / "log") as child:
        child.wait_until_healthy(600, lambda seconds: None)
        sampling = {"temperature": 0, "max_new_tokens": 4}
        order = {"text": "The access code", "sampling_params": sampling}
        request = urllib.request.Request(f"{made.url}/generate", json.dumps(order).encode())
        request.add_header("Content-Type", "application/json")
        with urllib.request.urlopen(request, timeout=300) as reply:
            answer = json.load(reply)
    assert answer["meta_info"]["completion_tokens"] == 4
    found = f"has the artifact of {MODEL} in {zoo / 'tiny-qwen3-hard' / 'calibrated'}"
    assert found in (tmp_path / "log").read_text()
