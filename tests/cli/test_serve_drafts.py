"""`serve --drafts`: which flags of SGLang it puts in, for real small checkpoints with and without a
layer for later tokens, and for the models of the zoo."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from architectures import write_mtp_model
from cli_output import Cli
from safetensors.torch import load_file, save_file
from tiny_artifacts import manifest, payload, write_folder
from tiny_models import INDEX, change_config

import oscar_zoo
from oscar_zoo.artifact.manifest import FILE_NAME
from oscar_zoo.cli.commands.serve import command
from oscar_zoo.errors import UsageError
from oscar_zoo.models.config_file import geometry_of_folder
from oscar_zoo.registry.catalog import Catalog

EXAMPLE = Path(__file__).resolve().parents[2] / "examples/models/tiny-qwen3-hard"
CHAIN = [
    "--speculative-algorithm=NEXTN",
    "--speculative-num-steps=3",
    "--speculative-eagle-topk=1",
    "--speculative-num-draft-tokens=4",
    "--speculative-draft-attention-backend=triton",
]
REPEATS = ["--speculative-algorithm=NGRAM", "--speculative-num-draft-tokens=8"]
NO_TREE = "--speculative-ngram-max-bfs-breadth=1"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders `dense` and `hybrid` with such a layer, each with a copy that lost its weights."""
    folder = tmp_path_factory.mktemp("models")
    for name, kind in (("dense", "glm4_moe"), ("hybrid", "qwen3_5")):
        write_mtp_model(kind, folder / name)
        copy = shutil.copytree(folder / name, folder / f"{name}-lost")
        own = ("model.layers.4.", "mtp.")
        weights = load_file(copy / "model.safetensors")
        kept = {path: weight for path, weight in weights.items() if not path.startswith(own)}
        assert 0 < len(kept) < len(weights)
        save_file(kept, copy / "model.safetensors", metadata={"format": "pt"})
    return folder


def shown(
    cli: Cli, folder: Path, model: Path | str, *words: object, code: int = 0
) -> tuple[list[str], str]:
    """The flags for speculative decoding of `serve --print`, and what it says of them; of what it
    refuses, the one line. The artifact goes to `folder`."""
    artifact = folder / "rotation"
    if not artifact.exists():
        write_folder(artifact, payload(geometry=geometry_of_folder(Path(model))))
    line = ["serve", artifact, "--model", model, "--print", "--device", "cuda", *words]
    if code:
        cli(code, *line)
        (told,) = [one for one in cli.err.splitlines() if not one.startswith("warning: ")]
        return [], told
    facts = cli.json(0, *line)
    flags = [flag for flag in facts["argv"] if flag.startswith("--speculative-")]
    return flags, facts["drafts"] or ""


def named(cli: Cli, folder: Path, name: str) -> Any:
    """`serve --print --json --drafts` of a model of the zoo that is not on this machine."""
    recipe = Catalog.packaged().recipe(name)
    assert recipe is not None
    small = recipe.geometry.model_copy(update={"num_q_heads": recipe.geometry.num_kv_heads})
    artifact = write_folder(folder / name, payload(geometry=small))
    return cli.json(0, "serve", artifact, "--print", "--device", "cuda", "--drafts")


@pytest.mark.parametrize("name", ["dense", "hybrid"])
def test_a_layer_of_the_model_drafts_where_its_weights_are_there(
    cli: Cli, tmp_path: Path, models: Path, name: str
) -> None:
    for words in (["--drafts"], ["--drafts", "auto"], ["--drafts=mtp"]):
        flags, told = shown(cli, tmp_path, models / name, *words)
        assert flags == CHAIN
        assert told.startswith("up to 3 tokens a step from the model's own layer (MTP), ")
    assert shown(cli, tmp_path, models / name) == ([], "")


