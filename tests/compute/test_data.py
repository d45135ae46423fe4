"""Any source becomes exact, repeatable token sequences; what is held out is apart from them."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_tokenizers import ChatLetters, Letters, spell, write

from oscar_zoo.compute.data.calibration import CalibrationData, load_calibration
from oscar_zoo.compute.data.overlap import (
    check_overlap,
    evaluation_set,
    measure_overlap,
    sets_on_this_machine,
)
from oscar_zoo.errors import UsageError

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
    facts = load(write(tmp_path, "abcde"), tokens=100, seq_len=4).facts()
    assert facts.prompts_sha256 == hashlib.sha256(b"[[97,98,99,100],[101,0]]").hexdigest()
    assert facts.model_dump(exclude={"prompts_sha256"}, exclude_none=True) == {
        "dataset": "data.txt",
        "sequences": 2,
        "tokens_requested": 100,
        "tokens_used": 6,
        "length": {"min": 2, "median": 2, "max": 4},
        "content": "prefill",
        "chat_template": False,
        "overlaps_with": (),
    }


@settings(deadline=None, max_examples=30)
@given(documents=texts, seed=st.integers(0, 2**40))
def test_one_seed_is_one_order_of_documents(folder: Path, documents: list[str], seed: int) -> None:
    path = write(folder, SEPARATOR.join(documents))
    first, plain = load(path, 10_000, 8, seed), load(path, 10_000, 8)
    assert first == load(path, 10_000, 8, seed) and first.facts().seed == seed
    joined = ["".join(map(spell, data.sequences)) for data in (first, plain)]
    assert sorted(joined[0].split("|")) == sorted(joined[1].split("|"))


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


def test_whole_later_documents_are_held_out(tmp_path: Path) -> None:
    path = write(tmp_path, SEPARATOR.join(["a" * 9, "b" * 9, "c" * 9, "d" * 9, "e" * 9]))
    data = load(path, tokens=12, seq_len=6, heldout=16)
    assert [spell(s) for s in data.sequences] == ["aaaaaa", "aaa|bb"]
    assert data.heldout is not None
    held = [spell(sequence) for sequence in data.heldout.sequences]
    assert held == ["cc", "cc", "cc", "cc", "c|", "dd", "dd", "dd"]
    assert data.heldout.tokens == 16
    compact = json.dumps(data.heldout.sequences, separators=(",", ":"))
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
    new = [f"new{n}{'z' * 60}" for n in range(10)]
    path = write(tmp_path, SEPARATOR.join([*once, *once, *once, *new]))
    data = load(path, tokens=640, seq_len=64, heldout=320)
    assert data.heldout is not None
    assert spell(data.heldout.sequences[0]).startswith("new0")
    path = write(tmp_path, SEPARATOR.join(once[:1] * 30))
    repeated = load(path, tokens=640, seq_len=64, heldout=320)
    assert repeated.heldout is None and "nothing can be measured" in repeated.notes[0]
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


def test_the_template_can_be_turned_off_and_on(tmp_path: Path) -> None:
    text, data = stream_of(jsonl(tmp_path, *CHATS), Letters(), chat_template=False)
    assert text == "hi|q\n\nr|"
    assert (data.chat_template, data.content) == (False, "mixed")
    text, data = stream_of(write(tmp_path, "a<|endoftext|>b"), ChatLetters(), chat_template=True)
    assert text == "<u>a<a>|<u>b<a>|"
    assert data.chat_template


def test_a_chat_the_template_refuses_is_named_with_the_line(tmp_path: Path) -> None:
    path = jsonl(tmp_path, CHATS[0], {"messages": [{"role": "system", "content": "s"}]})
    with pytest.raises(
        UsageError, match=r"refuses line 2 of .*chats\.jsonl: no system turns here\."
    ):
        stream_of(path, ChatLetters())


@pytest.mark.parametrize("content", ["", "  \n\n", "<|endoftext|>\n<|endoftext|>"])
@pytest.mark.parametrize("name", ["data.txt", "data.jsonl"])
def test_no_text_is_an_error(tmp_path: Path, content: str, name: str) -> None:
    if "end" in content and "jsonl" in name:
        content = '{"text": " "}'
    with pytest.raises(UsageError, match="has no text"):
        load(write(tmp_path, content, name), 10, 4)


QUESTION = (
    "A train leaves the station at noon; its speed, 80 km/h, is constant. When does it arrive 200"
    " km away?"
)
SHORT = "Name the seven colours of rainbows."
TRIVIAL = "What is 2 + 2?"
OTHER = (
    "The quick brown fox jumps over the lazy dog while seventeen owls watch from their branches in"
    " the old oak."
)


@pytest.fixture(autouse=True)
def empty_hub_cache(own_state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever runs the tests may have evaluation sets in theirs."""
    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HF_HOME", str(own_state / "hf"))


