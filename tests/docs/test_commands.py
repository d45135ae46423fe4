"""Every `oscar-zoo` line of the documents parses; those that need no GPU and no network run."""

import shutil
from pathlib import Path

import click
import pytest
from documents import EXAMPLES, PAGES, ROOT, Line, commands, shell_lines
from hub_uses import put_version
from measured_artifacts import key_file, public_file
from tiny_artifacts import artifact_files, payload, write_folder

from oscar_zoo.artifact.manifest import SIGNATURE_NAME
from oscar_zoo.cli.main import cli, run
from oscar_zoo.registry.catalog import Catalog
from oscar_zoo.registry.hubs.local import LocalHub
from oscar_zoo.registry.signatures import SigningKey, sign

ANYWHERE = {
    *("list", "info", "search", "compare", "leaderboard", "pull", "verify", "cache"),
    *("completion", "doctor", "ps"),
}
"""Verbs that work on any machine, as far as they ask a folder and no hub on the network."""
ELSEWHERE = ("hf:", "ms:", "--compute", "Qwen/", "--engine")
"""Parts of a line for which it needs a network, or the weights of a large model."""
CALLS = [line for page in PAGES for line in commands(page)]
WITH_COMMANDS = [page for page in PAGES if page != EXAMPLES and commands(page)]


def runs_anywhere(line: Line) -> bool:
    """Whether a line can run in the folder that `prepared` makes."""
    if any(part in word for word in line.arguments for part in ELSEWHERE):
        return False
    return line.arguments[0] in ANYWHERE or "--print" in line.arguments


@pytest.fixture(scope="module")
def public(tmp_path_factory: pytest.TempPathFactory) -> LocalHub:
    """A folder in place of the public hubs, with the artifact that the pages speak of, signed with
    a key that lies beside it."""
    recipe = Catalog.packaged().recipe("Qwen3-8B")
    assert recipe is not None
    hub = LocalHub(tmp_path_factory.mktemp("public"), must_exist=False)
    name, files = f"Qwen3-8B/{recipe.default_tag}", payload(geometry=recipe.geometry)
    private = key_file(hub.root.with_suffix(".pem"))
    public_file(private)
    signature = sign(name, files, SigningKey.of_file(private))
    put_version(hub, name, {**files, SIGNATURE_NAME: signature})
    return hub


@pytest.fixture
def prepared(tmp_path: Path, public: LocalHub, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with what the lines name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OSCAR_ZOO_HUB", public.name)
    for name in ("rotation", "my-rotation"):
        write_folder(tmp_path / name, artifact_files())
    shutil.copyfile(public.root.with_suffix(".public.pem"), tmp_path / "my-org.pem")
    (tmp_path / "api-key").write_text("a-key\n")
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    assert run(["pull", "Qwen3-8B", "--quiet"]) == 0
    return tmp_path


@pytest.mark.parametrize("line", CALLS, ids=lambda line: line.name)
def test_the_line_parses(line: Line) -> None:
    parse(cli, "oscar-zoo", list(line.arguments), None)


def parse(
    command: click.Command, name: str, words: list[str], parent: click.Context | None
) -> None:
    """Parse as the command line does, down to the last group; click raises what is wrong."""
    try:
        context = command.make_context(name, words, parent=parent)
    except click.exceptions.Exit:  # --help and --version
        return
    if isinstance(command, click.Group):
        rest = [*context._protected_args, *context.args]
        found, inner, rest = command.resolve_command(context, rest)
        assert found is not None and inner is not None
        parse(inner, found, rest, context)


@pytest.mark.parametrize("page", WITH_COMMANDS, ids=lambda page: page.name)
@pytest.mark.usefixtures("prepared")
def test_lines_that_need_no_network_run(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for line in filter(runs_anywhere, commands(page)):
        code = run(list(line.arguments))
        out, err = capsys.readouterr()
        assert code == 0, f"{line.name}\n{out}{err}"


def test_the_steps_of_the_examples_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """From calibration text to the command of a server, exactly as the page says; and once more,
    after the folder that they wrote to was removed."""
    pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)  # `pull` asks no hub with it
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    for _ in range(2):
        done = []
        for line in shell_lines(EXAMPLES):
            if line.words[0] == "export":
                for word in line.words[1:]:
                    monkeypatch.setenv(*word.split("=", 1))
            if line.words[0] == "oscar-zoo":
                code = run(list(line.arguments))
                out, err = capsys.readouterr()
                assert code == 0, f"{line.name}\n{out}{err}"
                done.append(line.arguments[0])
        first, last = ["compute", "verify", "eval", "publish"], ["serve", "fit"]
        assert done[:4] == first and done[-2:] == last
        made = tmp_path / "try"
        assert (made / "rotation" / "oscar.json").is_file() and (made / "hadamard").is_dir()
        shutil.rmtree(made)
