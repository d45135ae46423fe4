"""Files, folders, names and datasets become documents; what is wrong is named with its place."""

import json
import re
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from plain_tokenizers import ChatLetters, spell, write

from oscar_zoo import errors
from oscar_zoo.compute.data.calibration import (
    CalibrationData,
    check_source,
    load_calibration,
    open_source,
)
from oscar_zoo.compute.data.documents import SEPARATOR, read_file
from oscar_zoo.compute.data.hf_datasets import DatasetName
from oscar_zoo.evaluate import shared
from oscar_zoo.next_step import Install

MIXED = {"prose", "code", "dialogue", "tools", "languages", "mathematics", "agent"}


def texts(source: Path | str) -> list[str]:
    return [document.text for document in open_source(source).documents]


def load(source: Path | str, **options: Any) -> CalibrationData:
    return load_calibration(source, ChatLetters(), **{"tokens": 1000, "seq_len": 1000} | options)


def stream(data: CalibrationData) -> str:
    return "".join(spell(sequence) for sequence in data.sequences)


def refusal(
    source: Path | str, kind: type[errors.OscarZooError] = errors.UsageError
) -> errors.OscarZooError:
    with pytest.raises(kind) as caught:
        texts(source)
    assert "\n" not in caught.value.message
    assert caught.value.hint
    return caught.value


def test_documents_are_separated_and_trimmed(tmp_path: Path) -> None:
    content = "one\ntwo\n<|endoftext|>\n\n<|endoftext|>three<|endoftext|>four\r\nfive\n"
    path = write(tmp_path, content)
    assert texts(path) == ["one\ntwo", "three", "four\nfive"]
    assert [d.where for d in read_file(path)] == [f"line {n} of {path}" for n in (1, 5, 5)]


def test_jsonl_takes_the_text_field(tmp_path: Path) -> None:
    lines = [json.dumps({"text": "a <|endoftext|> b", "id": 1}), "", json.dumps({"text": "ü"})]
    assert texts(write(tmp_path, "\n".join(lines), "data.jsonl")) == ["a <|endoftext|> b", "ü"]
    assert texts(write(tmp_path, "\ufeff" + lines[2], "bom.json")) == ["ü"]


def test_another_field_of_a_file_can_be_named(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        '{"question": "q"}\n{"question": [{"role": "user", "content": "c"}]}',
        "data.jsonl",
    )
    assert stream(load(f"{path}#question")) == "q|<u>c<a>|"
    assert 'no "text", "messages" or "prompt", only "question"' in refusal(path).message
    assert 'no "answer", only "question"' in refusal(f"{path}#answer").message


@pytest.mark.parametrize(
    "content", [b"PK\x03\x04\x00\x00", b"text \xff\xfe text", b"\x80\x02}q\x00", b"cut \xe2\x82"]
)
@pytest.mark.parametrize("name", ["data.txt", "data.jsonl"])
def test_binary_data_is_named_with_its_line(tmp_path: Path, content: bytes, name: str) -> None:
    message = refusal(write(tmp_path, b'{"text": "good"}\n' * 2 + content, name)).message
    assert message.startswith(f"line 3 of {tmp_path / name} is not UTF-8 text (")


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("plain text", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("1" * 5000, "is not JSON"),
        ("[1]", "is not a JSON object"),
        ('{"texts": "a"}', 'has no "text", only "texts"'),
        ("{}", 'has no "text", only nothing'),
        ('{"text": 3}', "is not a string"),
        ('{"text": [{"role": "user", "content": "a"}]}', "is not a string"),
        ('{"text": "half \\ud83d"}', "half a surrogate pair at character 5"),
        ('{"prompt": "p"}', 'has no "text", only "prompt"'),
    ],
)
def test_a_bad_line_of_jsonl_is_named(tmp_path: Path, line: str, why: str) -> None:
    message = refusal(write(tmp_path, f'{{"text": "a"}}\n{line}\n', "data.jsonl")).message
    assert "line 2 of" in message
    assert why in message


def test_a_folder_is_its_files_in_order(tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    for name, content in {
        "b.txt": "b",
        "a/z.jsonl": '{"text": "az"}',
        "a.txt": "a",
        "c.jsonl": '{"prompt": "c"}',
        "read.me": "no",
        ".hidden/x.txt": "no",
    }.items():
        write(folder, content, name)
    data = load(str(folder))
    assert stream(data) == "az|a|b|<u>c<a>|"
    assert (data.source, data.chat_template) == ("texts", True)
    check_source(folder)


@pytest.mark.parametrize("call", [open_source, check_source])
@pytest.mark.parametrize(
    "name", ["manual", "prompts.jsonl", "data/prompts.jsonl", "./x/y", "/no/where", "a/b/c", "::"]
)
def test_what_is_no_path_and_no_name_is_refused(name: str, call: Callable[[str], object]) -> None:
    write(Path("data"), "x")
    with pytest.raises((errors.PathNotFound, errors.UsageError)) as caught:
        call(name)
    assert name in caught.value.message


def test_a_path_wins_over_a_name(tmp_path: Path) -> None:
    write(Path.cwd(), "own", "manuals")
    write(Path.cwd() / "org" / "name", "mine", "a.txt")
    assert texts("manuals") == ["own"]
    assert texts("org/name") == ["mine"]


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("o/n", DatasetName("o/n")),
        ("o/n@main:cfg:test#q", DatasetName("o/n", "main", "cfg", "test", "q")),
        ("o/n:cfg", DatasetName("o/n", config="cfg")),
        ("o/n:validation", DatasetName("o/n", split="validation")),
        ("o/n:train_sft#messages", DatasetName("o/n", split="train_sft", field="messages")),
        ("o/n::odd", DatasetName("o/n", split="odd")),
        ("./folder:sample-10BT", DatasetName("./folder", config="sample-10BT")),
    ],
)
def test_names_of_datasets(text: str, name: DatasetName) -> None:
    assert DatasetName.parse(text) == name
    assert DatasetName.parse(str(name)) == name