def data(*texts: str, overlaps_with: Sequence[str] = ()) -> CalibrationData:
    return CalibrationData(((1,),), 1, "text.txt", texts=texts, overlaps_with=tuple(overlaps_with))


def found(text: str, *items: str) -> tuple[int, int, int]:
    compared, some, whole = measure_overlap([text], items)
    return compared, len(some), len(whole)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (OTHER, (1, 0, 0)),
        (f"{OTHER} {QUESTION} {OTHER}", (1, 1, 1)),
        (QUESTION.upper().replace(" ", "\n\t").replace(";", " -- "), (1, 1, 1)),
        (" ".join(QUESTION.split()[:13]), (1, 1, 0)),
        (" ".join(QUESTION.split()[2:11]), (1, 0, 0)),
    ],
)
def test_thirteen_words_in_a_row_are_an_overlap(text: str, expected: tuple[int, int, int]) -> None:
    assert found(text, QUESTION) == expected


def test_short_questions_must_be_there_whole_and_trivial_ones_are_not_compared() -> None:
    assert found(f"Now: {SHORT.lower()} {TRIVIAL}", SHORT, TRIVIAL) == (1, 1, 1)
    assert found("Name the seven colours of a rainbow.", SHORT, TRIVIAL) == (1, 0, 0)


vocabulary = st.lists(st.sampled_from([f"w{n}" for n in range(60)]), min_size=0, max_size=80)


@settings(deadline=None, max_examples=60)
@given(before=vocabulary, question=vocabulary, after=vocabulary, cut=st.integers(0, 80))
def test_the_measure_is_that_of_a_search_word_by_word(
    before: list[str], question: list[str], after: list[str], cut: int
) -> None:
    text = [*before, *question[:cut], *after]
    length = min(13, len(question))
    runs = {tuple(text[at : at + length]) for at in range(len(text))}
    starts = range(max(1, len(question) - length + 1))
    expected = any(tuple(question[at : at + length]) in runs for at in starts)
    compared, partial, whole = found(" ".join(text), " ".join(question) or "?")
    assert compared == (len(question) >= 6)
    assert partial == (compared and expected)
    assert whole == (compared and f" {' '.join(question)} " in f" {' '.join(text)} ")


def test_disjoint_sets_are_recorded_with_the_method() -> None:
    checked = check_overlap(data(OTHER), {"a": (QUESTION, TRIVIAL), "b": (SHORT,)})
    facts = checked.facts()
    assert [(d.dataset, d.method) for d in facts.disjoint_from or ()] == [
        ("a", "exact+13-gram/1, 1 of 2 items"),
        ("b", "exact+13-gram/1, 1 of 1 items"),
    ]
    assert facts.overlaps_with == checked.notes == ()


def test_an_overlap_is_refused_with_its_numbers() -> None:
    sets = {"quiz": (OTHER, QUESTION, SHORT)}
    text = f"{SHORT} {' '.join(QUESTION.split()[:15])}"
    with pytest.raises(UsageError, match=r"2 of 3 questions of quiz \(1 whole") as caught:
        check_overlap(data(text), sets)
    assert "--allow-overlap" in str(caught.value.hint)
    allowed = check_overlap(data(text), sets, allow_overlap=True)
    assert (allowed.overlaps_with, allowed.disjoint_from) == (("quiz",), ())
    assert "2 of 3 questions of quiz" in allowed.notes[0]


