"""How recall was measured for a choice."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from oscar_zoo.evaluate.measure import Measurement
from oscar_zoo.evaluate.questions import Recall


@dataclass(frozen=True)
class Questions:
    """How recall was measured, if it was.

    Attributes:
        task: the questions.
        own: the answers of the model with a BF16 cache.
        remark: why recall takes no part in the choice; `None` when it does, or when nothing was to
            be measured.
    """

    task: Recall | None = None
    own: Measurement | None = None
    remark: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        facts = {} if self.task is None else dict(self.task.describe())
        return {**facts, "bf16": self.own.value if self.own else None, "remark": self.remark}
