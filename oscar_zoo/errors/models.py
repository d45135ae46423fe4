"""Errors of a model, and of computing an artifact for it."""

from __future__ import annotations

from typing import Self

from oscar_zoo.errors.base import OscarZooError


class UnsupportedModel(OscarZooError):
    """A model whose attention this version cannot handle."""

    code = "unsupported.model"


class InvalidModel(OscarZooError):
    """A model folder without weights, configuration or tokenizer."""

    code = "model"


class GeometryMismatch(OscarZooError, ValueError):
    """An artifact made for another shape of model."""

    code = "geometry"


class NotEnoughMemory(OscarZooError, MemoryError):
    """A model is larger than the device it should run on."""

    code = "memory"

    @classmethod
    def for_model(cls, model: str, need: int, device: str, free: int, *, hint: str) -> Self:
        """Build the error; `need` and `free` are bytes on `device`."""
        return cls(
            f"{model} needs about {_gigabytes(need)} GB on {device}, {_gigabytes(free)} GB are"
            " free.",
            hint=hint,
        )


class ComputeFailed(OscarZooError):
    """Calibration or fitting cannot give a trustworthy result."""

    code = "compute"

    @classmethod
    def incomplete(cls, what: str) -> Self:
        """The capture did not see everything it must see; `what` names the first thing missing."""
        return cls(
            f"the capture is incomplete: {what}.", hint="nothing was written; report the model"
        )


def _gigabytes(number: int) -> str:
    value = number / 1e9
    return f"{value:.0f}" if value >= 10 else f"{value:.1f}" if value >= 0.1 else f"{value:.3f}"
