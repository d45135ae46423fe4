"""`oscar-zoo pull`: fetch, verify, keep. Needs no torch, unless it computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from oscar_zoo.cli import completing, options


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
@options.signature_options
@options.computing_options
@options.devices_option
@options.offline_option
@options.hubs_option
@options.quiet_option
@options.json_option
def command(
    names: tuple[str, ...],
    hubs: tuple[str, ...],
    offline: bool,
    compute: bool,
    calib_data: str | None,
    device: str | None,
    require_signature: bool,
    keys: tuple[Path, ...],
    dry_run: bool,
    quiet: bool,
    as_json: bool,
    **flags: Any,
) -> int:
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
      oscar-zoo pull Qwen3-8B --require-signature --key ./their-key.pem
      oscar-zoo pull ./my-model --compute --calib-data my-text.txt
    """
    from oscar_zoo.app.compute_wish import ComputeWish
    from oscar_zoo.app.pull import pull_all
    from oscar_zoo.app.pull_request import PullRequest
    from oscar_zoo.cli.main import exit_code
    from oscar_zoo.cli.render import pulled
    from oscar_zoo.cli.render.progress import TerminalObserver
    from oscar_zoo.errors import OscarZooError
    from oscar_zoo.registry.hubs.address import Sources
    from oscar_zoo.registry.signatures import SignatureWish
    from oscar_zoo.registry.targets import parse_named

    sources = Sources(hubs, offline=offline)
    wish = ComputeWish(compute, calib_data=calib_data, device=device, offline=sources.offline)
    targets = tuple(map(parse_named, names))
    signing = SignatureWish(require_signature, keys)
    request = PullRequest(targets, sources, dry_run=dry_run, wish=wish, signing=signing, **flags)
    with TerminalObserver(quiet=quiet, as_json=as_json) as observer:
        report = pull_all(request, observer)
    failed = [result for result in report.results if isinstance(result, OscarZooError)]
    if failed and len(report.results) == 1:
        raise failed[0]
    if as_json:
        pulled.emit_report(report, dry_run=dry_run)
    else:
        pulled.print_report(report, dry_run=dry_run, quiet=quiet)
    return exit_code(failed[0] if failed else None)