@pytest.mark.parametrize(("name", "more"), [("dense", []), ("hybrid", [NO_TREE])])
def test_text_drafts_where_the_weights_lost_the_layer(
    cli: Cli, tmp_path: Path, models: Path, name: str, more: list[str]
) -> None:
    lost = models / f"{name}-lost"
    flags, told = shown(cli, tmp_path, lost, "--drafts")
    assert flags == [*REPEATS, *more]
    assert "up to 7 tokens a step from text that repeats itself" in told
    assert "its config.json names an MTP layer, but its weights have none" in told
    _, err = shown(cli, tmp_path, lost, "--drafts=mtp", code=1)
    assert "--drafts=mtp does not work with" in err and "but its weights have none" in err
    assert "--drafts=ngram" in err


def test_the_index_says_it_of_checkpoints_in_shards(cli: Cli, tmp_path: Path, models: Path) -> None:
    for name, wanted in (("dense", "NEXTN"), ("dense-lost", "NGRAM")):
        shards = shutil.copytree(models / name, tmp_path / name)
        names = load_file(shards / "model.safetensors")
        (shards / "model.safetensors").rename(shards / "model-00001-of-00001.safetensors")
        index = {"weight_map": dict.fromkeys(names, "model-00001-of-00001.safetensors")}
        (shards / INDEX).write_text(json.dumps(index))
        flags, _ = shown(cli, tmp_path, shards, "--drafts")
        assert flags[0] == f"--speculative-algorithm={wanted}"
    (shards / INDEX).write_text("{}")
    _, err = shown(cli, tmp_path, shards, "--drafts", code=1)
    assert "is no index of weights" in err


def test_a_model_whose_weights_are_elsewhere(
    cli: Cli, tmp_path: Path, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its `config.json` was fetched before. Only who names the layer gets it."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    cache, commit = tmp_path / "models--me--mine", "0" * 40
    (cache / "refs").mkdir(parents=True)
    (cache / "refs/main").write_text(commit)
    snapshot = cache / "snapshots" / commit
    snapshot.mkdir(parents=True)
    shutil.copyfile(models / "hybrid/config.json", snapshot / "config.json")
    geometry = geometry_of_folder(models / "hybrid")
    files = payload(geometry=geometry)
    made = manifest(files, artifact="mine/seq512_prompt2_group64", geometry=geometry)
    write_folder(tmp_path / "rotation", {**files, FILE_NAME: made.to_bytes()})
    said = "its config.json names an MTP layer, but its weights are not on this machine"
    flags, told = shown(cli, tmp_path, "me/mine", "--drafts")
    assert flags == [*REPEATS, NO_TREE] and told.endswith(said)
    assert shown(cli, tmp_path, "me/mine", "--drafts=mtp")[0] == CHAIN
    index = {"weight_map": {"mtp.fc.weight": "model-00001-of-00001.safetensors"}}
    (snapshot / INDEX).write_text(json.dumps(index))
    assert shown(cli, tmp_path, "me/mine", "--drafts")[0] == CHAIN


def test_a_model_without_such_a_layer(cli: Cli, tmp_path: Path) -> None:
    flags, told = shown(cli, tmp_path, EXAMPLE, "--drafts")
    assert flags == REPEATS and "it has no known MTP layer" in told
    flags, told = shown(cli, tmp_path, EXAMPLE, "--drafts", "ngram")
    assert flags == REPEATS and told.endswith("--drafts=ngram")


def test_a_layer_that_flags_name_must_be_there(cli: Cli, tmp_path: Path, models: Path) -> None:
    """SGLang would load weights first, and give up then. A draft model stands in for the layer."""
    model = ["--speculative-draft-model-path=some/draft"]
    for name, place in (("tiny", EXAMPLE), ("lost", models / "dense-lost")):
        folder = tmp_path / name
        folder.mkdir()
        _, err = shown(cli, folder, place, "--", "--speculative-algo=nextn", code=1)
        assert "NEXTN does not work with" in err and "MTP layer" in err, err
        assert "--speculative-algorithm=NGRAM" in err
        shown(cli, folder, place, "--", CHAIN[0], *model)
    shown(cli, tmp_path, models / "dense", "--", *CHAIN)
    words = ["--print", "--device", "cuda", "--", CHAIN[0]]
    for name, code in (("Qwen3-8B", 1), ("Qwen3.5-4B", 0), ("ERNIE-4.5-21B-A3B-PT", 0)):
        recipe = Catalog.packaged().recipe(name)
        assert recipe is not None
        folder = write_folder(tmp_path / name, payload(geometry=recipe.geometry))
        cli(code, "serve", folder, *words)


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (
            ["--speculative-num-steps=5"],
            [CHAIN[0], CHAIN[2], "--speculative-num-draft-tokens=6", CHAIN[4]],
        ),
        (
            ["--speculative-num-draft-tokens", "3"],
            [CHAIN[0], "--speculative-num-steps=2", CHAIN[2], CHAIN[4]],
        ),
        (["--speculative-eagle=1"], [CHAIN[0], CHAIN[1], *CHAIN[3:]]),
        (["--speculative-draft-attention-backend=fa3"], CHAIN[:4]),
        (
            [
                "--speculative-eagle-topk=2",
                "--speculative-num-steps=3",
                "--speculative-num-draft-tokens=6",
            ],
            [CHAIN[0], CHAIN[4]],
        ),
        (["--speculative-algo", "NGRAM"], []),
        (["--speculative-algorithm=EAGLE3", "--speculative-draft-model-path=some/draft"], []),
    ],
)
def test_flags_of_the_user_win(
    cli: Cli, tmp_path: Path, models: Path, given: list[str], wanted: list[str]
) -> None:
    flags, told = shown(cli, tmp_path, models / "dense", "--drafts", "--", *given)
    theirs = [flag for flag in given if flag.startswith("--speculative-")]
    ours = [x for x in flags if x not in theirs]
    assert [x for x in ours if x != "--speculative-draft-load-format=safetensors"] == wanted
    assert wanted or "--drafts adds no flags" in told


