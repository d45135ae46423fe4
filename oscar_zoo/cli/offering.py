"""What is said and asked where nobody has an artifact that could be computed: the next step, and
how long it takes."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING

import click

from oscar_zoo.app.targets import ModelTarget, parse_model, parse_named
from oscar_zoo.artifact.names import Reference
from oscar_zoo.cli.render import terminal
from oscar_zoo.cli.render.course import duration
from oscar_zoo.cli.render.progress import current
from oscar_zoo.errors import (
    ArtifactNotAsked,
    ArtifactNotFound,
    NetworkError,
    OscarZooError,
    UsageError,
)
from oscar_zoo.next_step import Compute
from oscar_zoo.registry.model_names import ModelChoice, choose_model

if TYPE_CHECKING:
    from oscar_zoo.compute.estimate import Estimate
    from oscar_zoo.compute.job import ComputeOptions


@dataclass(frozen=True)
class ComputeWish:
    """What a command line says about computing.

    Attributes:
        compute: without asking.
        calib_data, device, revision: as for `oscar-zoo compute`; `None` for its defaults.
        offline: no request may leave.
        silent: neither progress nor notes.
        to_serve: the artifact is wanted for a server only.
    """

    compute: bool = False
    calib_data: str | None = None
    device: str | None = None
    revision: str | None = None
    offline: bool = False
    silent: bool = False
    to_serve: bool = False

    def check(self) -> None:
        """Refuse options that only mean something beside `--compute`, or while it is possible;
        raises `UsageError`."""
        if self.calib_data and not self.compute:
            raise UsageError(
                "--calib-data goes with --compute.", hint="add --compute, or leave it out"
            )
        if self.compute and int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise UsageError(
                "this computes in one process.",
                hint="torchrun -m oscar_zoo compute ..., then oscar-zoo publish",
            )


@dataclass(frozen=True)
class ComputePlan:
    """A computation that can be started.

    Attributes:
        choice: the model.
        options: everything but the output folder.
        cost: what it will take, or `None` where that cannot be told.
        notes: what the user should know before it starts, in sentences.
    """

    choice: ModelChoice
    options: ComputeOptions
    cost: Estimate | None
    notes: tuple[str, ...] = ()

    @property
    def seconds(self) -> float | None:
        """How long it will take."""
        return self.cost.seconds if self.cost else None

    @property
    def about(self) -> str:
        """How long, for people."""
        return (
            "nobody can say how long" if self.seconds is None else f"about {duration(self.seconds)}"
        )

    @property
    def sentence(self) -> str:
        """What will be done."""
        options = self.options
        text = (
            f"{options.calib_tokens:,} tokens of {options.calib_data} on {options.device}:"
            f" {self.about}."
        )
        if self.cost and not Path(self.choice.source).is_dir():
            text += (
                f" Its weights, {terminal.gigabytes(self.cost.weight_bytes)}, are fetched first"
                " unless they are here."
            )
        return text


def model_to_compute(
    text: str, error: OscarZooError, model: str | None = None
) -> ModelChoice | None:
    """The model from which an artifact for `text` can be made, now that looking for one gave
    `error`.

    `None` for errors that say something else, for names of one version, and where no model is
    meant. `model` is where its weights are, if that was said; it must have the same name.
    """
    if not isinstance(error, ArtifactNotFound | NetworkError):
        return None
    target = parse_named(text)
    reference = target.reference
    if reference.tag is not None or reference.digest is not None:
        return None
    try:
        # a name of an artifact does not mean a folder; --model may
        if model:
            choice = parse_model(model, current())
        elif isinstance(target, ModelTarget):
            choice = target.choice
        else:
            choice = choose_model(reference.name, folders=False)
    except OscarZooError:
        return None
    return choice if _is_called(choice, reference) else None


def refusal(error: OscarZooError, command: str, choice: ModelChoice) -> OscarZooError:
    """`error` of a search, with computing as the next step, unless no hub can give the model
    `choice` either."""
    from oscar_zoo.models.model_hub import is_here

    unasked = isinstance(error, NetworkError | ArtifactNotAsked)
    if unasked and not is_here(choice.source):
        return error
    error.next_step = Compute(choice.name, command)
    return error


def plan_computing(choice: ModelChoice, wish: ComputeWish, error: OscarZooError) -> ComputePlan:
    """What `oscar-zoo compute` would do with its defaults, and how long that takes; no weights are
    read.

    Args:
        choice: the model.
        wish: what the command line says.
        error: what looking for an artifact gave.

    Raises:
        MissingDependency: torch or transformers is not installed.
        UnsupportedModel: it is wanted for a server, which would refuse the model.
        OscarZooError: as `compute`, for what can be found wrong before it starts.
    """
    from oscar_zoo.app.devices import require_compute
    from oscar_zoo.cli.commands.compute import command
    from oscar_zoo.cli.loading import compute_options, refused_by_serve, will_be_refused

    require_compute()
    if isinstance(error, NetworkError):  # there may be one after all
        terminal.note(f"note: {error.message}", quiet=wish.silent)
    if wish.offline:
        os.environ["HF_HUB_OFFLINE"] = "1"  # read by the libraries that the next lines import
    from oscar_zoo.compute.estimate import estimate
    from oscar_zoo.compute.options import check_options
    from oscar_zoo.models.inspect import inspect_model

    given = {"--calib-data": wish.calib_data, "--device": wish.device, "--revision": wish.revision}
    arguments = [part for name, value in given.items() if value for part in (name, value)]
    with command.make_context("compute", [*arguments, choice.source]) as context:
        values = dict(context.params)
    options = compute_options(
        values["model"], values["calib_data"], values["clip"], values["group_size"], values
    )
    check_options(options)
    refused = refused_by_serve(options.model, options.revision)
    if refused is not None and wish.to_serve:
        raise refused
    block = inspect_model(options.model, revision=options.revision, model_id=options.model_id)
    notes = (will_be_refused(refused),) if refused else ()
    return ComputePlan(choice, options, estimate(options, block), notes)


def agreed(plan: ComputePlan) -> bool:
    """Ask, on a terminal, whether to compute now."""
    return click.confirm(
        f"No artifact for {plan.choice.name} exists. Compute one now ({plan.about})?",
        default=True,
        err=True,
    )


def can_ask() -> bool:
    """Whether somebody is there to answer."""
    return sys.stdin.isatty() and sys.stderr.isatty()


def announce(plan: ComputePlan, *, silent: bool) -> None:
    """Say what starts now."""
    terminal.note(
        f"No artifact for {plan.choice.name} was found. Computing one: {plan.sentence}",
        quiet=silent,
    )
    for note in plan.notes:
        terminal.note(f"note: {note}", quiet=silent)
    terminal.note("Ctrl-C stops it; the same command goes on from there.", quiet=silent)


def command_line(command: str, text: str) -> str:
    """The command line that computes."""
    return f"oscar-zoo {command} {quote(text)} --compute"


def _is_called(choice: ModelChoice, reference: Reference) -> bool:
    from oscar_zoo.registry.catalog import recipe_for

    recipe = recipe_for(reference.name)
    name = recipe.name if recipe else reference.name.rsplit("/", 1)[-1]
    return choice.name.casefold() == name.casefold()
