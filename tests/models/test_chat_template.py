"""Chat templates of strangers: rendered as transformers does, and ended when they do not end."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tiny_artifacts import artifact_files, write_folder

from oscar_zoo.cli.main import run
from oscar_zoo.compute.data.documents import Document
from oscar_zoo.compute.data.packing import Encoder
from oscar_zoo.errors import InvalidModel, UsageError
from oscar_zoo.models.chat_template import (
    MAX_TEMPLATE,
    ChatTemplate,
    TemplateRefused,
    check_template,
)

EXAMPLE = Path(__file__).resolve().parents[2] / "examples/models/tiny-qwen3-hard"
TURNS = [
    {"role": "system", "content": "Be <b>kind</b> & \u00e4."},
    {"role": "user", "content": " Hello\n"},
    {"role": "assistant", "content": "Hi."},
]
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
HONEST = {
    "plain": (
        "{{ bos_token }}{% for message in messages %}\n  {% if message['role'] == 'user' %}\n"
        "[INST] {{ message.content | trim }} [/INST]\n  {%- else -%}\n{{ message.content }}"
        "{{ eos_token }}{% endif %}\n{% endfor %}{% if add_generation_prompt %}GO{% endif %}\n"
    ),
    "namespace and macro": (
        "{% set ns = namespace(n=0) %}{% macro turn(m) %}<|{{ m.role }}|>{{ m.content }}"
        "{% endmacro %}{%- for m in messages %}{% set ns.n = ns.n + 1 %}{{ turn(m) }}"
        "{%- if loop.last %}{{ ns.n }}{% endif %}{% endfor %}"
    ),
    "generation": (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
        "{% set x = 1 %}{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
    ),
    "json": "{{ messages | tojson }}{{ messages[0] | tojson(indent=2) }}{{ tools is none }}",
    "break": "{% for m in messages %}{% if loop.index == 2 %}{% break %}{% endif %}{{ m.role }}"
    "{% endfor %}",
    "reversed": "{% for m in messages[::-1] %}{{ loop.index0 }}{{ m.content[:2] }}{% endfor %}"
    "{{ documents is defined }}{{ missing is defined }}",
    "date": "{{ strftime_now('%Y') | length }}",
}
ENDLESS = {
    "loops in loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in "
    "range(99999) %}{% endfor %}{% endfor %}{% endfor %}",
    "one power": "{% set n = messages | length * 9 %}{{ (n ** (n ** n)) % 7 }}",
    "a constant power": "{{ (9 ** (9 ** 9)) % 7 }}",
    "macros": "{% macro f(n) %}{{ f(n) }}{{ f(n) }}{% endmacro %}{{ f(1) }}",
    "a text that doubles": "{% set ns = namespace(x='x') %}{% for i in range(99) %}"
    "{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x }}",
    "a long text": "{{ 'x' * 20000000 }}",
    "an immense text": "{{ 'x' * 9000000000 }}",
    "deep nesting": "{{ " + "(" * 90_000 + "1" + ")" * 90_000 + " }}",
}


def rendered(source: str, turns: Any = TURNS, **options: Any) -> str:
    return ChatTemplate(source, TOKENS, **options).render(turns, add_generation_prompt=True)


@pytest.mark.parametrize("name", HONEST)
def test_the_text_is_that_of_transformers(name: str) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    for asks in (True, False):
        (want,), _ = render_jinja_template(
            [TURNS], chat_template=HONEST[name], add_generation_prompt=asks, **TOKENS
        )
        template = ChatTemplate(HONEST[name], TOKENS)
        assert template.render(TURNS, add_generation_prompt=asks) == want


@pytest.mark.parametrize("name", ENDLESS)
def test_a_template_that_does_not_end_is_ended(name: str) -> None:
    with pytest.raises(InvalidModel, match="does not come to an end"):
        rendered(ENDLESS[name], cpu_seconds=1)


def test_each_chat_has_its_own_time_and_the_process_stays() -> None:
    source = "{% if messages[0].content == 'long' %}" + ENDLESS["loops in loops"] + "{% endif %}ok"
    template = ChatTemplate(source, TOKENS, cpu_seconds=1)
    turn = {"role": "user", "content": "short"}
    for _ in range(50):
        assert template.render([turn], add_generation_prompt=False) == "ok"
    with pytest.raises(InvalidModel):
        template.render([turn | {"content": "long"}], add_generation_prompt=False)
    assert template.render([turn], add_generation_prompt=False) == "ok"


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('no system here') }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{% for x in range(100001) %}{% endfor %}",
        "{% if %}",
    ],
)
def test_what_a_template_may_not_do_is_its_error(source: str) -> None:
    with pytest.raises(TemplateRefused):
        rendered(source)


def test_the_process_sees_nothing_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "canary")
    template = ChatTemplate("x", TOKENS)
    assert template.render(TURNS, add_generation_prompt=False) == "x"
    process = template._process
    assert process is not None
    assert b"canary" not in Path(f"/proc/{process.pid}/environ").read_bytes()
    del template
    assert process.poll() is not None  # it ends with its template


def folder_with(folder: Path, name: str, content: str) -> Path:
    (folder / name).write_text(content)
    return folder


def as_config(source: object) -> str:
    return json.dumps({"chat_template": source})


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("chat_template.jinja", ENDLESS["an immense text"]),
        ("chat_template.json", as_config(ENDLESS["an immense text"])),
        ("tokenizer_config.json", as_config(ENDLESS["an immense text"])),
        (
            "tokenizer_config.json",
            as_config([{"name": "default", "template": ENDLESS["an immense text"]}]),
        ),
        ("chat_template.jinja", " " * (MAX_TEMPLATE + 1)),
    ],
)
def test_a_folder_with_a_large_template_is_refused(tmp_path: Path, name: str, content: str) -> None:
    with pytest.raises(InvalidModel):
        check_template(folder_with(tmp_path, name, content), "it")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("chat_template.jinja", HONEST["plain"]),
        ("chat_template.jinja", "{{ raise_exception('a tool is missing') }}"),
        ("tokenizer_config.json", as_config([{"name": "tool_use", "template": "x"}])),
        ("tokenizer_config.json", "no JSON"),
        ("config.json", "{}"),
    ],
)
def test_any_other_folder_is_taken(tmp_path: Path, name: str, content: str) -> None:
    check_template(folder_with(tmp_path, name, content), "it")


@pytest.fixture
def tokenizer() -> Any:
    from transformers import PreTrainedTokenizerFast

    from oscar_zoo.models.loading import load_tokenizer

    found = load_tokenizer(str(EXAMPLE))
    assert isinstance(found, PreTrainedTokenizerFast)
    return found


def test_documents_are_encoded_with_the_bounded_template(tokenizer: Any) -> None:
    document = Document("Hello there", "line 1")
    tokenizer.chat_template = HONEST["plain"]
    want = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hello there"}], tokenize=False, add_generation_prompt=True
    )
    assert Encoder(tokenizer, True).encode(document, 99).text == want
    tokenizer.chat_template = ENDLESS["an immense text"]
    with pytest.raises(InvalidModel) as caught:
        Encoder(tokenizer, True).encode(document, 99)
    assert "--no-chat-template" in (caught.value.hint or "")
    tokenizer.chat_template = "{{ raise_exception('not so') }}"
    with pytest.raises(UsageError, match="refuses line 1: not so"):
        Encoder(tokenizer, True).encode(document, 99)


def test_no_server_is_started_with_an_endless_template(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = shutil.copytree(EXAMPLE, tmp_path / EXAMPLE.name)
    (model / "chat_template.jinja").write_text(ENDLESS["an immense text"])
    artifact = write_folder(tmp_path / "out", artifact_files())
    assert run(["serve", str(artifact), "--model", str(model), "--device", "cpu"]) == 1
    assert "does not come to an end" in capsys.readouterr().err