@pytest.mark.parametrize(
    ("option", "given"),
    [
        ("mtp", ["--speculative-algorithm=ngram"]),
        ("ngram", ["--speculative-algo", "NEXTN"]),
        ("auto", ["--speculative-draft-model-path=a/b"]),
        ("auto", ["--speculative-eagle-topk=2"]),
        ("auto", ["--speculative-num-steps=x"]),
        ("auto", ["--speculative-num-draft-tokens=1"]),
        ("auto", ["--speculative-num-steps=40"]),
        ("auto", ["--pp-size=2"]),
        ("auto", ["--enable-mixed-chunk"]),
    ],
)
def test_what_contradicts_it_is_told_in_one_line(
    cli: Cli, tmp_path: Path, models: Path, option: str, given: list[str]
) -> None:
    shown(cli, tmp_path, models / "dense", f"--drafts={option}", "--", *given, code=2)


def test_a_hybrid_takes_chains_alone(cli: Cli, tmp_path: Path, models: Path) -> None:
    numbers = ("eagle-topk=2", "num-steps=3", "num-draft-tokens=6")
    tree = [f"--speculative-{number}" for number in numbers]
    for option, given in (("mtp", tree), ("ngram", ["--speculative-ngram-max-bfs-breadth=4"])):
        words = [f"--drafts={option}", "--", *given]
        _, err = shown(cli, tmp_path, models / "hybrid", *words, code=1)
        assert "a tree of drafts does not work" in err and "Use a chain: " in err


