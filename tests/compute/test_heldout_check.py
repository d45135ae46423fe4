"""Text of which too little can be held out is refused before the model runs, with what works."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from tiny_models import EXAMPLE

from oscar_zoo.artifact.specs import Clip, ServingRecipe
from oscar_zoo.compute.data import CalibrationData
from oscar_zoo.compute.heldout_check import check_heldout
from oscar_zoo.compute.job import ComputeOptions
from oscar_zoo.compute.options import check_options
from oscar_zoo.compute.subject import load_subject, read_data
from oscar_zoo.compute.width_wish import WidthWish
from oscar_zoo.errors import UsageError

TEXT = EXAMPLE.parents[1] / "text/calibration.txt"
RECIPE = ServingRecipe(group_size=64, clip=Clip(k=0.96, v=0.92))


def options(text: Path, **changes: Any) -> ComputeOptions:
    given = {"calib_tokens": 16384, "recipe": RECIPE} | changes
    return ComputeOptions(
        model=str(EXAMPLE), model_name="tiny-qwen3-hard", calib_data=text, **given
    )


def longest_held_out(asked: ComputeOptions) -> int:
    data = read_data(asked, load_subject(asked), check_options(asked))
    return max(map(len, data.heldout.sequences)) if data.heldout else 0


@pytest.fixture
def text(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """The beginning of the example text, of so many characters."""
    path = tmp_path / "text.txt"
    path.write_text(TEXT.read_text("utf-8").replace("<|endoftext|>", "")[: request.param], "utf-8")
    return path


def refusal(asked: ComputeOptions) -> UsageError:
    with pytest.raises(UsageError) as caught:
        longest_held_out(asked)
    return caught.value


@pytest.mark.parametrize("text", [5000], indirect=True)
@pytest.mark.parametrize("seq_len", [None, 100, 512])
def test_a_text_that_no_option_helps_is_told_how_long_it_must_be(
    text: Path, seq_len: int | None
) -> None:
    error = refusal(options(text, seq_len=seq_len))
    assert "text.txt is too short" in error.message and "322 tokens or more" in error.message
    assert "--seq-len" not in str(error.hint) and "--method wush" in str(error.hint)
    assert longest_held_out(options(text, method="wush")) == 0


@pytest.mark.parametrize("text", [100_000], indirect=True)
def test_the_length_that_it_asks_for_is_enough(text: Path) -> None:
    """Cut to the tokens that the error of a shorter text names, the text is taken."""
    asked = options(text)
    whole = text.read_text("utf-8")
    text.write_text(whole[:5000], "utf-8")
    wanted = re.search(r"a text of ([\d,]+) tokens", str(refusal(asked).hint))
    assert wanted is not None
    needed, tokenizer = int(wanted[1].replace(",", "")), load_subject(asked).tokenizer
    ids = tokenizer(whole, verbose=False)["input_ids"]
    text.write_text(tokenizer.decode(ids[: needed + 5]), "utf-8")
    assert longest_held_out(asked) >= 322
    text.write_text(tokenizer.decode(ids[: needed - 200]), "utf-8")
    assert "too short" in refusal(asked).message


@pytest.mark.parametrize("text", [16_000], indirect=True)
def test_fewer_tokens_are_advised_where_that_works(text: Path) -> None:
    error = refusal(options(text))
    advised = re.search(r"--calib-tokens (\d+)", str(error.hint))
    assert advised is not None
    assert longest_held_out(options(text, calib_tokens=int(advised[1]))) >= 322


@pytest.mark.parametrize("text", [100_000], indirect=True)
def test_longer_sequences_are_advised_where_they_are_too_short(text: Path) -> None:
    error = refusal(options(text, seq_len=300))
    assert "yours have 300" in error.message and str(error.hint) == "add --seq-len 512"
    assert longest_held_out(options(text, seq_len=512)) == 512


@pytest.mark.parametrize("text", [5000], indirect=True)
def test_bits_are_chosen_with_such_text_too(text: Path) -> None:
    error = refusal(options(text, method="oscar", widths=WidthWish(bits=3.0)))
    assert "bits are chosen" in error.message and "without --bits" in str(error.hint)
    both = refusal(options(text, widths=WidthWish(bits=3.0)))
    assert "a text of 10,400 tokens" in str(both.hint) and "--" not in str(both.hint)


@pytest.mark.parametrize("text", [5000], indirect=True)
def test_a_model_with_a_short_context_is_told_to_name_a_method(text: Path) -> None:
    asked = options(text, method="oscar")
    subject = load_subject(asked)
    assert subject.block.rope is not None
    rope = subject.block.rope.model_copy(update={"max_position": 256})
    block = subject.block.model_copy(update={"rope": rope})
    data = read_data(asked, subject, check_options(asked))

    def pack(tokens: int, length: int) -> CalibrationData:
        pytest.fail("no packing helps")

    with pytest.raises(UsageError, match="takes 256 tokens at most") as caught:
        check_heldout(data, options(text), block, pack)
    assert "--method wush" in str(caught.value.hint)
    check_heldout(data, asked, block, pack)
