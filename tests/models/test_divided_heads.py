"""Model types whose head size follows from two numbers of the file: transformers, which takes
seconds to import, is not asked."""

import json
from pathlib import Path

import pytest

from oscar_zoo.models.config_file import DIVIDED, ConfigFile, describe, says_all
from oscar_zoo.models.model_source import inspect_model

SHAPE = {
    "hidden_size": 1152,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "num_hidden_layers": 6,
}


def folder_of(place: Path, **values: object) -> Path:
    (place / "config.json").write_text(json.dumps(SHAPE | values))
    return place


NO_WINDOW, WINDOWS_LATE, WINDOWS_OFF = (
    {"sliding_window": None},
    {"sliding_window": 4096, "use_sliding_window": True, "max_window_layers": 3},
    {"sliding_window": 4096, "use_sliding_window": False, "max_window_layers": 6},
)
CASES = [
    *((kind, NO_WINDOW) for kind in sorted(DIVIDED)),
    *((kind, WINDOWS_OFF) for kind in ("qwen2", "qwen2_moe", "smollm3")),
    ("qwen2", WINDOWS_LATE),
]


@pytest.mark.parametrize(("kind", "values"), CASES)
def test_the_file_says_what_the_class_of_the_model_says(
    tmp_path: Path, kind: str, values: dict[str, object]
) -> None:
    folder = folder_of(tmp_path, model_type=kind, **values)
    file = ConfigFile.of_folder(folder)
    assert says_all(file)
    assert describe(file, "m").geometry == inspect_model(str(folder)).geometry
