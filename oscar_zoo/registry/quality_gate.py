"""What an artifact must have shown before it is published: perplexity and recall under its recipe,
and a perplexity near that of BF16.

`compute` measures both when it chooses a method, and `eval` records them as scores. What somebody
publishes in spite of the gate is said in the index, so that everybody can see it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from oscar_zoo.errors import UsageError
from oscar_zoo.registry.index import Accepted
from oscar_zoo.registry.measured import POOR_PERCENT, Measured, is_poor
from oscar_zoo.registry.publishable import Publishable


@dataclass(frozen=True)
class Shown:
    """What is known about the quality of an artifact before it is published.

    Attributes:
        change_percent: the largest measured rise of perplexity over BF16, or `None`.
        recall: whether recall was measured.
        gpqa: whether a GPQA score was measured.
        imported: whether the artifact is somebody else's, which cannot be asked for measurements.
    """

    change_percent: float | None
    recall: bool
    gpqa: bool
    imported: bool

    @classmethod
    def by(cls, made: Publishable) -> Self:
        """What the manifest and the scores of `made` say, with the settings of its recipe."""
        said = (Measured.of(made.manifest), Measured.of_scores(made.scores))
        figures = [one for one in said if one is not None]
        changes = [one.change_percent for one in figures if one.change_percent is not None]
        return cls(
            change_percent=max(changes, default=None),
            recall=any(one.recall is not None for one in figures),
            gpqa=any(
                score.task.startswith("gpqa") and score.reporter == "measured"
                for score in made.scores
            ),
            imported=made.manifest.provenance.kind == "imported",
        )

    @property
    def missing(self) -> tuple[str, ...]:
        """The tasks that were not measured."""
        tasks = (("perplexity", self.change_percent is not None), ("recall", self.recall))
        return tuple(task for task, measured in tasks if not measured)


def check_quality(
    made: Publishable, measure: str, *, allow_poor: bool = False, unmeasured: bool = False
) -> tuple[Accepted, ...]:
    """Refuse what was not measured, or is poor."""
    shown, name = Shown.by(made), made.id.reference
    accepted: list[Accepted] = []
    if shown.missing and not shown.imported:
        if not unmeasured:
            tasks = " and ".join(shown.missing)
            only = "" if len(shown.missing) > 1 else f" --task {shown.missing[0]}"
            raise UsageError(
                f"nobody measured the {tasks} of {name} under its recipe.",
                hint=f"{measure}{only} measures it; to publish it anyway: --unmeasured",
            )
        accepted.append("unmeasured")
    if shown.change_percent is not None and is_poor(shown.change_percent):
        if not allow_poor:
            raise UsageError(
                f"the perplexity of {name} is {shown.change_percent:.1f} % above BF16, more than"
                f" {POOR_PERCENT:g} %.",
                hint=(
                    "let oscar-zoo compute choose the method, with more text; to publish it anyway:"
                    " --allow-poor, which the index will say"
                ),
            )
        accepted.append("poor")
    return tuple(accepted)
