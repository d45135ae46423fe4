"""Text of which too little can be held out is refused before the model runs, with what works."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from tiny_artifacts import TINY
from tiny_models import EXAMPLE

from oscar_zoo.artifact.manifest import ModelBlock, WeightsInfo
from oscar_zoo.artifact.specs import Clip, ServingRecipe
from oscar_zoo.compute.options import Job, load, read_data
from oscar_zoo.compute.width_wish import WidthWish, check_wish
from oscar_zoo.errors import UsageError

TEXT = EXAMPLE.parents[1] / "text/calibration.txt"
RECIPE = ServingRecipe(group_size=64, clip=Clip(k=0.96, v=0.92))


def options(text: Path, **changes: Any) -> Job:
    given = {"calib_tokens": 16384, "recipe": RECIPE} | changes
    return Job(model=str(EXAMPLE), model_name="tiny-qwen3-hard", calib_data=text, **given)


def longest_held_out(asked: Job) -> int:
    model = load(asked)
    data = read_data(asked, model.block, model.tokenizer)
    return max(map(len, data.heldout.sequences)) if data.heldout else 0


@pytest.fixture
def text(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """The beginning of the example text, of so many characters."""
    path = tmp_path / "text.txt"
    path.write_text(TEXT.read_text("utf-8").replace("<|endoftext|>", "")[: request.param], "utf-8")
    return path


def refusal(asked: Job) -> UsageError:
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
    needed, tokenizer = int(wanted[1].replace(",", "")), load(asked).tokenizer
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
    error = refusal(options(text, method="oscar", bits=3.0))
    assert "bits are chosen" in error.message and "without --bits" in str(error.hint)
    both = refusal(options(text, bits=3.0))
    assert "a text of 10,400 tokens" in str(both.hint) and "--" not in str(both.hint)


@pytest.mark.parametrize("text", [5000], indirect=True)
def test_a_model_with_a_short_context_is_told_to_name_a_method(text: Path) -> None:
    model = load(options(text))
    assert model.block.rope is not None
    rope = model.block.rope.model_copy(update={"max_position": 256})
    block = model.block.model_copy(update={"rope": rope})

    with pytest.raises(UsageError, match="takes 256 tokens at most") as caught:
        read_data(options(text), block, model.tokenizer)
    assert "--method wush" in str(caught.value.hint)
    assert read_data(options(text, method="oscar"), block, model.tokenizer).heldout is None


@pytest.mark.parametrize(
    ("head_dim", "v_head_dim", "group", "cause", "hint"),
    [
        (64, 64, 48, "group_size 48 does not divide head_dim 64", "64"),
        (128, 128, 16, "8 groups per row; 1, 2 or 4 are supported", "128"),
        (192, 192, 64, "3 groups per row; 1, 2 or 4 are supported", "192"),
        (192, 128, 32, "6 groups per row; 1, 2 or 4 are supported", "128"),
    ],
)
def test_a_group_size_that_does_not_go_with_the_rows(
    head_dim: int, v_head_dim: int, group: int, cause: str, hint: str
) -> None:
    geometry = TINY.model_dump() | {"head_dim": head_dim, "v_head_dim": v_head_dim}
    block = ModelBlock(
        **geometry,
        id="org/model",
        revision=None,
        config_sha256=None,
        rope=None,
        qk_norm=None,
        output_gate=None,
        weights=WeightsInfo(dtype="bfloat16"),
        compatible_with=(),
    )
    recipe = ServingRecipe(group_size=group, clip=Clip(k=0.0, v=0.0))
    job = Job(model="org/model", model_name="model", calib_tokens=100, recipe=recipe)
    with pytest.raises(UsageError) as caught:
        job.sequence_length(block)
    assert caught.value.message == f"a group size of {group} does not go with org/model: {cause}."
    assert caught.value.hint == f"use a group size of {hint}"
    with pytest.raises(UsageError) as early:  # before anything is read
        check_wish(WidthWish(bits=3.0), recipe, block)
    assert str(early.value) == str(caught.value)
