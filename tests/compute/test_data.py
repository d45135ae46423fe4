"""Calibration files become exact, repeatable token sequences."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oscar_zoo.compute.data import CalibrationData, load_calibration, read_documents
from oscar_zoo.errors import PathNotFound, UsageError


class Letters:
    """One token per character; end of text is 0."""

    def __init__(self, prefix: tuple[int, ...] = (), eos: int | None = 0) -> None:
        self.prefix = list(prefix)
        self.eos_token_id = eos

    def __call__(self, text: str, *, add_special_tokens: bool, verbose: bool) -> Mapping[str, list[int]]:
        return {"input_ids": (self.prefix if add_special_tokens else []) + [ord(c) for c in text]}


def write(folder: Path, content: str | bytes, name: str = "data.txt") -> Path:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def load(path: Path, tokens: int, seq_len: int, seed: int | None = None) -> CalibrationData:
    return load_calibration(path, Letters(), tokens=tokens, seq_len=seq_len, seed=seed)


def test_documents_are_separated_and_trimmed(tmp_path: Path) -> None:
    path = write(tmp_path, "one\ntwo\n<|endoftext|>\n\n<|endoftext|>three<|endoftext|>four\r\nfive\n")
    assert list(read_documents(path)) == ["one\ntwo", "three", "four\nfive"]


def test_jsonl_takes_the_text_field(tmp_path: Path) -> None:
    lines = [json.dumps({"text": "a <|endoftext|> b", "id": 1}), "", json.dumps({"text": "ü"})]
    path = write(tmp_path, "\n".join(lines), "data.jsonl")
    assert list(read_documents(path)) == ["a <|endoftext|> b", "ü"]


def test_packing_is_the_stream_cut_at_the_budget(tmp_path: Path) -> None:
    data = load(write(tmp_path, "abc<|endoftext|>de<|endoftext|>fghij"), tokens=7, seq_len=3)
    assert data.sequences == ((97, 98, 99), (0, 100, 101), (0,))
    assert data.tokens_used == data.tokens_requested == 7


@settings(deadline=None, max_examples=40)
@given(budget=st.integers(1, 60), seq_len=st.integers(1, 20))
def test_any_budget_is_met_exactly_until_the_data_ends(
    tmp_path_factory: pytest.TempPathFactory, budget: int, seq_len: int
) -> None:
    path = tmp_path_factory.mktemp("data") / "data.txt"
    path.write_text("abcdefghij<|endoftext|>klmnopqrst<|endoftext|>uvwxyz")
    data = load(path, budget, seq_len)
    stream = [token for sequence in data.sequences for token in sequence]
    whole = [ord(c) for c in "abcdefghij\0klmnopqrst\0uvwxyz\0"]
    assert stream == whole[:budget]
    assert {len(sequence) for sequence in data.sequences[:-1]} <= {seq_len}


def test_facts_name_the_tokens(tmp_path: Path) -> None:
    data = load(write(tmp_path, "abcde"), tokens=100, seq_len=4)
    facts = data.facts()
    compact = b"[[97,98,99,100],[101,0]]"
    assert facts.prompts_sha256 == hashlib.sha256(compact).hexdigest()
    assert (facts.tokens_requested, facts.tokens_used, facts.sequences) == (100, 6, 2)
    assert facts.length is not None
    assert (facts.length.min, facts.length.median, facts.length.max) == (2, 2, 4)
    assert (facts.dataset, facts.content, facts.chat_template) == ("data.txt", "prefill", False)
    assert facts.disjoint_from is None
    assert facts.overlaps_with == ()


def test_a_seed_shuffles_documents_repeatably(tmp_path: Path) -> None:
    path = write(tmp_path, "<|endoftext|>".join("abcdefghijklmnop"))
    first, again, plain = load(path, 32, 8, seed=1), load(path, 32, 8, seed=1), load(path, 32, 8)
    assert first.sequences == again.sequences
    assert first.prompts_sha256 != plain.prompts_sha256
    assert sorted(sum(first.sequences, ())) == sorted(sum(plain.sequences, ()))


def test_every_sequence_starts_as_the_tokenizer_starts_text(tmp_path: Path) -> None:
    path = write(tmp_path, "abcdefg")
    data = load_calibration(path, Letters(prefix=(1, 2), eos=None), tokens=8, seq_len=4)
    assert data.sequences == ((1, 2, 97, 98), (1, 2, 99, 100))


@pytest.mark.parametrize("content", ["", "  \n\n", "<|endoftext|>\n<|endoftext|>"])
def test_no_text_is_an_error(tmp_path: Path, content: str) -> None:
    with pytest.raises(UsageError, match="has no text"):
        load(write(tmp_path, content), 10, 4)


@pytest.mark.parametrize("content", [b"PK\x03\x04\x00\x00", b"text \xff\xfe text", b"\x80\x02}q\x00"])
def test_binary_data_is_an_error(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(UsageError, match="is not UTF-8 text"):
        load(write(tmp_path, content), 10, 4)


@pytest.mark.parametrize("line", ["plain text", "[1]", '{"texts": "a"}', '{"text": 3}', "[" * 100_000])
def test_a_bad_line_of_jsonl_is_named(tmp_path: Path, line: str) -> None:
    with pytest.raises(UsageError, match="line 2 of"):
        load(write(tmp_path, f'{{"text": "a"}}\n{line}\n', "data.jsonl"), 100, 4)


@pytest.mark.parametrize(("tokens", "seq_len"), [(0, 4), (-5, 4), (10, 0)])
def test_counts_must_be_positive(tmp_path: Path, tokens: int, seq_len: int) -> None:
    with pytest.raises(UsageError, match="above 0"):
        load(write(tmp_path, "abc"), tokens, seq_len)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(PathNotFound, match=r"nothing\.txt"):
        load(tmp_path / "nothing.txt", 10, 4)
