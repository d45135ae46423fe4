"""The table of verbs: commands that are nothing but parameters, a use case and a view.
Each is made when it is first used."""

from __future__ import annotations

from typing import NamedTuple

import click

from oscar_zoo.cli import build


class Verb(NamedTuple):
    """Parameters and use case below `oscar_zoo`, view below `cli.render`, what the help of its
    group says of it, whether it has a `-q` of its own, what runs behind its result, and whether
    it is observed."""

    params: str
    run: str
    view: str
    short: str | None = None
    quiet: bool = False
    then: str | None = None
    observed: bool = True


VERBS = {
    "compute": Verb(
        "compute.params:ComputeCommand", "compute.compute:run", "computing:show", quiet=True
    ),
    "fit": Verb("compute.params:FitParams", "compute.fit:run", "computing:show_fit", quiet=True),
    "merge-moments": Verb(
        "compute.params:MergeParams", "compute.fit:merge", "computing:show_merged", quiet=True
    ),
    "plot": Verb("compute.params:PlotParams", "compute.fit:draw", "computing:show_drawn"),
    "verify": Verb(
        "registry.params:VerifyParams", "registry.verify:run", "outcomes:print_report", quiet=True
    ),
    "publish": Verb(
        "registry.params:PublishParams",
        "registry.publish:run",
        "writing:print_published",
        quiet=True,
    ),
    "login": Verb(
        "registry.params:LoginParams", "registry.login:run", "writing:print_account", quiet=True
    ),
    "fit-gpu": Verb(
        "serving.params:FitGpuParams", "serving.fit_gpu:run", "fit_gpu:print_fit", observed=False
    ),
    "ps": Verb(
        "serving.params:PsParams", "serving.servers:ps", "servers:print_servers", observed=False
    ),
    "doctor": Verb(
        "serving.params:DoctorParams",
        "serving.doctor:examine",
        "findings:print_findings",
        then="oscar_zoo.cli.render.findings:failed",
        observed=False,
    ),
    "stop": Verb(
        "serving.params:StopParams", "serving.servers:stop", "servers:print_stopped", quiet=True
    ),
    "list": Verb("site.params:ListParams", "site.listing:listing", "listing:print_listing"),
    "search": Verb("site.params:SearchParams", "site.listing:found", "listing:print_found"),
    "leaderboard": Verb(
        "site.params:LeaderboardParams", "site.listing:ranked", "listing:print_board"
    ),
    "info": Verb("site.params:InfoParams", "cli.render.described:run", "described:print_facts"),
    "compare": Verb("site.params:CompareParams", "site.compare:run", "comparison:print_comparison"),
    "card": Verb("site.params:CardParams", "site.card:run", "site:print_card"),
    "site": Verb(
        "site.params:SiteParams",
        "site.build:run",
        "site:print_site",
        quiet=True,
        then="oscar_zoo.cli.render.site:serve",
    ),
    "yank": Verb("site.params:YankParams", "site.status:run", "site:print_status", quiet=True),
    "unyank": Verb("site.params:UnyankParams", "site.status:run", "site:print_status", quiet=True),
    "deprecate": Verb(
        "site.params:DeprecateParams", "site.status:run", "site:print_status", quiet=True
    ),
    "scores show": Verb(
        "site.params:ScoresParams",
        "site.info:run_scores",
        "scores:print_scores",
        "Show the scores of a model's artifacts, or of one.",
        quiet=True,
    ),
    "scores add": Verb(
        "site.params:AddScoresParams",
        "site.status:add",
        "scores:print_added",
        "Attach the records of a score file to a published version.",
        quiet=True,
    ),
    **{
        f"cache {name}": Verb(
            f"site.params:Cache{name.title()}Params", f"site.cache:{run}", f"site:{view}", says
        )
        for name, run, view, says in (
            ("list", "stored", "print_stored", "Show what is stored, and how much room it takes."),
            ("verify", "check", "print_checks", "Hash and verify every stored artifact again."),
            ("gc", "collect", "print_freed", "Remove what no stored artifact needs."),
            ("rm", "remove", "print_removed", "Remove artifacts from the store."),
            ("dir", "folder", "print_folder", "Print the folder of the store."),
        )
    },
}


def verb(name: str) -> click.Command:
    """The command of one row."""
    row = VERBS[name]
    made = build.command(
        name.split()[-1],
        build.named(f"oscar_zoo.{row.params}"),
        run=f"oscar_zoo.{row.run}",
        view=f"oscar_zoo.cli.render.{row.view}",
        quiet=row.quiet,
        then=row.then,
        observed=row.observed,
    )
    made.short_help = row.short
    return made


@click.group("cache")
def _cache() -> None:
    """Look after the artifacts that were pulled: list, check, remove, free space.

    \b
    Examples:
      oscar-zoo cache list
      oscar-zoo cache verify
      oscar-zoo cache rm Qwen3-8B:seq20000_prompt83_group128
      oscar-zoo cache gc --dry-run
    """


class _NameOrCommand(click.Group):
    """A group in which a first word that is no command is the name of an artifact to show."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        known = {*self.commands, *self.get_help_option_names(ctx)}
        return super().parse_args(ctx, ["show", *args] if args and args[0] not in known else args)


@click.group("scores", cls=_NameOrCommand, subcommand_metavar="NAME[:TAG]|DIR | COMMAND [ARGS]...")
def _scores() -> None:
    """Show the scores of artifacts with their history, or attach measured ones.

    \b
    Examples:
      oscar-zoo scores Qwen3-8B
      oscar-zoo scores Qwen3-8B:seq20000_prompt83_group128 --json
      oscar-zoo scores add Qwen3-8B:seq20000_prompt83_group128 gpqa.json
    """


GROUPS = {"cache": _cache, "scores": _scores}


def group(name: str) -> click.Group:
    """One of the two groups with its commands."""
    made = GROUPS[name]
    for row in VERBS:
        if row.startswith(f"{name} "):
            made.add_command(verb(row))
    return made
