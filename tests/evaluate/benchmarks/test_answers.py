"""Kept answers: what survives a killed process, and what is refused."""

import gzip
import json
import subprocess
from pathlib import Path

import pytest

from oscar_zoo.errors import StorageError, UsageError
from oscar_zoo.evaluate.benchmarks.answers import (
    Answer,
    Key,
    open_answers,
    request_key,
    responses_bytes,
)

SETTINGS = {"task": "sample", "model": "tiny"}


def key(number: int) -> Key:
    return Key("int2", 0, request_key({"question": number}))


def answer(number: int) -> Answer:
    return Answer(f"answer {number}: \u2028 ü", "stop", 10 + number, number)


def filled(path: Path, number: int = 5) -> Path:
    with open_answers(path, SETTINGS) as answers:
        for at in range(number):
            answers.keep(key(at), answer(at))
    return path


def test_answers_are_there_again(tmp_path: Path) -> None:
    path = filled(tmp_path / "new" / "a.jsonl.gz")
    with open_answers(path, SETTINGS) as answers:
        assert [answers.get(key(at)) for at in range(6)] == [*map(answer, range(5)), None]
    lines = subprocess.run(["zcat", path], capture_output=True, check=True).stdout.splitlines()
    assert json.loads(lines[2])["answer"]["text"] == answer(1).text


@pytest.mark.parametrize("missing", [1, 20, 60])
def test_what_a_killed_process_began_is_cut_off(missing: int, tmp_path: Path) -> None:
    path = filled(tmp_path / "a.jsonl.gz")
    path.write_bytes(path.read_bytes()[:-missing])
    with open_answers(path, SETTINGS) as answers:
        assert answers.get(key(3)) == answer(3) and answers.get(key(4)) is None
        answers.keep(key(4), answer(4))
    with open_answers(path, SETTINGS) as answers:
        assert [answers.get(key(at)) for at in range(5)] == [*map(answer, range(5))]


@pytest.mark.parametrize("whole", [False, True], ids=["a bit", "a line that is compressed again"])
def test_damage_is_an_error(whole: bool, tmp_path: Path) -> None:
    path = filled(tmp_path / "a.jsonl.gz")
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x10
    if whole:
        lines = gzip.decompress(path.read_bytes()).replace(b"answer 2", b"answer 9").split(b"\n")
        data = bytearray(b"".join(gzip.compress(line + b"\n") for line in lines if line))
    path.write_bytes(data)
    with pytest.raises(StorageError, match="is damaged at byte"), open_answers(path, SETTINGS):
        pass


def test_only_one_command_asks_and_an_answer_after_its_end_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    with open_answers(path, SETTINGS) as answers:
        with pytest.raises(UsageError, match="another command"), open_answers(path, SETTINGS):
            pass
    answers.keep(key(1), answer(1))
    with open_answers(path, SETTINGS) as again:
        assert again.get(key(1)) is None


def test_answers_of_other_settings_are_refused_or_dropped(tmp_path: Path) -> None:
    path = filled(tmp_path / "a.jsonl.gz")
    other = {**SETTINGS, "model": "other"}
    with pytest.raises(UsageError, match="other settings"), open_answers(path, other):
        pass
    with open_answers(path, other, fresh=True) as answers:
        assert answers.get(key(0)) is None


def test_the_same_answers_have_the_same_bytes() -> None:
    kept = [(key(at), answer(at)) for at in range(3)]
    lines = [json.loads(line) for line in gzip.decompress(responses_bytes(kept)).splitlines()]
    assert [line["answer"]["text"] for line in lines] == [answer(at).text for at in range(3)]
    assert responses_bytes(kept) == responses_bytes(list(kept)) != responses_bytes(kept[::-1])
