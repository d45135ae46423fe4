"""`oscar-zoo completion`: scripts that real shells take, and what they complete."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hub_uses import publish
from tiny_artifacts import artifact_files, write_folder

from oscar_zoo import paths
from oscar_zoo.artifact.names import ArtifactId
from oscar_zoo.cli.main import COMMANDS, run
from oscar_zoo.registry.hubs.local import LocalHub
from oscar_zoo.registry.hubs.remote import MetadataCache
from oscar_zoo.registry.store import Store


def completed(folder: Path, script: str, *words: str) -> list[str]:
    """What bash offers for the last of `words` once it has read `script`."""
    program = folder / "oscar-zoo"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m oscar_zoo "$@"\n')
    program.chmod(0o755)
    line = " ".join(f"'{word}'" for word in words)
    state = f"COMP_WORDS=({line}); COMP_CWORD={len(words) - 1}"
    show = "_oscar_zoo_completion oscar-zoo; printf '%s\\n' \"${COMPREPLY[@]}\""
    done = subprocess.run(
        ["bash", "--norc", "-c", f"{script}\n{state}; {show}"],
        capture_output=True,
        text=True,
        env=os.environ | {"PATH": f"{folder}:{os.environ['PATH']}"},
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.split()


@pytest.fixture
def script(capsys: pytest.CaptureFixture[str]) -> str:
    assert run(["completion", "bash"]) == 0
    return capsys.readouterr().out


def test_bash_completes_commands_their_commands_and_options(tmp_path: Path, script: str) -> None:
    for words, found in (
        ("pu", ["pull", "publish"]),
        ("models --so", ["--sort"]),
        ("run --de", []),
        ("cache v", ["verify"]),
        ("cache gc --d", ["--dry-run"]),
        ("completion z", ["zsh"]),
        ("nonsense x", []),
    ):
        assert completed(tmp_path, script, "oscar-zoo", *words.split()) == found, words
    for words in ("", "help "):
        found = completed(tmp_path, script, *f"oscar-zoo {words}".split(), "")
        assert set(found) == set(COMMANDS)


def offered(*words: str) -> list[str]:
    """What the program answers to bash for the last of `words`, `type,value` each."""
    asked = {
        "_OSCAR_ZOO_COMPLETE": "bash_complete",
        "COMP_WORDS": "\n".join(words),
        "COMP_CWORD": str(len(words) - 1),
    }
    done = subprocess.run(
        [sys.executable, "-m", "oscar_zoo"], capture_output=True, text=True, env=os.environ | asked
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.split()


def test_names_of_models_and_versions(tmp_path: Path, script: str) -> None:
    """From the package, the store and hubs in folders; the shell breaks words at colons."""
    Store().put(ArtifactId("Mine", "one"), artifact_files(artifact="Mine/one"), source="test")
    hub = LocalHub(paths.default_zoo_dir(), must_exist=False)
    publish(write_folder(tmp_path / "a", artifact_files()), hub, aliases=("small",))
    for command in ("pull", "serve", "search"):
        found = completed(tmp_path, script, "oscar-zoo", command, "")
        assert {"Mine", "small", "tiny-qwen3-hard", "Qwen3-8B", "Qwen3-4B-Thinking"} <= {*found}
    tag = "seq512_prompt2_group64"
    for words, want in (
        (("pull", "mine", "SMA"), ["small"]),
        (("pull", "tiny-qwen3-hard", ":", "seq5"), [tag]),
        (("info", "tiny-qwen3-hard", ":"), [tag]),
        (("info", "tiny-qwen3-hard/"), [f"tiny-qwen3-hard/{tag}"]),
        (("yank", "tiny"), [f"tiny-qwen3-hard:{tag}"]),
        (("deprecate", "Mi"), ["Mine:one"]),
        (("cache", "rm", ""), ["Mine"]),
        (("verify", ""), ["Mine"]),
        (("compute", "qwen3.5-35"), ["Qwen3.5-35B-A3B"]),
        (("eval", "Mine", "--model", "Qwen/Qwen3-32"), ["Qwen/Qwen3-32B", "Qwen/Qwen3-32B-FP8"]),
        (("compare", "Mine", "tiny-qwen3-h"), ["tiny-qwen3-hard"]),
        (("leaderboard", "--task", "aime"), ["aime24", "aime25"]),
        (("list", "--sort", "p"), ["perplexity"]),
        (("list", "--family", "gem"), ["Gemma-3", "Gemma-4"]),
    ):
        assert completed(tmp_path, script, "oscar-zoo", *words) == want, words


@pytest.mark.parametrize(
    ("command", "word"),
    [("pull", "./"), ("serve", "../x"), ("eval", "/a"), ("verify", "~/b"), ("compute", "./c")],
)
def test_paths_are_left_to_the_shell(command: str, word: str) -> None:
    assert offered("oscar-zoo", command, word) == [f"file,{word}"]


def test_the_index_of_a_hub_that_was_asked_before_is_known(tmp_path: Path) -> None:
    hub = LocalHub(tmp_path / "hub", must_exist=False)
    publish(write_folder(tmp_path / "a", artifact_files()), hub, aliases=("far-away",))
    index = (tmp_path / "hub/index.json").read_bytes()
    MetadataCache("hf:someone/zoo").file("0" * 40, "index.json", lambda: index)
    assert offered("oscar-zoo", "pull", "far") == ["plain,far-away"]


def test_completing_a_name_loads_nothing_heavy_and_asks_nobody(tmp_path: Path) -> None:
    code = (
        "import os, socket, sys\n"
        "socket.socket.connect = None\n"
        "from oscar_zoo.cli.main import run\n"
        "try:\n    run([])\nexcept SystemExit:\n    pass\n"
        "heavy = ('torch', 'transformers', 'huggingface_hub', 'modelscope_hub', 'numpy')\n"
        "print([name for name in heavy if name in sys.modules], file=sys.stderr)\n"
    )
    asked = {
        "_OSCAR_ZOO_COMPLETE": "bash_complete",
        "COMP_WORDS": "oscar-zoo\npull\nQwen3-8",
        "COMP_CWORD": "2",
    }
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | asked
    )
    assert (done.stdout, done.stderr) == ("plain,Qwen3-8B\n", "[]\n")


def test_what_cannot_be_read_is_left_out(own_state: Path) -> None:
    (own_state / "config").mkdir()
    (own_state / "config/config.toml").write_text("broken [")
    (own_state / "cache").mkdir(mode=0o777)
    (own_state / "cache").chmod(0o777)
    assert offered("oscar-zoo", "pull", "Qwen3-8") == ["plain,Qwen3-8B"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shells_take_their_scripts(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, shell: str
) -> None:
    assert run(["completion", shell]) == 0
    text = capsys.readouterr().out
    assert "_OSCAR_ZOO_COMPLETE" in text and f"{shell}_complete" in text
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed: its script was printed, not read")
    (tmp_path / "script").write_text(text)
    done = subprocess.run([shell, "-n", str(tmp_path / "script")], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
