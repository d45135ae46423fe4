"""`oscar-zoo pull`: fetch, verify, keep. Needs no torch, unless it computes."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from oscar_zoo.cli import completing, options
from oscar_zoo.cli.render import terminal

if TYPE_CHECKING:
    from oscar_zoo.registry.pins import PinFile


@click.command("pull")
@click.argument(
    "names", metavar="NAME[:TAG]...", nargs=-1, shell_complete=completing.names_or_paths
)
@click.option("--all", "everything", is_flag=True, help="Every artifact of the hubs asked.")
@click.option(
    "--output",
    metavar="DIR",
    type=click.Path(path_type=Path),
    help=(
        "Also copy the files to DIR/<Model>/<tag>, the layout that the OSCAR scripts take as"
        " ROT_DIR."
    ),
)
@click.option("--force", is_flag=True, help="With --output: replace a folder with other content.")
@click.option("--dry-run", is_flag=True, help="Show what would be fetched, and from where.")
@click.option("--locked", is_flag=True, help="Take only what oscar-zoo.lock has; never write it.")
@click.option(
    "--lock/--no-lock",
    "lock",
    default=None,
    help=(
        "Pin in oscar-zoo.lock also outside of a project, or neither read nor write it. [default:"
        " in projects only]"
    ),
)
@click.option(
    "--accept-new-digest",
    is_flag=True,
    help="Take bytes that differ from those seen before, and pin them.",
)
@click.option(
    "--allow-downgrade", is_flag=True, help="Accept a hub index that is older than one seen before."
)
@options.computing_options
@options.devices_option
@options.offline_option
@options.hubs_option
@options.quiet_option
@options.json_option
def command(names: tuple[str, ...], as_json: bool, quiet: bool, dry_run: bool, **flags: Any) -> int:
    """Fetch artifacts by name, verify them, and keep them in the local store.

    Hubs are asked in order; the next one only when one does not answer or does not have the name.
    What was fetched is pinned among the artifacts you have seen and, in a project, in
    oscar-zoo.lock: other bytes under the same name are an error from then on. What oscar-zoo.lock
    pins, or NAME@sha256:.. names, and is here already is hashed again without a request. Every
    other name needs a hub that answers, or --offline, which takes the copy that is here.

    A project is a folder with .git, .hg or pyproject.toml, or below one; the lock goes beside it,
    or stays where one is already. A home folder is no project. Commit the lock, and use --locked in
    CI.

    With --compute a model that nobody has an artifact for (a name of the zoo, an id such as
    Qwen/Qwen3-8B, or a local folder) gets one made here, as by oscar-zoo compute with its defaults,
    and published to your own zoo.

    \b
    Examples:
      oscar-zoo pull Qwen3-8B
      oscar-zoo pull Qwen3-8B:seq20000_prompt83_group128 Qwen3-32B --output ./rotations
      oscar-zoo pull Qwen3-8B@sha256:3f9a12b4c5d6 --hub hf:my-org/zoo
      oscar-zoo pull ./my-model --compute --calib-data my-text.txt
    """
    from oscar_zoo.cli import pulling

    silent = quiet or as_json
    wish = _wish(flags)
    wanted, request = _request(names, flags)
    lock = request.trust.lock
    locked_before = lock is None or lock.path.exists()
    if dry_run:
        results = pulling.plan_all(list(wanted), request)
    else:
        results = pulling.pull_all(list(wanted), request, progress=not silent)
    results = pulling.compute_missing(wanted, results, request, wish, dry_run=dry_run)
    _mention_folders(wanted.values(), results)
    made = lock if lock is not None and not locked_before and lock.path.exists() else None
    return _show(results, as_json=as_json, quiet=quiet, dry_run=dry_run, lock=made)


def _wish(flags: dict[str, Any]) -> Any:
    from oscar_zoo.app.compute_plan import ComputeWish
    from oscar_zoo.errors import UsageError
    from oscar_zoo.hubs import config

    if flags["compute"] and flags["locked"]:
        raise UsageError(
            "--locked takes what the lock has; --compute makes something new.",
            hint="drop one of the two",
        )
    given = {name: flags[name] for name in ("compute", "calib_data", "device")}
    offline = config.load(flags["hubs"], offline=flags["offline"]).offline
    wish = ComputeWish(**given, offline=offline)
    wish.check()
    return wish


def _request(names: tuple[str, ...], flags: dict[str, Any]) -> tuple[dict[Any, str], Any]:
    from oscar_zoo.app.targets import ModelTarget, parse_named
    from oscar_zoo.cli.pulling import PullRequest, everything
    from oscar_zoo.errors import UsageError
    from oscar_zoo.hubs import address, config
    from oscar_zoo.registry.pins import PinFile, project_root
    from oscar_zoo.registry.trust import Trust

    if bool(names) == flags["everything"]:
        raise UsageError(
            "name artifacts, or ask for --all of them.", hint="oscar-zoo list shows what there is"
        )
    if flags["lock"] is False and flags["locked"]:
        raise UsageError(
            "--locked needs the lock that --no-lock leaves out.", hint="drop one of the two"
        )
    lock = None if flags["lock"] is False else PinFile.of_project()
    wanted_here = flags["lock"] or project_root() is not None
    trust = Trust(
        lock=lock,
        locked=flags["locked"],
        write_lock=bool(wanted_here or (lock is not None and lock.path.exists())),
        accept_new=flags["accept_new_digest"],
        allow_downgrade=flags["allow_downgrade"],
    )
    offline = config.load(flags["hubs"], offline=flags["offline"]).offline
    hubs = address.open_hubs(flags["hubs"], offline=offline)
    wanted = {name: str(name) for name in everything(hubs)} if flags["everything"] else {}
    folders = {}
    for text in names:
        target = parse_named(text)
        wanted.setdefault(target.reference, text)
        if isinstance(target, ModelTarget):
            folders[target.reference] = target.path
    return wanted, PullRequest(hubs, trust, offline, flags["output"], flags["force"], folders)


def _mention_folders(names: Iterable[str], results: list[Any]) -> None:
    """Say of names that are also folders with a model which of the two was taken, or may have been
    meant."""
    from oscar_zoo.app.targets import NameTarget, note_namesake, parse
    from oscar_zoo.cli.render.progress import current
    from oscar_zoo.errors import OscarZooError
    from oscar_zoo.registry.verification import suggest_path

    for text, result in zip(names, results, strict=True):
        target = parse(text)
        folder = target.model_namesake if isinstance(target, NameTarget) else None
        if folder is not None and isinstance(result, OscarZooError):
            suggest_path(folder, result)
        elif folder is not None:
            note_namesake(folder, current())


def _show(
    results: list[Any], *, as_json: bool, quiet: bool, dry_run: bool, lock: PinFile | None
) -> int:
    """Print every result; a single error is raised, several names give a line each and the first
    one's exit code."""
    from oscar_zoo.cli import pulling
    from oscar_zoo.cli.main import exit_code
    from oscar_zoo.errors import OscarZooError

    failed = [result for result in results if isinstance(result, OscarZooError)]
    done = [result for result in results if not isinstance(result, OscarZooError)]
    if failed and len(results) == 1:
        raise failed[0]
    if as_json:
        errors = [{"code": e.code, "message": e.message, "hint": e.hint} for e in failed]
        facts = {
            "dry_run": dry_run,
            "artifacts": done,
            "errors": errors,
            "new_lock": str(lock.path) if lock else None,
        }
        terminal.emit_json({"schema": "oscar-zoo.pull/1"} | facts)
    for row in [] if as_json else done:
        pulling.print_planned(row) if dry_run else pulling.print_pulled(row, quiet=quiet)
    if lock is not None and not as_json:
        place = os.path.relpath(lock.path)
        place = place if place.startswith("..") else f"./{place}"
        terminal.note(
            f"note: pinned in {place}; commit it, or pull with --no-lock to do without", quiet=quiet
        )
    for error in [] if as_json else failed:
        terminal.print_error(error.code, error.message, error.hint, as_json=False)
    return exit_code(failed[0]) if failed else 0