@pytest.mark.parametrize("question", [QUESTION, OTHER])
def test_a_set_chosen_by_name_needs_no_allowance_and_is_never_disjoint(question: str) -> None:
    checked = check_overlap(data(QUESTION, overlaps_with=["quiz"]), {"quiz": (question,)})
    assert (checked.overlaps_with, checked.disjoint_from) == (("quiz",), ())


def test_held_out_text_is_compared_too(tmp_path: Path) -> None:
    path = write(tmp_path, f"{OTHER}<|endoftext|>{QUESTION}")
    assert check_overlap(load(path, len(OTHER), 16), {"quiz": (QUESTION,)}).disjoint_from
    held = load(path, len(OTHER), 16, heldout=16)
    with pytest.raises(UsageError, match="1 of 1 questions of quiz"):
        check_overlap(held, {"quiz": (QUESTION,)})


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("q.txt", f"{QUESTION}<|endoftext|>\n{SHORT}"),
        ("q.jsonl", f'{{"id": 1, "Question": "{QUESTION}"}}\n{{"question": "{SHORT}"}}'),
        (
            "q.jsonl",
            f'{{"text": "{QUESTION}"}}\n{{"messages": [{{"role": "user", "content": "{SHORT}"}}]}}',
        ),
        ("q.csv", f'Answer,Question\n1,"{QUESTION}"\n2,{SHORT}\n'),
    ],
)
def test_a_set_is_read_from_a_file(tmp_path: Path, name: str, content: str) -> None:
    assert evaluation_set(write(tmp_path, content, name)) == (name, (QUESTION, SHORT))


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("q.jsonl", '{"question": "a"}\n{"answer": "b"}', "line 2 of .* has no question"),
        ("q.jsonl", '{"question": "a"}\n[]', "line 2 of .* has no question"),
        ("q.jsonl", "a", "line 1 of .* is not JSON"),
        ("q.csv", "a,b\n1,2\n", "row 1 of .* has no question"),
        ("q.csv", 'question\n"' + "x" * 200_000, "is not a CSV file"),
        ("q.csv", b"question\n\xff\n", "line 2 of .* is not UTF-8 text"),
        ("q.txt", " \n", "is empty"),
    ],
)
def test_an_unreadable_set_is_named(tmp_path: Path, name: str, content: Any, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        evaluation_set(write(tmp_path, content, name))


@pytest.fixture
def hub_cache(own_state: Path) -> Path:
    """The cache of the Hugging Face client with two known sets in it, one of them broken."""
    gpqa = own_state / "hf/hub/datasets--Idavidrein--gpqa/snapshots/abc"
    write(gpqa, f'Question,Answer\n"{QUESTION}",1\n', "gpqa_diamond.csv")
    write(gpqa, "Question\nanother set\n", "gpqa_main.csv")
    math = own_state / "hf/hub/datasets--HuggingFaceH4--MATH-500/snapshots/abc"
    write(math, '{"x": 1}', "test.jsonl")
    return own_state


@pytest.mark.usefixtures("hub_cache")
def test_sets_are_found_in_the_cache_of_the_hub_client() -> None:
    assert sets_on_this_machine() == {"gpqa_diamond": (QUESTION,)}
    with pytest.raises(UsageError, match="1 of 1 questions of gpqa_diamond"):
        check_overlap(data(QUESTION))


@pytest.mark.usefixtures("hub_cache")
def test_an_evaluation_set_can_be_calibrated_on_and_says_so() -> None:
    loaded = load_calibration("gpqa_diamond", ChatLetters(), tokens=500, seq_len=64)
    checked = check_overlap(loaded)
    assert (checked.source, checked.overlaps_with) == ("gpqa_diamond", ("gpqa_diamond",))
    assert checked.chat_template and checked.disjoint_from == ()
    assert "is an evaluation set" in checked.notes[0]


def test_parquet_is_read_with_its_library(own_state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("datasets", reason="datasets is not installed")
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    monkeypatch.setenv("HF_HUB_CACHE", str(own_state / "hub"))
    folder = own_state / "hub/datasets--openai--openai_humaneval/snapshots/abc/openai_humaneval"
    folder.mkdir(parents=True)
    parquet.write_table(
        arrow.table({"task_id": ["1"], "prompt": [QUESTION]}), folder / "test-0.parquet"
    )
    assert sets_on_this_machine() == {"humaneval": (QUESTION,)}
