"""What is refused before torch and transformers are imported, which takes seconds.

The same mistakes are found again by those who use the values; nothing depends on these checks.
"""

from __future__ import annotations

from pathlib import Path

from oscar_zoo.models import hardware
from oscar_zoo.models.config_file import read_config
from oscar_zoo.models.model_hub import check_fetchable

ALL_GPUS = "auto"
"""The device that means all GPUs, then main memory."""


def check_model(source: str, revision: str | None = None) -> None:
    """Refuse a folder without a model, and a model that cannot be fetched now."""
    check_fetchable(source, revision)
    if Path(source).is_dir():
        read_config(Path(source))


def check_device(name: str | None) -> None:
    """Refuse what is not the name of a device, and a GPU where torch is a build for CPUs."""
    if name is not None and name != ALL_GPUS and hardware.parse_device(name)[0] == "cuda":
        hardware.check_build()
