"""`oscar-zoo scores`: what is known about the quality of artifacts, and records for them. Needs no
torch."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import click

from oscar_zoo.cli import completing, options
from oscar_zoo.cli.render import terminal


class _NameOrCommand(click.Group):
    """A group in which a first word that is no command is the name of an artifact to show."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        known = {*self.commands, *self.get_help_option_names(ctx)}
        return super().parse_args(ctx, ["show", *args] if args and args[0] not in known else args)


@click.group("scores", cls=_NameOrCommand, subcommand_metavar="NAME[:TAG]|DIR | COMMAND [ARGS]...")
def command() -> None:
    """Show the scores of artifacts with their history, or attach measured ones.

    \b
    Examples:
      oscar-zoo scores Qwen3-8B
      oscar-zoo scores Qwen3-8B:seq20000_prompt83_group128 --json
      oscar-zoo scores add Qwen3-8B:seq20000_prompt83_group128 gpqa.json
    """


@command.command("show", short_help="Show the scores of a model's artifacts, or of one.")
@click.argument("name", metavar="NAME[:TAG]|DIR", shell_complete=completing.names)
@options.offline_option
@options.hubs_option
@options.quiet_option
@options.json_option
def show_command(
    name: str, offline: bool, hubs: tuple[str, ...], quiet: bool, as_json: bool
) -> None:
    """Show what was measured first, then what others and upstream report, with earlier values.

    A folder that begins with ./, ../, / or ~ shows the scores beside its rotation. The word show
    may be left out.

    \b
    Examples:
      oscar-zoo scores show Qwen3-8B
      oscar-zoo scores show Qwen3-8B --hub hf:my-org/zoo --json
      oscar-zoo scores show ./my-rotation
    """
    from oscar_zoo.app.scores import known_scores
    from oscar_zoo.cli.render import scores as render
    from oscar_zoo.cli.render.progress import TerminalObserver
    from oscar_zoo.registry.hubs.address import Sources

    observer = TerminalObserver(quiet=quiet, as_json=as_json)
    known = known_scores(name, Sources(hubs, offline=offline), observer)
    if as_json:
        terminal.emit_json(render.scores_json(known))
        return
    render.print_scores(known)
    if not known:
        terminal.note(render.nothing_known(name), quiet=quiet)
    for text in (text for artifact in known for text in artifact.warnings):
        terminal.note(f"warning: {text}", quiet=quiet)
    for step in render.next_steps(known):
        terminal.note(step, quiet=quiet)


@command.command("add", short_help="Attach the records of a score file to a published version.")
@click.argument("name", metavar="NAME:TAG", shell_complete=completing.versions)
@click.argument("file", metavar="FILE", type=click.Path(path_type=Path))
@options.create_pr_option
@options.targets_option
@options.quiet_option
@options.json_option
def add_command(
    name: str, file: Path, hubs: tuple[str, ...], create_pr: bool, quiet: bool, as_json: bool
) -> int:
    """Attach the records of a score file to a version of a hub.

    FILE is what oscar-zoo eval writes, and must be about exactly these bytes. Only the hub's index
    and card change. A value that is there already is kept in the history of the new one.

    \b
    Examples:
      oscar-zoo scores add Qwen3-8B:seq20000_prompt83_group128 gpqa.json
      oscar-zoo scores add Qwen3-8B@sha256:3f9a12b4c5d6 gpqa.json --hub hf:my-org/zoo
      oscar-zoo scores add Qwen3-8B:seq512_prompt2_group128 gpqa.json --create-pr
    """
    from oscar_zoo.app.scores import AddScoresRequest, add_all
    from oscar_zoo.cli.main import exit_code
    from oscar_zoo.cli.render import scores as render
    from oscar_zoo.cli.render.progress import TerminalObserver
    from oscar_zoo.cli.render.writing import emit_report
    from oscar_zoo.registry.writing import ignore

    request = AddScoresRequest(name, file, hubs, propose=create_pr)
    show = ignore if as_json else partial(render.print_added, quiet=quiet)
    with TerminalObserver(quiet=quiet, as_json=as_json) as observer:
        report = add_all(request, observer, show)
    rows = [render.added_row(written) for written in report.done]
    emit_report("oscar-zoo.scores-added/1", rows, report.error, as_json=as_json)
    return exit_code(report.error)
