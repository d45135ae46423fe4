"""What `serve --print` and `fit-gpu` show with `--engine vllm`."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from architectures import write_architecture
from cli_output import Cli
from tiny_artifacts import TINY, artifact_files, manifest, payload, write_folder
from tiny_models import EXAMPLE

from oscar_zoo import fit_gpu
from oscar_zoo.artifact.manifest import FILE_NAME
from oscar_zoo.artifact.specs import Clip, ServingRecipe
from oscar_zoo.engines import served_artifact, settings
from oscar_zoo.engines.sglang.offline_process import Case
from oscar_zoo.engines.vllm import command, metrics
from oscar_zoo.evaluate.bench import sides


def test_a_command_for_vllm(cli: Cli, tmp_path: Path) -> None:
    """The plugin reads its variables as that of SGLang reads those of its flags."""
    folder = write_folder(tmp_path / "rotation", artifact_files())
    line = ("serve", folder, "--model", EXAMPLE, "--engine", "vllm")
    own = ("--print", "--device", "cpu", "--clip", "0.5,0.25")
    facts = cli.json(0, *line, *own, "--", "--max-num-seqs=16")
    assert facts["argv"][:2] == ["vllm", "serve"] and facts["argv"][-1] == "--max-num-seqs=16"
    assert {"--kv-cache-dtype=oscar_int2", "--host=127.0.0.1"} <= {*facts["argv"]}
    elsewhere = ("--print", "--device", "cuda")
    assert "--max-num-seqs=64" in cli.json(0, *line, *elsewhere)["argv"]
    two = cli.json(0, *line, *own, "--", "--tp", "2")["argv"]
    assert "--distributed-executor-backend=mp" in two
    assert two[-2:] == ["--tensor-parallel-size", "2"]
    chosen = settings.read_settings(facts["env"])
    assert (chosen.k_clip, chosen.v_clip) == ((0.5,), (0.25,))
    assert served_artifact.load(chosen.source, chosen.expected_digest).where == str(folder)
    cli.refused(1, *line, "--device", "cpu")  # no vLLM here
    refused = "--host=0.0.0.0 --kv-cache-dtype --dp --trust_remote_code --load-format=pt"
    drafts = '--speculative-config={"method": "%s", "num_speculative_tokens": 3}'
    ngrams = drafts % "ngram"
    assert ngrams in cli.json(0, *line, *own, "--", ngrams)["argv"]
    eagle = (drafts % "eagle3").replace("}", ', "model": "x"}')
    assert eagle in cli.json(0, *line, *own, "--", eagle)["argv"]
    others = drafts % "eagle3", eagle.replace("eagle3", "ngram"), f"{ngrams}]", drafts % "mtp"
    odd = "--middleware=a.b", "--max-num-seqs=0", "--max-num-s=9"
    for flag in (*refused.split(), *odd, *others):
        cli.refused(2, *line, "--print", "--", flag)
    assert cli.json(2, *line, *own, "--", "--tp-sise=2")["error"]["hint"] is None
    cli.refused(2, *line, *elsewhere, "--drafts=mtp")
    drafted = cli.json(0, *line, *elsewhere, "--drafts")
    assert f"{command.DRAFTS}={json.dumps(command.NGRAMS)}" in drafted["argv"]
    assert drafted["drafts"] is not None
    asked = cli.json(0, *line, *elsewhere, "--drafts", "--", ngrams)["argv"]
    assert [word for word in asked if word.startswith(command.DRAFTS)] == [ngrams]


@pytest.mark.parametrize(("name", "built"), [("qwen3_5", True), ("lfm2", False)])
def test_models_with_states(name: str, built: bool, cli: Cli, tmp_path: Path) -> None:
    shape = TINY.model_copy(update={"attention_layers": (1, 3)})
    files = payload(geometry=shape)
    files[FILE_NAME] = manifest(files, geometry=shape).to_bytes()
    model = write_architecture(name, tmp_path / "model")
    line = ("serve", write_folder(tmp_path / "rotation", files), "--model", model)
    line = (*line, "--device", "cuda", "--print")
    cli.capsys.readouterr()
    cli.json(0, *line)
    vllm = (*line, "--engine", "vllm")
    if not built:
        cli.refused(1, *vllm)
        return
    assert cli.json(0, *vllm, "--", "--prefix-match-unit=128")["argv"][-1].endswith("=128")
    cli.refused(1, *vllm, "--", f"{command.DRAFTS}={json.dumps(command.NGRAMS)}")


def test_engines_of_a_comparison_on_two_gpus(tmp_path: Path) -> None:
    """They get vLLM's name of the flag, and no port of SGLang's ranks."""
    flags = sides.read_flags(("--tp=2",), "vllm")
    recipe = ServingRecipe(group_size=64, clip=Clip(k=0.96, v=0.92))
    engines = sides.Engines(
        model="/m", random_weights=True, rotations=Path("/r"), rotations_sha256="sha256:1",
        copy_of="sha256:2", recipe=recipe, device="cuda", kernels=Path("/k"),
        cases=(Case(batch=1, context=100),), new_tokens=8, repeats=1, requests=64, port=31000,
        flags=flags, engine="vllm",
    )  # fmt: skip
    for side in sides.all_sides(("bf16", "int2"), ["flash_attn"]):
        words = sides.job(side, engines, tmp_path).arguments
        names = {word.partition("=")[0] for word in words}
        assert names <= command.ALLOWED | {"--model", "--kv-cache-dtype", "--attention-backend"}
        assert "--tensor-parallel-size=2" in words


def test_metrics_of_several_ranks() -> None:
    """Every worker of a server answers; the first one is told."""

    async def asked(_: str) -> list[dict[str, Any]]:
        recipe = dict.fromkeys(("bits", "sink", "recent", "k_clip", "v_clip"), 2)
        info = {"name": "n", "digest": "d", "format_version": 1, "group_size": 64, **recipe}
        return [{"info": info, "used_ring_rows": rank} for rank in (1, 1)]

    cache = SimpleNamespace(
        num_gpu_blocks=3, block_size=128, kv_cache_dtype_skip_layers=[], mamba_block_size=None
    )
    model = SimpleNamespace(served_model_name="ranks")
    config = SimpleNamespace(cache_config=cache, model_config=model)
    client = SimpleNamespace(collective_rpc=asked)
    told = metrics.Metrics(SimpleNamespace(vllm_config=config, engine_client=client))
    asyncio.run(told.refresh())
    assert (told._told["used_ring_rows"], told._told["capacity_tokens"]) == (1, 256)


def test_every_allowed_flag_is_told() -> None:
    page = (Path(__file__).resolve().parents[3] / "docs/vllm.md").read_text("utf-8")
    assert [flag for flag in command.ALLOWED if f"`{flag}`" not in page] == []


@pytest.mark.parametrize(
    ("kind", "measured"),
    [("BF16", 797_600), ("FP8", 1_595_712), ("INT2", 5_252_096), ("INT2", 5_396_864)],
)
def test_vllm_on_an_h200_had_as_many_tokens(kind: str, measured: int) -> None:
    """vLLM 0.33.0 with its defaults, the shape of Qwen3-8B, 128 requests for INT2."""
    memory = int(139.8 * 2**30)
    report = fit_gpu("Qwen3-8B", memory, requests=128, engine="vllm")
    assert abs(report.of_kind(kind).tokens / measured - 1) < 0.03


def test_what_fits_vllm(cli: Cli) -> None:
    line = ("fit-gpu", "--engine", "vllm", "--gpu")
    cli.refused(1, *line, "H100", "Qwen3.5-27B")
    facts = cli.json(0, *line, "RTX 4090", "Qwen3-32B")
    assert (facts["engine"], facts["gpus"], facts["fitting_gpus"]) == ("vllm", 1, 4)
    assert "--max-num-seqs=" in cli(0, *line, "H100", "Qwen3-8B")
