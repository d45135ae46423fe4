"""What computing an artifact that nobody has published would do, and what it would cost.

`pull` and `serve` use this when a search found nothing: computing is planned, started or only
named as the next step, as the caller wishes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oscar_zoo.app.compute import not_served_note, options_of, serving_refusal
from oscar_zoo.app.compute_request import ComputeRequest
from oscar_zoo.engines.requirements import require_compute
from oscar_zoo.errors import NetworkError, OscarZooError
from oscar_zoo.next_step import Compute
from oscar_zoo.observer import Note, Observer
from oscar_zoo.registry.compute_wish import ComputeWish, propose_computing
from oscar_zoo.registry.targets import ModelChoice

if TYPE_CHECKING:
    from oscar_zoo.compute.estimate import Estimate
    from oscar_zoo.compute.options import ComputeOptions


@dataclass(frozen=True)
class ComputePlan:
    """A computation that can be started.

    Attributes:
        choice: the model.
        options: everything but the output folder.
        cost: what it will take, or `None` where that cannot be estimated.
        notes: what the user should know before it starts.
    """

    choice: ModelChoice
    options: ComputeOptions
    cost: Estimate | None
    notes: tuple[Note, ...] = ()

    @property
    def seconds(self) -> float | None:
        """The estimated duration, or `None`."""
        return self.cost.seconds if self.cost else None

    @property
    def facts(self) -> Mapping[str, Any]:
        """The plan in plain values, for notes and questions.

        `fetched_bytes` are weights that may have to be downloaded first, or `None`.
        """
        here = Path(self.choice.source).is_dir()
        return {
            "model": self.choice.name,
            "tokens": self.options.calib_tokens,
            "data": str(self.options.calib_data),
            "device": self.options.device,
            "seconds": self.seconds,
            "fetched_bytes": self.cost.weight_bytes if self.cost and not here else None,
        }

    @property
    def question(self) -> Note:
        """Asks whether to start it."""
        text = f"No artifact for {self.choice.name} exists. Compute one now?"
        return Note("compute.question", text, self.facts)

    @property
    def start(self) -> Note:
        """Tells that it starts."""
        text = f"No artifact for {self.choice.name} was found. Computing one."
        return Note("compute.start", text, self.facts, kind="step")


def plan_instead(
    choice: ModelChoice,
    wish: ComputeWish,
    error: OscarZooError,
    observer: Observer,
    *,
    again: Callable[..., str],
) -> ComputePlan:
    """The plan to compute what a search did not find, if the caller wishes that.

    Args:
        wish: what the caller said; the observer may be asked.
    """
    if wish.may_compute(error):
        plan = plan_computing(choice, wish, error, observer)
        if wish.compute or observer.confirm(plan.question):
            return plan
        error.message = f"nothing was computed for {choice.name}."
        error.args = (error.message,)
        error.advise(next_step=Compute(choice.name, again(compute=True)))
        raise error
    propose_computing(choice, error, again)
    raise error


def plan_computing(
    choice: ModelChoice, wish: ComputeWish, error: OscarZooError, observer: Observer
) -> ComputePlan:
    """What `compute` would do with its defaults, and how long that takes; no weights are read."""
    require_compute()
    if isinstance(error, NetworkError):  # a hub that does not answer may have an artifact
        observer.note(Note("hub.unreachable", error.said or error.message))
    if wish.offline:
        os.environ["HF_HUB_OFFLINE"] = "1"  # libraries that are imported later read it
    given = {"calib_data": wish.calib_data, "device": wish.device, "revision": wish.revision}
    changes: dict[str, Any] = {name: value for name, value in given.items() if value}
    options, model = options_of(ComputeRequest(choice.source, **changes), choice)
    from oscar_zoo.compute.estimate import estimate
    from oscar_zoo.compute.options import check_options

    check_options(options)
    refused = serving_refusal(model.written, model.block.id)
    if refused is not None and wish.to_serve:
        raise refused
    notes = (not_served_note(refused),) if refused else ()
    return ComputePlan(choice, options, estimate(options, model), notes)