@pytest.mark.parametrize("text", ["o/n:a:b:c", "o/n@", "o/n#", "@x", "o/n:c:train[:9]"])
def test_what_is_no_name_of_a_dataset(text: str) -> None:
    with pytest.raises(errors.UsageError, match="is not the name of a dataset"):
        DatasetName.parse(text)


@pytest.mark.parametrize("source", ["org/name", "gpqa_diamond", "wikitext", "mmlu"])
@pytest.mark.parametrize("call", [check_source, texts])
def test_without_the_library_there_is_another_way(
    source: str, call: Callable[[str], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HOME", str(Path.cwd()))
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(errors.MissingDependency) as caught:
        call(source)
    hint = str(caught.value.hint)
    assert "--calib-data FILE" in hint and str(Install("datasets")) in hint


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The library, offline since `conftest` told it so before it was first imported."""
    return pytest.importorskip("datasets", reason="datasets is not installed")


def table(folder: Path, name: str = "train-00000-of-00001.parquet", **columns: list[Any]) -> Path:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    folder.mkdir(parents=True, exist_ok=True)
    parquet.write_table(arrow.table(columns), folder / name)
    return folder


@pytest.mark.usefixtures("library")
def test_a_folder_of_a_dataset(tmp_path: Path) -> None:
    chats = [
        [{"role": "user", "content": f"q{n}"}, {"role": "assistant", "content": "a"}]
        for n in range(3)
    ]
    folder = table(tmp_path / "set", text=["one", " ", "two"], messages=chats)
    check_source(folder)
    data = load(folder)
    assert (stream(data), data.source, data.split) == ("one|two|", "set", "train")
    assert data.revision is None
    data = load(f"{folder}#messages", chat_template=False)
    assert (stream(data), data.content) == ("q0\n\na|q1\n\na|q2\n\na|", "mixed")
    assert sorted(stream(load(folder, seed=5)).split("|")) == ["", "one", "two"]
    assert stream(load(folder / "train-00000-of-00001.parquet")) == "one|two|"


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize(
    ("part", "why"),
    [
        ("::test", "Available splits: ['train']"),
        (":small", "'small' not found"),
        ("#question", "row 1"),
    ],
)
def test_parts_a_dataset_does_not_have(tmp_path: Path, part: str, why: str) -> None:
    assert why in refusal(f"{table(tmp_path / 'set', text=['one'])}{part}").message


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("source", ["org/name", "gpqa_diamond", "wikitext", "mmlu"])
def test_offline_there_is_another_way(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(Path.cwd()))
    error = refusal(source, errors.NetworkError)
    assert error.code == "network.offline"
    assert "--calib-data FILE" in str(error.hint)


def test_a_kind_of_a_record_is_kept(tmp_path: Path) -> None:
    lines = ['{"text": "a"}', '{"text": "b", "kind": "code"}', '{"text": "c", "kind": 3}']
    read = list(read_file(write(tmp_path, "\n".join(lines), "data.jsonl")))
    assert [one.kind for one in read] == [None, "code", None]


def test_the_shipped_mix_has_every_kind_in_each_beginning_and_shares_no_document() -> None:
    parts = {}
    for split, tokens in (("calibration", 48_000), ("validation", 24_000)):
        path = shared.text_path("mix", split)  # type: ignore[arg-type]
        assert 150_000 < path.stat().st_size < 400_000
        parts[split] = list(read_file(path))
        kinds, read = Counter[str | None](), 0
        for one in parts[split]:
            assert len(one.text.encode()) <= 8000
            kinds[one.kind] += len(one.text)
            if (read := read + len(one.text)) > tokens:
                break
        assert set(kinds) == MIXED
        assert max(kinds.values()) < read / 3 and min(kinds.values()) > read / 40
        assert shared.read_text("mix", split).count(SEPARATOR) == len(parts[split]) - 1  # type: ignore[arg-type]
    first, second = ({one.text for one in part} for part in parts.values())
    assert len(first) == len(parts["calibration"]) and not first & second


def test_tokens_of_each_kind_are_told() -> None:
    data = load_calibration(
        "mix", ChatLetters(), tokens=49_152, seq_len=4096, heldout_tokens=24_576
    )
    (note,) = data.notes
    told = re.findall(r"([a-z]+) ([\d,]+) and ([\d,]+)", note)
    used, held = (sum(int(row[at].replace(",", "")) for row in told) for at in (1, 2))
    assert {row[0] for row in told} == MIXED
    assert data.heldout is not None
    assert (used, held) == (data.tokens_used, data.heldout.tokens)
    assert all(row[2] != "0" for row in told)
    assert load_calibration("manuals", ChatLetters(), tokens=4096, seq_len=4096).notes == ()
