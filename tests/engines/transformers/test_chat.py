"""`oscar-zoo chat --model`: the answers are those of `generate` with an `OscarCache`, which goes on
from turn to turn."""

import json
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cli_output import Cli
from terminal import Terminal
from tiny_artifacts import artifact_files, write_folder

from oscar_zoo.engines.transformers.chat import Answering, settings_of
from oscar_zoo.errors import UsageError
from oscar_zoo.models.chat_template import ChatTemplate
from oscar_zoo.models.loading import LoadedModel, load_model
from oscar_zoo.observer import SILENT
from oscar_zoo.registry.artifacts import open_folder
from oscar_zoo.serving.chat import ChatSession
from oscar_zoo.transformers import OscarCache

END = "<|endoftext|>"
PLAIN = "{% for m in messages %}{{ m['content'] }}" + END + "{% endfor %}"
REWRITING = PLAIN.replace("m['content']", "m['content'] if loop.last else m['content'][:9]")
ASKED = "How do I make a file?", "And how do I read the file again, then?"
NEW = 40


@pytest.fixture(autouse=True)
def template(world: Path, request: pytest.FixtureRequest) -> str:
    """The chat template of the model, which a test may choose."""
    text = str(getattr(request, "param", PLAIN))
    path = world / "model/tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": text}))
    return text


@pytest.fixture
def model(world: Path, template: str) -> LoadedModel:
    return load_model(str(world / "model"), dtype="bfloat16", model_id="model")


def cache_of(world: Path, model: LoadedModel) -> OscarCache:
    return OscarCache.from_artifact(open_folder(world / "artifact", SILENT), model=model.model)


class Reference:
    """A conversation over `generate` alone; `fed` are the tokens that each turn computes first."""

    def __init__(self, world: Path, model: LoadedModel) -> None:
        self.model, self.cache = model, cache_of(world, model)
        self.turns: list[dict[str, str]] = []
        self.known: list[int] = []
        self.fed: list[int] = []

    def ask(self, question: str, new: int = NEW) -> str:
        import torch

        tokenizer: Any = self.model.tokenizer
        self.turns.append({"role": "user", "content": question})
        text = tokenizer.apply_chat_template(self.turns, tokenize=False)
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        common = 0
        while common < min(len(self.known), len(ids) - 1) and self.known[common] == ids[common]:
            common += 1
        if common < len(self.known):
            self.cache.crop(common - len(self.known))
        self.fed.append(len(ids) - common)
        (found,) = self.model.model.generate(
            torch.tensor([ids]), past_key_values=self.cache, max_new_tokens=new, do_sample=False
        ).tolist()
        self.known = found[:-1]
        said = str(tokenizer.decode(found[len(ids) :], skip_special_tokens=True))
        self.turns.append({"role": "assistant", "content": said})
        return said


def words(world: Path, *more: object) -> tuple[object, ...]:
    return ("chat", "--model", world / "model", world / "artifact", *more)


def session_of(world: Path, model: LoadedModel, most: int = NEW) -> ChatSession:
    settings = settings_of(str(world / "model"))
    return ChatSession(Answering(model, cache_of(world, model), settings, most), "model")


def test_one_question(world: Path, model: LoadedModel, cli: Cli) -> None:
    want = Reference(world, model).ask(ASKED[0])
    told = cli.json(0, *words(world, ASKED[0], "--max-tokens", NEW))
    assert told["answer"] == want and len(want) > NEW
    assert told["cut"] is True and (told["model_id"], told["port"]) == ("model", None)
    prompt = len(model.tokenizer(ASKED[0] + END)["input_ids"])
    assert told["usage"] == {"prompt_tokens": prompt, "completion_tokens": NEW}
    assert 0 < told["first_seconds"] <= told["seconds"]
    assert cli(0, *words(world, ASKED[0], "--max-tokens", NEW)) == want + "\n"
    assert "tiny-qwen3-hard:seq512_prompt2_group64, 2.50 bits on cpu." in cli.err


