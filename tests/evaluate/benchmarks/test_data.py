"""Rows of benchmarks from files, from this package and from the hub."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from oscar_zoo.errors import GatedRepository, OfflineError, OscarZooError, PathNotFound, UsageError
from oscar_zoo.evaluate.benchmarks.tasks import hub_rows, read_rows, sample_rows

ROWS = [{"question": "Wie groß?\u2028Say it.", "answer": "1"}, {"question": "b,c", "answer": "2"}]


def test_rows_of_every_text_format_are_the_same(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(
        "\n".join(json.dumps(row, ensure_ascii=False) for row in ROWS) + "\n\n", "utf-8"
    )
    (tmp_path / "a.json").write_text(json.dumps(ROWS))
    with (tmp_path / "a.csv").open("w", newline="", encoding="utf-8-sig") as stream:
        writer = csv.DictWriter(stream, ["question", "answer"])
        writer.writeheader()
        writer.writerows(ROWS)
    found = [read_rows(tmp_path / f"a.{kind}") for kind in ("jsonl", "json", "csv")]
    assert [rows.of("test") for rows in found] == [ROWS] * 3
    assert all(str(rows.revision).startswith("sha256:") for rows in found)
    assert len({rows.revision for rows in found}) == 3


def test_rows_of_tables(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import ipc, parquet

    table = pyarrow.Table.from_pylist(ROWS)
    parquet.write_table(table, tmp_path / "a.parquet")
    with ipc.new_stream(tmp_path / "a.arrow", table.schema) as stream:
        stream.write_table(table)
    with ipc.new_file(tmp_path / "b.arrow", table.schema) as stream:
        stream.write_table(table)
    for name in ("a.parquet", "a.arrow", "b.arrow"):
        assert read_rows(tmp_path / name).of("train") == ROWS, name
    (tmp_path / "a.parquet").write_bytes((tmp_path / "a.parquet").read_bytes()[:-9])
    with pytest.raises(UsageError, match="cannot read"):
        read_rows(tmp_path / "a.parquet")


@pytest.mark.parametrize(
    ("name", "content", "kind", "said"),
    [
        ("a.jsonl", b'{"a": 1}\n{"a": \n', UsageError, "line 2 of .* is not JSON"),
        ("a.jsonl", b"[1]\n", UsageError, "is no list of objects"),
        ("a.json", b'{"a": 1}', UsageError, "is no list of objects"),
        ("a.csv", b"question\n\xff\xff", UsageError, "is not UTF-8"),
        ("a.csv", b"question\n", UsageError, "has no rows"),
        ("a.txt", b"question\n", UsageError, "is of no kind that is read here"),
        ("none/a.csv", None, PathNotFound, "no such data file"),
    ],
)
def test_what_cannot_be_read_is_one_sentence(
    name: str, content: bytes | None, kind: type[OscarZooError], said: str, tmp_path: Path
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(kind, match=said):
        read_rows(tmp_path / name)


def test_the_sample_has_forty_questions_of_four_different_choices() -> None:
    rows = sample_rows().of("train")
    assert rows is not None and len(rows) == 40
    names = {"Question", "Correct Answer", *(f"Incorrect Answer {at}" for at in (1, 2, 3))}
    assert all(set(row) == names and len(set(row.values())) == 5 for row in rows)


def test_a_set_that_is_not_here_needs_a_network(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("datasets")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    def absent(*_: Any) -> None:
        raise ConnectionError("offline mode is on")

    monkeypatch.setattr("datasets.load_dataset_builder", absent)
    with pytest.raises(OfflineError, match="offline mode fetches nothing") as told:
        hub_rows("openai/gsm8k", "main")
    assert "--data FILE" in str(told.value.hint)


def test_a_gated_set_says_where_its_terms_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library's own error, with the words that it has for a gated set."""
    exceptions = pytest.importorskip("datasets.exceptions")
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "OSCAR_ZOO_OFFLINE"):
        monkeypatch.delenv(name, raising=False)

    def gated(*_: Any) -> None:
        raise exceptions.DatasetNotFoundError(
            "Dataset 'Idavidrein/gpqa' is a gated dataset on the Hub. You must be authenticated to"
            " access it."
        )

    monkeypatch.setattr("datasets.load_dataset_builder", gated)
    page = "https://huggingface.co/datasets/Idavidrein/gpqa"
    with pytest.raises(GatedRepository, match="accept its terms") as told:
        hub_rows("Idavidrein/gpqa", "gpqa_diamond", gated=page)
    assert page in str(told.value.hint) and "oscar-zoo login" in str(told.value.hint)
