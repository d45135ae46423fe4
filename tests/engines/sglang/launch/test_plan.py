"""The launch plan: flags as `--name=value`, a closed environment, refused engine flags."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oscar_zoo.artifact.specs import Clip, ServingRecipe, Windows
from oscar_zoo.engines.settings import ArtifactSource
from oscar_zoo.engines.sglang.launch import plan, starting, user_flags
from oscar_zoo.engines.sglang.launch.plan import ENDS_AT_ONCE, rank_port
from oscar_zoo.engines.sglang.launch.user_flags import UserFlags
from oscar_zoo.errors import UsageError

RECIPE = ServingRecipe(
    group_size=64, clip=Clip(k=0.96, v=0.92), windows=Windows(sink=16, recent=32)
)


def made(
    tmp_path: Path, environ: Mapping[str, str] | None = None, **changes: Any
) -> plan.LaunchPlan:
    """What `serve` would run for a recipe."""
    values: dict[str, Any] = {"model": "some/model", "recipe": RECIPE, "device": "cuda"}
    rotations = ArtifactSource(folder=str(tmp_path / "rotations"))
    return plan.plan(
        plan.ServeOptions(**(values | changes)),
        environ or {},
        rotations=rotations,
        sha256="sha256:" + "a" * 64,
        kernels=tmp_path,
    )


def test_the_recipe_reaches_the_server_as_flags(tmp_path: Path) -> None:
    run = made(tmp_path, port=31000)
    assert run.argv[1:4] == ("-P", "-m", "sglang.launch_server")
    for flag in (
        "--kv-cache-dtype=int2",
        "--host=127.0.0.1",
        "--port=31000",
        "--oscar-sink-size=16",
        "--oscar-recent-size=32",
        "--oscar-k-clip=0.96",
        "--oscar-v-clip=0.92",
        "--oscar-group-size=64",
        f"--oscar-rotation-path={tmp_path / 'rotations'}",
    ):
        assert flag in run.argv
    assert run.url == "http://127.0.0.1:31000"
    dashed = made(tmp_path, model="--trust-remote-code").argv  # a value stays a value
    assert "--model-path=--trust-remote-code" in dashed and "--trust-remote-code" not in dashed


def test_a_draft_model_is_of_safetensors_unless_the_user_says_otherwise(tmp_path: Path) -> None:
    def formats(*words: str) -> list[str]:
        argv = made(tmp_path, flags=UserFlags([*words])).argv
        return [word for word in argv if word.startswith(plan.DRAFT_FORMAT)]

    safe, other = f"{plan.DRAFT_FORMAT}=safetensors", f"{plan.DRAFT_FORMAT}=auto"
    assert formats("--speculative-algorithm=NGRAM") == []
    assert formats("--speculative-draft-model-path=some/draft") == [safe]
    assert formats("--speculative-draft-model", "some/draft") == [safe]
    assert formats("--speculative-draft-model-path=some/draft", other) == [other]


def test_the_environment_is_an_allow_list(tmp_path: Path) -> None:
    secret = {
        "HF_TOKEN": "canary",
        "MODELSCOPE_API_TOKEN": "canary",
        "AWS_SECRET_ACCESS_KEY": "canary",
        "PYTHONPATH": "canary",
        "PYTHONSTARTUP": "canary",
        "LD_PRELOAD": "canary",
        "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "canary",
        "SGLANG_EXTERNAL_MODEL_PACKAGE": "canary",
    }
    env = made(tmp_path, secret | {"PATH": "/bin", "CUDA_VISIBLE_DEVICES": "0"}).env
    assert "canary" not in env.values()
    assert env["PATH"] == "/bin" and env["CUDA_VISIBLE_DEVICES"] == "0"
    asked = made(tmp_path, {"OSCAR_KERNELS_CUDA_WRITE": "0", "OSCAR_KERNELS_ODD": "1"}).env
    assert asked["OSCAR_KERNELS_CUDA_WRITE"] == "0" and "OSCAR_KERNELS_ODD" not in asked
    assert env["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] == "1"
    assert env["SGLANG_PLUGINS"] == "oscar"
    assert env["TRITON_CACHE_DIR"].startswith(str(tmp_path))


@pytest.mark.parametrize("name", sorted(ENDS_AT_ONCE))
def test_a_crash_ends_a_server_unless_the_user_wants_its_dumps(tmp_path: Path, name: str) -> None:
    assert made(tmp_path).env[name] == "0"
    assert made(tmp_path, {name: "1"}).env[name] == "1"


def test_a_cpu_gets_the_shims_and_defaults_a_user_can_override(tmp_path: Path) -> None:
    run = made(tmp_path, device="cpu", flags=UserFlags(["--max-total-tokens=99"]))
    assert run.env["TRITON_INTERPRET"] == run.env["TORCHDYNAMO_DISABLE"] == "1"
    assert (Path(run.env["PYTHONPATH"]) / "sitecustomize.py").is_file()
    assert {"--device=cpu", "--dtype=float32", "--sleep-on-idle"} <= {*run.argv}
    assert [a for a in run.argv if a.startswith("--max-total-tokens")][
        -1
    ] == "--max-total-tokens=99"
    gpu = made(tmp_path, device="cuda")
    assert not {"TRITON_INTERPRET", "TORCHDYNAMO_DISABLE"} & gpu.env.keys()
    assert not {"--device=cpu", "--sleep-on-idle"} & {*gpu.argv}


def test_a_gpu_decodes_under_cuda_graphs_and_a_cpu_has_none(tmp_path: Path) -> None:
    gpu = made(tmp_path, device="cuda", gpu=3).argv
    assert [a for a in gpu if "graph" in a] == ["--cuda-graph-backend-prefill=disabled"]
    assert "--base-gpu-id=3" in gpu
    cpu = made(tmp_path, device="cpu").argv
    assert {"--cuda-graph-backend-decode=disabled", "--cuda-graph-backend-prefill=disabled"} <= set(
        cpu
    )
    assert not any(a.startswith("--base-gpu-id") for a in cpu)


@pytest.mark.parametrize("denied", sorted(user_flags.DENIED_FLAGS))
def test_denied_flags_are_refused_in_every_spelling(denied: str) -> None:
    spellings = [
        denied,
        f"{denied}=x",
        denied.replace("-", "_").replace("__", "--", 1),
        denied[:-1],
    ]
    for spelling in spellings:
        with pytest.raises(UsageError) as caught:
            user_flags.check_extra_flags(["--tp=2", spelling])
        assert "not allowed" in caught.value.message


@given(st.lists(st.text(max_size=30), max_size=5))
def test_no_extra_argument_can_name_a_denied_flag(extra: list[str]) -> None:
    try:
        user_flags.check_extra_flags(extra)
    except UsageError:
        return
    for token in extra:
        assert token.split("=", 1)[0] not in user_flags.DENIED_FLAGS
        assert not (token.startswith("-") and any(ord(c) < 32 for c in token))


@pytest.mark.parametrize(
    ("words", "tensor_parallel", "ports"),
    [
        (["--tp=2"], 1, 1),
        ([], 2, 1),
        (["--pp=2"], 1, 1),
        ([], 1, 0),
        (["--tp=1"], 2, 0),
        (["--tp=2", "--nccl_port", "25000"], 1, 0),
        (["--tp=2", "--dp=2"], 1, 0),
    ],
)
def test_ranks_of_an_engine_get_a_port(words: list[str], tensor_parallel: int, ports: int) -> None:
    found = [word.partition("=") for word in rank_port(UserFlags(words), tensor_parallel)]
    assert len(found) == ports and all(name == "--nccl-port" for name, _, _ in found)
    assert all(int(port) in plan.NEVER_GIVEN for _, _, port in found)


def test_it_is_not_the_port_of_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "NEVER_GIVEN", range(24_000, 24_100))
    taken = {int(rank_port(UserFlags(["--tp=2"]), listens=24_007)[0][12:]) for _ in range(500)}
    assert 24_007 not in taken and len(taken) > 50


def test_a_stock_server_gets_one(tmp_path: Path) -> None:
    server = starting.StockServer(
        cache="bf16", model="some/model", revision=None, device="cuda", log=tmp_path / "log",
        timeout=1.0, flags=UserFlags(["--tp=2"]),
    )  # fmt: skip
    argv = starting._stock_plan(server, 31_000).argv
    assert len([word for word in argv if word.startswith("--nccl-port=")]) == 1


@pytest.mark.parametrize(("behind", "least"), [(1, plan.DEFAULT_PORT), (40_000, 40_001)])
def test_a_free_port_is_one_that_any_user_may_open(behind: int, least: int) -> None:
    other = plan.next_free_port("127.0.0.1", behind)
    assert other is not None and other >= least
    assert (plan.next_free_port("127.0.0.1", behind, avoid={other}) or 0) > other


def test_no_connection_takes_a_free_port() -> None:
    """Between the answer and the server that listens there."""
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    if first < plan.NEVER_GIVEN.stop:
        pytest.skip(f"this machine gives ports from {first} on to connections")
    assert all(plan.free_port() < first for _ in range(20))
