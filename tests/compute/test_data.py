"""Any source becomes exact, repeatable token sequences; what is held out is apart from them."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_tokenizers import ChatLetters, Letters, spell, write

from oscar_zoo.compute.data import CalibrationData, load_calibration
from oscar_zoo.errors import PathNotFound, UsageError

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SEPARATOR = "<|endoftext|>"

texts = st.lists(
    st.text("abcdefghij ", min_size=1, max_size=30).filter(str.strip), min_size=1, max_size=12
)


def load(
    path: Path, tokens: int, seq_len: int, seed: int | None = None, heldout: int = 0
) -> CalibrationData:
    return load_calibration(
        path, Letters(), tokens=tokens, seq_len=seq_len, seed=seed, heldout_tokens=heldout
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("data")


def test_packing_is_the_stream_cut_at_the_budget(tmp_path: Path) -> None:
    data = load(write(tmp_path, "abc<|endoftext|>de<|endoftext|>fghij"), tokens=7, seq_len=3)
    assert data.sequences == ((97, 98, 99), (0, 100, 101), (0,))
    assert data.tokens_used == data.tokens_requested == 7


@settings(deadline=None, max_examples=40)
@given(budget=st.integers(1, 60), seq_len=st.integers(1, 20))
def test_any_budget_is_met_exactly_until_the_data_ends(
    folder: Path, budget: int, seq_len: int
) -> None:
    data = load(
        write(folder, "abcdefghij<|endoftext|>klmnopqrst<|endoftext|>uvwxyz"), budget, seq_len
    )
    stream = [token for sequence in data.sequences for token in sequence]
    whole = [ord(c) for c in "abcdefghij\0klmnopqrst\0uvwxyz\0"]
    assert stream == whole[:budget]
    assert {len(sequence) for sequence in data.sequences[:-1]} <= {seq_len}


def test_the_tokens_of_the_example_model_and_text_are_what_they_were() -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(EXAMPLES / "models/tiny-qwen3-hard")
    text = EXAMPLES / "text/calibration.txt"
    data = load_calibration(text, tokenizer, tokens=16384, seq_len=2048)
    assert data.prompts_sha256.startswith("1c4c6c0b")
    more = load_calibration(text, tokenizer, tokens=16384, seq_len=2048, heldout_tokens=16384)
    assert more.prompts_sha256 == data.prompts_sha256
    assert more.heldout is not None
    assert [len(sequence) for sequence in more.heldout.sequences] == [2048] * 8
    assert more.notes == ()


def test_facts_name_the_tokens(tmp_path: Path) -> None:
    data = load(write(tmp_path, "abcde"), tokens=100, seq_len=4)
    facts = data.facts()
    compact = b"[[97,98,99,100],[101,0]]"
    assert facts.prompts_sha256 == hashlib.sha256(compact).hexdigest()
    assert data.sequence_sha256 == tuple(
        hashlib.sha256(c).hexdigest() for c in (b"[97,98,99,100]", b"[101,0]")
    )
    assert (facts.tokens_requested, facts.tokens_used, facts.sequences) == (100, 6, 2)
    assert facts.length is not None
    assert (facts.length.min, facts.length.median, facts.length.max) == (2, 2, 4)
    assert (facts.dataset, facts.content, facts.chat_template, facts.seed) == (
        "data.txt",
        "prefill",
        False,
        None,
    )
    assert facts.revision is facts.split is facts.license is facts.disjoint_from is None
    assert facts.overlaps_with == ()


@settings(deadline=None, max_examples=30)
@given(documents=texts, seed=st.integers(0, 2**40))
def test_one_seed_is_one_order_of_the_same_documents(
    folder: Path, documents: list[str], seed: int
) -> None:
    path = write(folder, SEPARATOR.join(documents))
    first, again, plain = (
        load(path, 10_000, 8, seed),
        load(path, 10_000, 8, seed),
        load(path, 10_000, 8),
    )
    assert first == again
    assert first.facts().seed == seed
    joined = ["".join(map(spell, data.sequences)) for data in (first, plain)]
    assert sorted(joined[0].split("|")) == sorted(joined[1].split("|"))


def test_two_seeds_are_two_orders(tmp_path: Path) -> None:
    path = write(tmp_path, SEPARATOR.join("abcdefghijklmnop"))
    hashes = {load(path, 32, 8, seed).prompts_sha256 for seed in (None, 1, 2)}
    assert len(hashes) == 3


@settings(deadline=None, max_examples=40)
@given(
    text=st.text("abcd", min_size=2, max_size=40), at=st.integers(0, 39), seq_len=st.integers(1, 9)
)
def test_the_hash_changes_with_any_token(folder: Path, text: str, at: int, seq_len: int) -> None:
    at %= len(text)
    other = text[:at] + "e" + text[at + 1 :]
    before, after = (load(write(folder, t), 100, seq_len) for t in (text, other))
    assert before.prompts_sha256 != after.prompts_sha256
    differing = [a != b for a, b in zip(before.sequence_sha256, after.sequence_sha256, strict=True)]
    assert differing.index(True) == at // seq_len
    assert sum(differing) == 1


def test_the_hash_changes_with_the_division_into_sequences(tmp_path: Path) -> None:
    path = write(tmp_path, "abcdefgh")
    assert load(path, 8, 4).prompts_sha256 != load(path, 8, 8).prompts_sha256


def test_every_sequence_starts_as_the_tokenizer_starts_text(tmp_path: Path) -> None:
    path = write(tmp_path, "abcdefg")
    data = load_calibration(path, Letters(prefix=(1, 2), eos=None), tokens=8, seq_len=4)
    assert data.sequences == ((1, 2, 97, 98), (1, 2, 99, 100))
    held = load_calibration(
        path, Letters(prefix=(1, 2), eos=None), tokens=4, seq_len=4, heldout_tokens=32
    ).heldout
    assert held is not None
    assert [spell(sequence[2:]) for sequence in held.sequences] == ["c", "d", "e", "f", "g"]
    assert {sequence[:2] for sequence in held.sequences} == {(1, 2)}


def test_a_huge_document_is_tokenized_only_as_far_as_needed(tmp_path: Path) -> None:
    seen = []

    class Counting(Letters):
        def __call__(self, text: str, *, add_special_tokens: bool, verbose: bool):  # type: ignore[no-untyped-def]
            seen.append(len(text))
            return super().__call__(text, add_special_tokens=add_special_tokens, verbose=verbose)

    path = write(tmp_path, " ".join(map(str, range(500_000))))
    data = load_calibration(path, Counting(), tokens=1000, seq_len=100, heldout_tokens=4096)
    assert sum(seen) < (1 << 20) + 100 < path.stat().st_size
    assert data.heldout is not None
    assert (data.heldout.tokens, data.tokens_used) == (4100, 1000)


def test_whole_later_documents_are_held_out(tmp_path: Path) -> None:
    path = write(tmp_path, SEPARATOR.join(["a" * 9, "b" * 9, "c" * 9, "d" * 9, "e" * 9]))
    data = load(path, tokens=12, seq_len=6, heldout=16)
    assert [spell(s) for s in data.sequences] == ["aaaaaa", "aaa|bb"]
    assert data.heldout is not None
    held = [spell(sequence) for sequence in data.heldout.sequences]
    assert held == ["cc", "cc", "cc", "cc", "c|", "dd", "dd", "dd"]
    assert data.heldout.tokens == 16
    compact = json.dumps(
        [list(sequence) for sequence in data.heldout.sequences], separators=(",", ":")
    )
    assert data.heldout.prompts_sha256 == hashlib.sha256(compact.encode()).hexdigest()


@settings(deadline=None, max_examples=80)
@given(
    documents=texts,
    tokens=st.integers(1, 200),
    seq_len=st.integers(1, 20),
    heldout=st.integers(1, 120),
)
def test_what_is_held_out_is_apart_and_changes_no_more_than_it_must(
    folder: Path, documents: list[str], tokens: int, seq_len: int, heldout: int
) -> None:
    path = write(folder, SEPARATOR.join(documents))
    plain, data = load(path, tokens, seq_len), load(path, tokens, seq_len, heldout=heldout)
    total = load(path, 10_000, seq_len).tokens_used
    stream = [token for sequence in plain.sequences for token in sequence]
    kept = [token for sequence in data.sequences for token in sequence]
    assert kept == stream[: len(kept)]
    if data.heldout is None:
        assert data.sequences == plain.sequences
        return
    given_up = len(stream) - len(kept)
    assert given_up <= max(0, 5 * (total // 4) // 4 + 1)
    assert len({len(sequence) for sequence in data.heldout.sequences}) == 1
    assert data.heldout.tokens + len(kept) <= total
    assert not set(data.heldout.sequences) & set(data.sequences)
    if data.sequences == plain.sequences:
        assert not any("held out instead" in note for note in data.notes)


def test_calibration_is_the_same_whatever_is_held_out_while_the_data_suffice(
    tmp_path: Path,
) -> None:
    path = write(tmp_path, SEPARATOR.join(f"document {n} " * 20 for n in range(100)))
    hashes = {load(path, 5000, 100, 7, heldout).prompts_sha256 for heldout in (0, 8, 4096, 10_000)}
    assert len(hashes) == 1


@pytest.mark.parametrize(
    ("lengths", "tokens", "heldout"), [((100, 200), 110, 80), ((150, 60), 100, 110)]
)
def test_a_document_is_divided_when_whole_ones_do_not_suffice(
    tmp_path: Path, lengths: tuple[int, ...], tokens: int, heldout: int
) -> None:
    letters = "".join(chr(200 + n) for n in range(300))
    path = write(tmp_path, f"{letters[: lengths[0] - 1]}{SEPARATOR}{letters[-lengths[1] + 1 :]}")
    stream = load(path, 1000, 1000).sequences[0]
    data = load(path, tokens, 10, heldout=heldout)
    assert sum(data.sequences, ()) == stream[:tokens]
    assert data.heldout is not None
    assert sum(data.heldout.sequences, ()) == stream[tokens : tokens + heldout]


def test_data_that_end_early_are_shared_at_a_document_when_one_is_near(tmp_path: Path) -> None:
    path = write(tmp_path, SEPARATOR.join(f"{n:02}" + f" {n}" * 32 + " " for n in range(10, 100)))
    data = load(path, tokens=20_000, seq_len=64, heldout=4096)
    assert data.heldout is not None
    assert data.tokens_used % 100 == 0
    assert spell(data.heldout.sequences[0]).startswith(f"{data.tokens_used // 100 + 10} ")
    assert 9_000 // 4 - 64 <= data.heldout.tokens <= 9_000 // 3
    early, rough = data.notes
    assert "held out instead of calibrated on" in early
    assert f"only {data.heldout.tokens:,} tokens" in rough


def test_documents_that_come_again_are_not_held_out(tmp_path: Path) -> None:
    once = [f"{n:03}{'y' * 60}" for n in range(10)]
    path = write(
        tmp_path, SEPARATOR.join([*once, *once, *once, *(f"new{n}{'z' * 60}" for n in range(10))])
    )
    data = load(path, tokens=640, seq_len=64, heldout=320)
    assert data.heldout is not None
    assert spell(data.heldout.sequences[0]).startswith("new0")
    repeated = load(
        write(tmp_path, SEPARATOR.join(once[:1] * 30)), tokens=640, seq_len=64, heldout=320
    )
    assert repeated.heldout is None
    assert repeated.notes == (
        "the data has no text left to hold out, so nothing can be measured on it.",
    )
    assert repeated.tokens_used == 640


CHATS = [
    {"messages": [{"role": "user", "content": "hi"}]},
    {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "r"}]},
]


def jsonl(folder: Path, *records: object, name: str = "chats.jsonl") -> Path:
    return write(folder, "\n".join(json.dumps(record) for record in records), name)


def stream_of(
    path: Path, tokenizer: Letters, chat_template: bool | None = None
) -> tuple[str, CalibrationData]:
    data = load_calibration(path, tokenizer, tokens=1000, seq_len=1000, chat_template=chat_template)
    return "".join(spell(sequence) for sequence in data.sequences), data


def test_chats_go_through_the_template_and_end_once(tmp_path: Path) -> None:
    text, data = stream_of(jsonl(tmp_path, *CHATS), ChatLetters(end="\0\n"))
    assert text == "<u>hi<a>|<u>q<a>r|\n"
    assert (data.chat_template, data.content) == (True, "mixed")


def test_prompts_are_chats_of_one_message(tmp_path: Path) -> None:
    text, data = stream_of(
        jsonl(tmp_path, {"prompt": "hi"}, {"prompt": CHATS[0]["messages"]}), ChatLetters()
    )
    assert text == "<u>hi<a>|<u>hi<a>|"
    assert (data.facts().chat_template, data.content) == (True, "prefill")


def test_the_template_can_be_turned_off_and_on(tmp_path: Path) -> None:
    text, data = stream_of(jsonl(tmp_path, *CHATS), Letters(), chat_template=False)
    assert text == "hi|q\n\nr|"
    assert (data.chat_template, data.content) == (False, "mixed")
    text, data = stream_of(write(tmp_path, "a<|endoftext|>b"), ChatLetters(), chat_template=True)
    assert text == "<u>a<a>|<u>b<a>|"
    assert data.chat_template


def test_a_template_that_begins_the_text_does_not_begin_it_twice(tmp_path: Path) -> None:
    tokenizer = ChatLetters(prefix=(1,), start="\1")
    data = load_calibration(jsonl(tmp_path, *CHATS), tokenizer, tokens=100, seq_len=8)
    assert [sequence.count(1) for sequence in data.sequences] == [1] * len(data.sequences)
    assert data.sequences[0] == (1, *map(ord, "<u>hi<a"))


def test_a_tokenizer_without_a_template_is_named_with_the_line(tmp_path: Path) -> None:
    path = jsonl(tmp_path, *CHATS)
    with pytest.raises(
        UsageError, match=r"line 1 of .*chats\.jsonl is a chat, .* has no chat template"
    ) as caught:
        stream_of(path, Letters())
    assert "--no-chat-template" in str(caught.value.hint)


def test_a_chat_the_template_refuses_is_named_with_the_line(tmp_path: Path) -> None:
    path = jsonl(tmp_path, CHATS[0], {"messages": [{"role": "system", "content": "s"}]})
    with pytest.raises(
        UsageError, match=r"refuses line 2 of .*chats\.jsonl: no system turns here\.$"
    ):
        stream_of(path, ChatLetters())


def test_the_example_model_renders_chats() -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(EXAMPLES / "models/tiny-qwen3-hard")
    path = jsonl(Path.cwd(), *CHATS)
    data = load_calibration(path, tokenizer, tokens=100, seq_len=100)
    assert tokenizer.decode(data.sequences[0]) == "hi<|endoftext|>qr<|endoftext|>"
    assert data.chat_template


@pytest.mark.parametrize("content", ["", "  \n\n", "<|endoftext|>\n<|endoftext|>"])
@pytest.mark.parametrize("name", ["data.txt", "data.jsonl"])
def test_no_text_is_an_error(tmp_path: Path, content: str, name: str) -> None:
    if "end" in content and "jsonl" in name:
        content = '{"text": " "}'
    with pytest.raises(UsageError, match="has no text"):
        load(write(tmp_path, content, name), 10, 4)


@pytest.mark.parametrize(("tokens", "seq_len"), [(0, 4), (-5, 4), (10, 0)])
def test_counts_must_be_positive(tmp_path: Path, tokens: int, seq_len: int) -> None:
    with pytest.raises(UsageError, match="above 0"):
        load(write(tmp_path, "abc"), tokens, seq_len)


def test_sequences_must_fit_the_model(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="sequences of 9 tokens are longer than the model's 8"):
        load_calibration(write(tmp_path, "abc"), Letters(), tokens=10, seq_len=9, context=8)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(PathNotFound, match=r"nothing\.txt"):
        load(tmp_path / "nothing.txt", 10, 4)
