"""Models with multi-head latent attention (MLA) on the command line: computed, verified, measured
with a simulated cache, and refused by name wherever a cache is served."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from architectures import write_architecture
from cli_output import Cli
from tiny_models import EXAMPLE

import oscar_zoo
from oscar_zoo.artifact.files import artifact_digest, file_digest
from oscar_zoo.artifact.manifest import Manifest
from oscar_zoo.artifact.outcome import Rejected
from oscar_zoo.artifact.reader import read_rotation
from oscar_zoo.artifact.verify import verify_files
from oscar_zoo.artifact.writer import rotation_bytes
from oscar_zoo.engines import served_artifact
from oscar_zoo.engines.settings import ArtifactSource
from oscar_zoo.engines.transformers.cache import block_of
from oscar_zoo.errors import GeometryMismatch, MalformedFile, UnsupportedModel

TEXT = (EXAMPLE.parents[1] / "text/validation.txt").read_text("utf-8")
SHORT = ["--windows", "1", "--length", "1024", "--answers", "4", "--device", "cpu"]


@pytest.fixture(scope="module", params=["deepseek_v3", "deepseek_v2"])
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a random model, a text, and the artifact that `compute` makes of them."""
    folder = tmp_path_factory.mktemp(request.param)
    (folder / "text.txt").write_text(TEXT[:20_000])
    model = write_architecture(request.param, folder / "model", dtype="float32")
    text = str(folder / "text.txt")
    options: dict[str, Any] = {"calib_data": text, "calib_tokens": 1024, "seq_len": 512}
    oscar_zoo.compute_artifact(model, method="wush", output=folder / "made", **options)
    return folder


def test_from_a_model_to_figures(cli: Cli, made: Path, tmp_path: Path) -> None:
    artifact = shutil.copytree(made / "made", tmp_path / "made")
    manifest = Manifest.from_bytes((artifact / "oscar.json").read_bytes())
    assert (manifest.schema_, manifest.kind) == ("oscar-zoo.manifest/3", "mla_latent")
    assert "latent" in manifest.recipe.requires
    shape, shown = manifest.model, cli(0, "info", artifact)
    assert (shape.num_kv_heads, shape.head_dim, shape.v_head_dim) == (1, 128, 128)
    assert shape.rotary_key == 32 and "K clip none, V clip none" in shown
    assert [one.path for one in manifest.files_of("latent_rotation")] == ["latent_rotation_wush.pt"]
    assert not (manifest.file("k_rotation") or manifest.file("v_rotation"))

    bare = shutil.copy(artifact / "latent_rotation_wush.pt", tmp_path)
    for place in (bare, artifact):
        (found,) = cli.json(0, "verify", place, "--model", made / "model")["results"]
        said = {check["name"]: check["detail"] for check in found["checks"]}
        assert "keys and values at once" in said["roles"]
    assert (found["level"], found["grade"]) == ("statistics", "fp64")
    assert said["model"].endswith("latents of 128 channels and rotary keys of 32")

    report = cli.json(0, "eval", artifact, "--model", made / "model", *SHORT)
    rows = {row["cache"]: row for row in report["rows"]}
    assert [*rows] == ["bf16", "int2", "int2-hadamard", "artifact"]  # it has no clip
    bits = (128 * 2.25 + 32 * 16) / 160
    assert rows["artifact"]["bits_per_element"] == pytest.approx(bits)
    assert manifest.bits_per_element == pytest.approx(bits)
    assert rows["artifact"]["perplexity"] == pytest.approx(rows["bf16"]["perplexity"], rel=0.2)
    assert rows["artifact"]["perplexity"] != rows["bf16"]["perplexity"]
    cli(0, "eval", artifact, "--model", made / "model", *SHORT, "--task", "perplexity")
    assert "rotary keys" in cli.err
    assert "rotary keys" in cli(0, "fit-gpu", made / "model", "--memory", "24GiB")

    hub = ("--hub", f"file:{tmp_path / 'hub'}")
    cli(0, "publish", artifact, *hub, "--create")
    (pulled,) = cli.json(0, "pull", manifest.id, *hub, "--no-lock")["artifacts"]
    assert pulled["digest"] == manifest.digest


@pytest.mark.parametrize("made", ["deepseek_v2"], indirect=True)
def test_by_default_codes_are_those_that_a_server_reads(made: Path, tmp_path: Path) -> None:
    """Random weights are far from what 2 bits should lose; only who asks gets wider codes."""
    options: dict[str, Any] = {"calib_data": str(made / "text.txt"), "calib_tokens": 1024}
    options["seq_len"] = 512
    found = oscar_zoo.compute_artifact(made / "model", output=tmp_path / "made", **options)
    assert found.bits_per_element == pytest.approx((128 * 2.25 + 32 * 16) / 160)


