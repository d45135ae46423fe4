"""Text of which too little can be held out is refused before the model runs, and so are groups that
rows cannot be cut into."""

from pathlib import Path
from typing import Any

import pytest
from tiny_artifacts import TINY
from tiny_models import EXAMPLE

from oscar_zoo.artifact.manifest import ModelBlock, WeightsInfo
from oscar_zoo.artifact.specs import Clip, ServingRecipe
from oscar_zoo.compute.options import Job, WidthWish, check_wish, read_data
from oscar_zoo.errors import UsageError
from oscar_zoo.models.loading import load_tokenizer
from oscar_zoo.models.model_source import inspect_model

TEXT = EXAMPLE.parents[1] / "text/calibration.txt"
RECIPE = ServingRecipe(group_size=64, clip=Clip(k=0.96, v=0.92))
BLOCK = inspect_model(str(EXAMPLE), revision=None, model_id=None)


def longest_held_out(folder: Path, characters: int, **changes: Any) -> int:
    """Of the beginning of the example text."""
    path = folder / "text.txt"
    path.write_text(TEXT.read_text("utf-8").replace("<|endoftext|>", "")[:characters], "utf-8")
    given = {"calib_tokens": 16384, "recipe": RECIPE, "calib_data": path} | changes
    asked = Job(model=str(EXAMPLE), model_name="tiny-qwen3-hard", **given)
    data = read_data(asked, BLOCK, load_tokenizer(str(EXAMPLE), revision=None))
    return max(map(len, data.heldout.sequences)) if data.heldout else 0


@pytest.mark.parametrize(
    ("characters", "changes"),
    [
        (5000, {}),
        (5000, {"seq_len": 512}),
        (5000, {"method": "oscar", "bits": 3.0}),
        (16_000, {}),
        (100_000, {"seq_len": 300}),
    ],
)
def test_text_that_gives_no_held_out_sequence_beyond_the_windows_is_refused(
    tmp_path: Path, characters: int, changes: dict[str, Any]
) -> None:
    with pytest.raises(UsageError, match="held-out sequences of 322 tokens or more") as caught:
        longest_held_out(tmp_path, characters, **changes)
    assert ("bits are chosen" if "bits" in changes else "the method is") in caught.value.message


@pytest.mark.parametrize(
    ("characters", "changes", "longest"),
    [
        (5000, {"method": "wush"}, 0),
        (16_000, {"calib_tokens": 2000}, 322),
        (100_000, {"seq_len": 512}, 512),
    ],
)
def test_what_the_refusal_advises_works(
    tmp_path: Path, characters: int, changes: dict[str, Any], longest: int
) -> None:
    assert longest_held_out(tmp_path, characters, **changes) >= longest


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
