"""`oscar-zoo pull`: fetch, verify, keep. Needs no torch, unless it computes."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from oscar_zoo.cli import build
from oscar_zoo.registry.params import PullParams

if TYPE_CHECKING:
    from oscar_zoo.errors import OscarZooError
    from oscar_zoo.observer import Observer
    from oscar_zoo.registry.fetch import PullResult
    from oscar_zoo.registry.pull import Again, Planned, PullReport
    from oscar_zoo.registry.targets import ModelChoice
    from oscar_zoo.registry.trust import Trust


def run(params: PullParams, observer: Observer) -> PullReport:
    """Pull, and compute what nobody has where that is wished."""
    from oscar_zoo.registry import pull

    return pull.run(params, observer, partial(_compute, params, observer))


def _compute(
    params: PullParams,
    observer: Observer,
    choice: ModelChoice,
    error: OscarZooError,
    trust: Trust,
    again: Again,
) -> PullResult | Planned:
    from oscar_zoo.cli.render.computing import plan_sentence
    from oscar_zoo.compute.obtain import obtain, plan_instead
    from oscar_zoo.registry.hubs.address import Sources
    from oscar_zoo.registry.pull import Planned
    from oscar_zoo.registry.targets import ComputeWish

    wish = ComputeWish(
        params.compute,
        calib_data=params.calib_data,
        device=params.device,
        offline=Sources(params.hubs, offline=params.offline).offline,
    )
    if wish.may_compute(error):
        choice.check_can_be_had(again(compute=True))
    plan = plan_instead(choice, wish, error, observer, again=again)
    notes = tuple(note.text for note in plan.notes)
    if params.dry_run:
        return Planned(choice.source, notes, plan.seconds, plan_sentence(plan.facts))
    pulled, made = obtain(plan, trust, observer)
    if made is None:
        return pulled
    return replace(
        pulled,
        computed=True,
        model=choice.source,
        seconds=dict(made.seconds),
        report=made.report,
        moments=made.moments,
        estimated_seconds=plan.seconds,
        notes=(*notes, *made.notes),
    )


command = build.command(
    "pull",
    PullParams,
    run="oscar_zoo.cli.commands.pull:run",
    view="oscar_zoo.cli.render.pulled:print_report",
)