def test_another_method_from_the_moments(cli: Cli, made: Path, tmp_path: Path) -> None:
    moments = made / "made.moments.safetensors"
    cli(0, "fit", moments, "--method", "oscar", "--output-dir", tmp_path / "oscar")
    (found,) = cli.json(0, "verify", tmp_path / "oscar")["results"]
    assert found["warnings"] == [] and found["level"] == "statistics"
    assert "hadamard, oscar, wush" in cli.refused(2, "fit", moments, "--method", "oscar-exact")


ON_A_GPU = "latents (MLA) are served on a GPU only"
NOT_BUILT = "multi-head latent attention (MLA): codes of 2 bits would store 100 bytes per token and"
REFUSED = {
    "serve ARTIFACT --model MODEL --device cpu": (1, ON_A_GPU),
    "serve MODEL --print": (1, "add --device cuda"),  # not to compute an artifact first
    "fit-gpu MODEL --memory 24GiB --tp 3": (2, "cannot share the 4 query heads of"),
    "fit-gpu MODEL --memory 24GiB --engine vllm": (1, "latents (MLA)"),
    "serve ARTIFACT --model MODEL --device cuda --engine vllm --print": (1, "latents (MLA)"),
    "serve ARTIFACT --model MODEL --device cuda --print --drafts": (1, "MLA with drafts"),
    "serve ARTIFACT --model MODEL --device cuda --print --host-cache 1GiB": (1, "hierarchical"),
    "serve ARTIFACT --model MODEL --device cuda --print -- --dp=2": (1, "--dp-size"),
    "eval ARTIFACT --model MODEL --engine sglang --device cpu": (1, ON_A_GPU),
    "eval ARTIFACT --model MODEL --engine transformers --device cpu": (1, NOT_BUILT),
    "eval ARTIFACT --model MODEL --against fp8": (2, "this model caches latents (MLA)"),
    "eval ARTIFACT --model MODEL --clip 0.9,0.8 --device cpu": (2, "keys and values at once"),
    "compute MODEL --method wush --bits 6.7": (2, "a budget from 5 to 6.6"),
    "compute MODEL --method wush-tuned": (2, "wush-tuned is not for latents (MLA)"),
    "compute MODEL --method wush --clip 0.9,0.8": (2, "keys and values at once"),
    "compute MODEL --method wush --seq-len 128": (2, "a sequence length of 322 or more"),
}


@pytest.mark.parametrize("line", REFUSED)
def test_what_is_not_built_is_refused_by_name(
    cli: Cli, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str
) -> None:
    monkeypatch.chdir(tmp_path)
    places = {"ARTIFACT": made / "made", "MODEL": made / "model"}
    code, said = REFUSED[line]
    assert said in cli.refused(code, *(places.get(word, word) for word in line.split()))


def test_engines_refuse_latents(made: Path) -> None:
    from transformers import AutoConfig

    with pytest.raises(UnsupportedModel, match="serving them here is not built"):
        block_of(AutoConfig.from_pretrained(made / "model"))
    found = served_artifact.load(ArtifactSource(folder=str(made / "made")))
    rows = {"num_kv_heads": 1, "head_dim": 64, "v_head_dim": 64}
    with pytest.raises(GeometryMismatch, match="latents"):
        found.check_geometry(layer_ids=(0, 1), **rows)


@pytest.mark.parametrize(
    "change",
    [
        {"schema": "oscar-zoo.manifest/1"},
        {"kind": "rotation_pair"},
        {"model": {"rotary_key": None}},
        {"model": {"num_q_heads": 8, "num_kv_heads": 2}},
        {"recipe": {"requires": []}},
    ],
)
def test_a_manifest_says_it_everywhere_or_is_none(made: Path, change: dict[str, Any]) -> None:
    value = json.loads((made / "made/oscar.json").read_bytes())
    for name, given in change.items():
        value[name] = value[name] | given if isinstance(given, dict) else given
    with pytest.raises(MalformedFile):
        Manifest.from_bytes(json.dumps(value).encode())


def test_matrices_of_another_layer_are_found(made: Path) -> None:
    files = {path.name: path.read_bytes() for path in (made / "made").iterdir()}
    value, name = json.loads(files.pop("oscar.json")), "latent_rotation_wush.pt"
    found = read_rotation(files[name], what=name)
    ids, layers = found.layer_ids, (*found.layers[1:], found.layers[0])
    turned = tuple(replace(one, layer_id=at) for at, one in zip(ids, layers, strict=True))
    files[name] = rotation_bytes(replace(found, layers=turned))
    digests = [file_digest(name, data) for name, data in sorted(files.items())]
    sums = {one.path: {"sha256": one.sha256, "size": one.size} for one in digests}
    listed = [entry | sums[entry["path"]] for entry in value["files"]]
    changed = value | {"files": listed, "digest": artifact_digest(digests)}
    manifest = Manifest.from_bytes(json.dumps(changed).encode())
    outcome = verify_files(files, manifest=manifest)
    assert isinstance(outcome, Rejected) and outcome.code == "statistics.mismatch"
