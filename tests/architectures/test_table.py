"""docs/models.md names every architecture, is what was recorded, and some rows still hold."""

from pathlib import Path

import pytest
from architecture_attempts import compute_and_evaluate
from architecture_page import COLUMNS, CPU_COLUMNS, PAGE, page, read_records
from architectures import ARCHITECTURES

from oscar_zoo.registry.architectures import architecture

RECORDS = read_records()


def test_the_document_is_what_was_recorded() -> None:
    assert PAGE.read_text("utf-8") == page(RECORDS)


def test_every_architecture_has_a_row_and_nothing_fails_on_a_cpu() -> None:
    assert list(RECORDS) == list(ARCHITECTURES)
    text = PAGE.read_text("utf-8")
    for name, tiny in ARCHITECTURES.items():
        assert f"| {tiny.models} | `{tiny.model_type}` |" in text
        for column in COLUMNS:
            attempt = getattr(RECORDS[name], column)
            assert attempt.outcome != "fails" or column not in CPU_COLUMNS, (name, column)
            assert bool(attempt.said) == (attempt.outcome in ("refused", "fails"))


def test_what_info_says_is_not_less_than_what_was_recorded() -> None:
    said = ("compute", "evaluate", "serve_cpu", "serve_gpu")
    for name, row in RECORDS.items():
        known = architecture(ARCHITECTURES[name].model_type)
        for column, field in zip(COLUMNS, said, strict=True):
            if known is not None and getattr(row, column).outcome == "works":
                assert getattr(known, field).state == "works", (name, column)


@pytest.mark.parametrize("name", ["gpt_oss", "qwen3_vl", "deepseek_v3"])
def test_a_row_is_what_happens(name: str, tmp_path: Path) -> None:
    got = compute_and_evaluate(name, tmp_path / "work")
    assert got == (RECORDS[name].compute, RECORDS[name].evaluate)
