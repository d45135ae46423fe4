"""The commands that show what the zoo has and change what it says: each from its parameters, its
use case and its view. Needs no torch."""

from __future__ import annotations

from functools import cache

import click

from oscar_zoo.cli import build
from oscar_zoo.site import params

VERBS: dict[str, tuple[type, str, str]] = {
    "list": (params.ListParams, "listing:listing", "listing:print_listing"),
    "search": (params.SearchParams, "listing:found", "listing:print_found"),
    "leaderboard": (params.LeaderboardParams, "listing:ranked", "listing:print_board"),
    "compare": (params.CompareParams, "compare:run", "comparison:print_comparison"),
    "card": (params.CardParams, "card:run", "site:print_card"),
    "scores show": (params.ScoresParams, "scores:run", "scores:print_scores"),
    "scores add": (params.AddScoresParams, "scores:add", "scores:print_added"),
    "yank": (params.YankParams, "status:run", "site:print_status"),
    "unyank": (params.UnyankParams, "status:run", "site:print_status"),
    "deprecate": (params.DeprecateParams, "status:run", "site:print_status"),
    "site": (params.SiteParams, "build:run", "site:print_site"),
    "cache list": (params.CacheListParams, "cache:stored", "site:print_stored"),
    "cache verify": (params.CacheVerifyParams, "cache:check", "site:print_checks"),
    "cache gc": (params.CacheGcParams, "cache:collect", "site:print_freed"),
    "cache rm": (params.CacheRmParams, "cache:remove", "site:print_removed"),
    "cache dir": (params.CacheDirParams, "cache:folder", "site:print_folder"),
}
"""Name -> parameters, use case in `oscar_zoo.site`, view in `oscar_zoo.cli.render`."""
SHORT = {
    "scores show": "Show the scores of a model's artifacts, or of one.",
    "scores add": "Attach the records of a score file to a published version.",
    "cache list": "Show what is stored, and how much room it takes.",
    "cache verify": "Hash and verify every stored artifact again.",
    "cache gc": "Remove what no stored artifact needs.",
    "cache rm": "Remove artifacts from the store.",
    "cache dir": "Print the folder of the store.",
}
"""What the help of a group says of its commands."""
TOLD_TO_BE_QUIET = {"scores show", "scores add", "yank", "unyank", "deprecate", "site"}
"""Commands with a `-q` of their own, which have progress or a next step to leave out."""


@cache
def verb(name: str) -> click.Command:
    """The command of one row."""
    if name == "info":  # its view knows the words of `verify`
        run, view = "oscar_zoo.cli.render.described:run", "oscar_zoo.cli.render.described"
        return build.command(
            name, params.InfoParams, run=run, view=f"{view}:print_facts", quiet=False
        )
    kind, run, view = VERBS[name]
    made = build.command(
        name.split()[-1],
        kind,
        run=f"oscar_zoo.site.{run}",
        view=f"oscar_zoo.cli.render.{view}",
        quiet=name in TOLD_TO_BE_QUIET,
        then="oscar_zoo.cli.render.site:serve" if name == "site" else None,
    )
    made.short_help = SHORT.get(name)
    return made


def group(name: str) -> click.Group:
    """One of the two groups with its commands."""
    made = {"cache": _cache, "scores": _scores}[name]
    for row in VERBS:
        if row.startswith(f"{name} "):
            made.add_command(verb(row))
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
