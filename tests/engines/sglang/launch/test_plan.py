"""The launch plan: flags as `--name=value`, a closed environment, refused engine flags."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oscar_zoo.artifact.specs import Clip, ServingRecipe, Windows
from oscar_zoo.engines.sglang.launch import denied_flags, plan
from oscar_zoo.engines.sglang.launch.environment import ENDS_AT_ONCE
from oscar_zoo.engines.sglang.launch.user_flags import UserFlags
from oscar_zoo.engines.sglang.settings import ArtifactSource
from oscar_zoo.errors import UsageError

RECIPE = ServingRecipe(
    group_size=64, clip=Clip(k=0.96, v=0.92), windows=Windows(sink=16, recent=32)
)


def options(tmp_path: Path, **changes: object) -> plan.ServeOptions:
    values: dict[str, object] = {
        "model": "some/model",
        "rotations": ArtifactSource(folder=str(tmp_path / "rotations")),
        "rotations_sha256": "sha256:" + "a" * 64,
        "recipe": RECIPE,
        "kernels": tmp_path,
        "device": "cuda",
    }
    return plan.ServeOptions(**(values | changes))  # type: ignore[arg-type]


def test_the_recipe_reaches_the_server_as_flags(tmp_path: Path) -> None:
    made = plan.plan(options(tmp_path, port=31000), {})
    assert made.argv[1:4] == ("-P", "-m", "sglang.launch_server")
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
        assert flag in made.argv
    assert made.url == "http://127.0.0.1:31000"


def test_a_draft_model_is_loaded_from_safetensors_unless_the_user_says_otherwise(
    tmp_path: Path,
) -> None:
    def formats(*words: str) -> list[str]:
        argv = plan.plan(options(tmp_path, flags=UserFlags([*words])), {}).argv
        return [word for word in argv if word.startswith(plan.DRAFT_FORMAT)]

    safe, other = f"{plan.DRAFT_FORMAT}=safetensors", f"{plan.DRAFT_FORMAT}=auto"
    assert formats("--speculative-algorithm=NGRAM") == []
    assert formats("--speculative-draft-model-path=some/draft") == [safe]
    assert formats("--speculative-draft-model", "some/draft") == [safe]
    assert formats("--speculative-draft-model-path=some/draft", other) == [other]


def test_only_on_a_cpu_an_idle_server_sleeps(tmp_path: Path) -> None:
    """A GPU is worth the core that a polling scheduler takes."""
    idle = {
        device: "--sleep-on-idle" in plan.plan(options(tmp_path, device=device), {}).argv
        for device in ("cpu", "cuda")
    }
    assert idle == {"cpu": True, "cuda": False}


def test_a_value_that_starts_with_a_dash_stays_a_value(tmp_path: Path) -> None:
    made = plan.plan(options(tmp_path, model="--trust-remote-code"), {})
    assert "--model-path=--trust-remote-code" in made.argv
    assert "--trust-remote-code" not in made.argv


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
    env = plan.plan(options(tmp_path), secret | {"PATH": "/bin", "CUDA_VISIBLE_DEVICES": "0"}).env
    assert "canary" not in env.values()
    assert env["PATH"] == "/bin" and env["CUDA_VISIBLE_DEVICES"] == "0"
    asked = plan.plan(
        options(tmp_path), {"OSCAR_KERNELS_CUDA_WRITE": "0", "OSCAR_KERNELS_ODD": "1"}
    ).env
    assert asked["OSCAR_KERNELS_CUDA_WRITE"] == "0" and "OSCAR_KERNELS_ODD" not in asked
    assert env["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] == "1"
    assert env["SGLANG_PLUGINS"] == "oscar"
    assert env["TRITON_CACHE_DIR"].startswith(str(tmp_path))


@pytest.mark.parametrize("name", sorted(ENDS_AT_ONCE))
def test_a_crash_ends_a_server_at_once_unless_the_user_wants_its_dumps(
    tmp_path: Path, name: str
) -> None:
    assert plan.plan(options(tmp_path), {}).env[name] == "0"
    assert plan.plan(options(tmp_path), {name: "1"}).env[name] == "1"


def test_a_cpu_gets_the_shims_and_defaults_a_user_can_override(tmp_path: Path) -> None:
    made = plan.plan(
        options(tmp_path, device="cpu", flags=UserFlags(["--max-total-tokens=99"])), {}
    )
    assert made.env["TRITON_INTERPRET"] == made.env["TORCHDYNAMO_DISABLE"] == "1"
    assert (Path(made.env["PYTHONPATH"]) / "sitecustomize.py").is_file()
    assert "--device=cpu" in made.argv and "--dtype=float32" in made.argv
    assert [a for a in made.argv if a.startswith("--max-total-tokens")][
        -1
    ] == "--max-total-tokens=99"
    gpu = plan.plan(options(tmp_path, device="cuda"), {})
    assert not {"TRITON_INTERPRET", "TORCHDYNAMO_DISABLE"} & gpu.env.keys()
    assert "--device=cpu" not in gpu.argv


def test_a_gpu_decodes_under_cuda_graphs_and_a_cpu_has_none(tmp_path: Path) -> None:
    gpu = plan.plan(options(tmp_path, device="cuda", gpu=3), {}).argv
    assert [a for a in gpu if "graph" in a] == ["--cuda-graph-backend-prefill=disabled"]
    assert "--base-gpu-id=3" in gpu
    cpu = plan.plan(options(tmp_path, device="cpu"), {}).argv
    assert {"--cuda-graph-backend-decode=disabled", "--cuda-graph-backend-prefill=disabled"} <= set(
        cpu
    )
    assert not any(a.startswith("--base-gpu-id") for a in cpu)


@pytest.mark.parametrize("denied", sorted(denied_flags.DENIED_FLAGS))
def test_denied_flags_are_refused_in_every_spelling(denied: str) -> None:
    spellings = [
        denied,
        f"{denied}=x",
        denied.replace("-", "_").replace("__", "--", 1),
        denied[:-1],
    ]
    for spelling in spellings:
        with pytest.raises(UsageError) as caught:
            denied_flags.check_extra_flags(["--tp=2", spelling])
        assert "not allowed" in caught.value.message


@given(st.lists(st.text(max_size=30), max_size=5))
def test_no_extra_argument_can_name_a_denied_flag(extra: list[str]) -> None:
    try:
        denied_flags.check_extra_flags(extra)
    except UsageError:
        return
    for token in extra:
        assert token.split("=", 1)[0] not in denied_flags.DENIED_FLAGS
        assert not (token.startswith("-") and any(ord(c) < 32 for c in token))


@pytest.mark.parametrize(
    "flag", ["--tp=2", "--context-length=65536", "--chunked-prefill-size", "512", "-1"]
)
def test_ordinary_flags_pass(flag: str) -> None:
    denied_flags.check_extra_flags([flag])
