"""What a worker makes of group sizes: refused in the words that every command has."""

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
from engines import needs_sglang
from tiny_artifacts import artifact_files, write_folder
from transformers import Qwen3Config

from oscar_zoo.engines.sglang import worker
from oscar_zoo.errors import UsageError

pytestmark = [pytest.mark.sglang, needs_sglang]

MODEL = Qwen3Config(num_hidden_layers=4, architectures=["Qwen3ForCausalLM"])
CONFIG = SimpleNamespace(
    head_dim=192,
    v_head_dim=128,
    num_hidden_layers=4,
    hf_config=MODEL,
    hf_text_config=MODEL,
    linear_attn_registry_result=None,
)


@pytest.fixture
def group_size(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[None]:
    """The settings of a worker with an artifact and a group size."""
    folder = write_folder(tmp_path / "artifact", artifact_files())
    given = {"OSCAR_INT2_ROTATION_PATH": str(folder), "OSCAR_INT2_GROUP_SIZE": request.param}
    with patch.dict(os.environ, given):
        worker.served.cache_clear()
        yield
    worker.served.cache_clear()


@pytest.mark.parametrize("group_size", ["48"], indirect=True)
def test_two_widths_share_a_group_size(group_size: None) -> None:
    specs = worker.layer_specs(CONFIG)
    assert {(k.group_size, v.group_size) for k, v in specs.values()} == {(48, 128 // 4)}


@pytest.mark.parametrize("group_size", ["20"], indirect=True)
def test_a_group_size_that_cuts_no_row(group_size: None) -> None:
    with pytest.raises(UsageError) as caught:
        worker.layer_specs(CONFIG)
    assert caught.value.message.startswith("a group size of 20 does not go with this model: ")
    assert caught.value.hint == "use --oscar-group-size=128"