@pytest.mark.parametrize("option", [[], ["--drafts"]])
@pytest.mark.parametrize(
    ("given", "tree"),
    [
        ([REPEATS[0]], True),
        ([*REPEATS, "--speculative-ngram-max-bfs-breadth=4"], True),
        ([*REPEATS, NO_TREE], False),
        (["--speculative-algorithm=EAGLE3", "--speculative-eagle-topk=4"], True),
        (["--speculative-algorithm=EAGLE3", "--speculative-eagle-topk", "1"], False),
        (["--speculative-algorithm=EAGLE3"], False),
    ],
)
def test_flags_that_name_a_tree_are_checked_as_well(
    cli: Cli, tmp_path: Path, models: Path, option: list[str], given: list[str], tree: bool
) -> None:
    """SGLang's own breadth of n-grams is a tree. What it takes of EAGLE depends on the release."""
    words = [*option, "--", *given, "--speculative-draft-model-path=some/draft"]
    for name, chains_alone in (("hybrid", True), ("dense", False)):
        refused = tree and chains_alone
        folder = tmp_path / name
        folder.mkdir()
        _, err = shown(cli, folder, models / name, *words, code=int(refused))
        assert ("a tree of drafts does not work" in err) == refused


def test_windows_take_chains_alone(cli: Cli, tmp_path: Path) -> None:
    windowed = shutil.copytree(EXAMPLE, tmp_path / "windowed")
    kinds = ["sliding_attention", "full_attention"] * 2
    change_config(windowed, sliding_window=128, use_sliding_window=True, layer_types=kinds)
    flags, told = shown(cli, tmp_path, windowed, "--drafts")
    assert flags == [*REPEATS, NO_TREE] and "n-grams" in told
    tree = ["--drafts", "--", "--speculative-ngram-max-bfs-breadth=4"]
    _, err = shown(cli, tmp_path, windowed, *tree, code=1)
    assert "SGLang moves a sliding window by the place of a draft" in err
    assert err.rstrip().endswith(f"Use a chain: {NO_TREE}")
    for name in ("gemma-3-1b-it", "gpt-oss-20b"):
        argv = named(cli, tmp_path, name)["argv"]
        assert {*REPEATS, NO_TREE} <= {*argv}


def test_a_cpu_takes_none(cli: Cli, tmp_path: Path) -> None:
    write_folder(tmp_path / "rotation", payload())
    for words in (["--print"], []):
        line = ["serve", tmp_path / "rotation", "--model", EXAMPLE, "--drafts", *words]
        assert "--drafts needs a GPU" in cli.refused(1, *line, "--device", "cpu", "--port", 30987)


@pytest.mark.parametrize(
    ("name", "flags", "why"),
    [
        ("GLM-4.5-Air", CHAIN, "the zoo knows of one"),
        ("Qwen3.5-4B", CHAIN, "the zoo knows of one"),
        ("Qwen3-0.6B", REPEATS, "the zoo knows of no MTP layer"),
        ("LFM2-350M", [*REPEATS, NO_TREE], "the zoo knows of no MTP layer"),
        ("Falcon-H1-0.5B-Instruct", [*REPEATS, NO_TREE], "the zoo knows of no MTP layer"),
    ],
)
def test_the_zoo_says_it_of_models_that_are_not_here(
    cli: Cli, tmp_path: Path, name: str, flags: list[str], why: str
) -> None:
    facts = named(cli, tmp_path, name)
    assert [flag for flag in facts["argv"] if flag.startswith("--speculative-")] == flags
    assert facts["drafts"].endswith(f"because {why}")


@pytest.mark.parametrize(
    ("words", "drafts"),
    [
        (["--drafts", "X"], "auto"),
        (["X", "--drafts"], "auto"),
        (["--drafts", "mtp", "X"], "mtp"),
        (["--drafts=ngram", "X"], "ngram"),
        (["X", "--drafts", "--port", "3"], "auto"),
        (["X", "--drafts", "--", "auto"], "auto"),
        (["X", "--", "--drafts"], None),
    ],
)
def test_it_may_stand_alone(words: list[str], drafts: str | None) -> None:
    values = command.make_context("serve", words).params
    assert (values["target"], values["drafts"]) == ("X", drafts)


def test_values_that_it_does_not_have() -> None:
    with pytest.raises(UsageError, match="'auto', 'mtp' or 'ngram'"):
        oscar_zoo.serve("Qwen3-8B", drafts="eagle")