def test_the_artifact_of_the_model(
    world: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    want = cli.json(0, *words(world, ASKED[0], "--max-tokens", 5))["answer"]
    name = "tiny-qwen3-hard/seq512_prompt2_group64"
    write_folder(tmp_path / "hub" / name, artifact_files())
    shutil.copytree(world / "model", tmp_path / "tiny-qwen3-hard")
    monkeypatch.setenv("OSCAR_ZOO_HUB", f"file:{tmp_path}/hub")
    monkeypatch.setenv("OSCAR_ZOO_CACHE", str(tmp_path / "cache"))
    question = (ASKED[0], "--max-tokens", 5)
    assert cli.json(0, "chat", "--model", tmp_path / "tiny-qwen3-hard", *question)["answer"] == want


def test_an_answer_ends_where_the_model_says(world: Path, model: LoadedModel, cli: Cli) -> None:
    reference = Reference(world, model)
    reference.ask(ASKED[0])
    last = reference.known[-1]
    prompt = reference.fed[0]
    settings = world / "model/generation_config.json"
    settings.write_text(json.dumps({"eos_token_id": [0, last]}))
    told = cli.json(0, *words(world, ASKED[0]))
    settings.unlink()
    new = reference.known[prompt:].index(last) + 1
    assert told["cut"] is False and told["usage"]["completion_tokens"] == new


@pytest.mark.parametrize("template", [PLAIN, REWRITING], indirect=True, ids=["plain", "rewriting"])
def test_the_next_turn_keeps_the_cache(world: Path, model: LoadedModel, template: str) -> None:
    reference, session = Reference(world, model), session_of(world, model)
    want = [reference.ask(one) for one in ASKED]
    seen: list[int] = []
    embedding: Any = model.model.get_input_embeddings()
    with embedding.register_forward_pre_hook(lambda _, given: seen.append(given[0].shape[1])):
        got = ["".join(session.ask(one)) for one in ASKED]
    assert got == want
    first = seen[:1] + [1] * (NEW - 1)
    assert seen == first + [reference.fed[1]] + [1] * (NEW - 1)
    session.forget()
    assert "".join(session.ask(ASKED[0])) == want[0]
    assert session.answer.usage is not None
    assert session.answer.usage.prompt_tokens == reference.fed[0]


def test_an_answer_that_is_ended_is_forgotten(world: Path, model: LoadedModel) -> None:
    session = session_of(world, model, most=1000)
    parts = session.ask("Tell me a very long story, one about a file.")
    assert isinstance(parts, Iterator) and next(parts) is not None
    parts.close()  # type: ignore[attr-defined]
    again = session_of(world, model, most=NEW)
    list(again.ask(ASKED[0]))
    for part in session.ask(ASKED[0]):
        if len(session.answer.text) > len(again.answer.text) or part is None:
            break
    assert session.answer.text.startswith(again.answer.text[:-1])


def test_a_conversation_that_is_too_long(world: Path, model: LoadedModel) -> None:
    session = session_of(world, model)
    with pytest.raises(UsageError):
        list(session.ask("word " * 3000))
    assert len("".join(session.ask(ASKED[0]))) > NEW


@pytest.mark.parametrize("template", [""], indirect=True)
def test_a_base_model_is_refused(world: Path, template: str, cli: Cli) -> None:
    told = cli.json(1, *words(world, ASKED[0]))
    assert told["error"]["code"] == "model"


def test_a_terminal(world: Path, model: LoadedModel) -> None:
    reference = Reference(world, model)
    want = [reference.ask(one).replace("\n", "\r\n") for one in ASKED]
    with Terminal(["-m", "oscar_zoo", *words(world, "--max-tokens", NEW)]) as terminal:
        for turn, (question, answer) in enumerate(zip(ASKED, want, strict=True), 1):
            terminal.see("> ", turn)
            terminal.press(question.encode() + b"\r")
            terminal.see(answer)
        terminal.see("> ", len(ASKED) + 1)
        terminal.press(b"\x04")
        assert terminal.end() == 0


def test_ctrl_c_leaves_the_template_alone() -> None:
    """A terminal sends it to all processes of the chat."""
    template = ChatTemplate("{{ messages[0].content }}", {})
    for said in ("one", "two"):
        asked = [{"role": "user", "content": said}]
        assert template.render(asked, add_generation_prompt=True) == said
        assert template._process is not None
        template._process.send_signal(signal.SIGINT)


def test_ctrl_c_ends_an_answer(world: Path) -> None:
    command = ["-m", "oscar_zoo", *words(world, "--max-tokens", 1500)]
    with Terminal(command, streams=["stdin"], stdout=subprocess.PIPE, text=True) as terminal:
        said = terminal.child.stdout
        assert said is not None
        terminal.press(b"What is a file?\r")
        first = said.read(40)
        terminal.child.send_signal(signal.SIGINT)
        terminal.press(b"/bye\r")
        rest = said.read()
        assert terminal.child.wait(60) == 0 and first and len(rest) < 3000
