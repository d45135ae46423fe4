"""`oscar-zoo ruler`: facts in long prompts, over length and depth."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import click

from oscar_zoo.app.ruler import CACHES, FAMILIES, RulerRequest, ask
from oscar_zoo.cli import completing, options, parsing
from oscar_zoo.cli.render import terminal
from oscar_zoo.errors import UsageError

FORMATS = (".html", ".png")


@click.command("ruler")
@click.argument("artifact", metavar="NAME|DIR", shell_complete=completing.names_or_paths)
@click.option(
    "--model",
    metavar="MODEL",
    help="Model folder, zoo name or hub id. [default: the artifact's base model]",
    shell_complete=completing.models,
)
@click.option(
    "--family",
    "families",
    type=click.Choice(FAMILIES),
    multiple=True,
    help="Kind of prompts. Can be repeated. [default: all]",
)
@click.option(
    "--lengths",
    metavar="N,...",
    help="Tokens of the prompts. [default: 1024 and its doubles up to what the model takes]",
)
@click.option(
    "--depths",
    type=click.IntRange(1, 101),
    default=RulerRequest.depths,
    show_default=True,
    metavar="N",
    help="Places of the fact that is asked for.",
)
@click.option(
    "--samples",
    type=click.IntRange(1),
    default=RulerRequest.samples,
    show_default=True,
    metavar="N",
    help="Prompts for each family, length and depth.",
)
@click.option(
    "--cache",
    "caches",
    type=click.Choice(CACHES),
    multiple=True,
    help="Cache to measure. Can be repeated. [default: all but int2-hadamard-clip]",
)
@click.option(
    "--url",
    "servers",
    metavar="URL",
    multiple=True,
    help="Ask this running server, not a model in this process. Can be repeated.",
)
@options.api_key_file_option
@click.option(
    "--data",
    default=RulerRequest.data,
    show_default=True,
    metavar="FILE|NAME",
    help="Text between the facts: a file, or a text known by name.",
)
@click.option(
    "--seed", type=click.IntRange(0), default=RulerRequest.seed, show_default=True, metavar="N",
    help="The same seed gives the same prompts.",
)  # fmt: skip
@click.option("--clip", metavar="K,V", help="Clip ratios to use in place of the recipe's.")
@click.option(
    "--plot",
    type=click.Path(path_type=Path),
    metavar="FILE",
    multiple=True,
    help="Also draw the maps, length by depth: an .html or a .png file. Can be repeated.",
)
@options.dtype_option
@options.revision_option
@options.offline_option
@options.hubs_option
@options.devices_option
@options.stream_option
@options.quiet_option
@options.json_option
def command(
    artifact: str,
    families: tuple[str, ...],
    lengths: str | None,
    caches: tuple[str, ...],
    clip: str | None,
    plot: tuple[Path, ...],
    offline: bool,
    quiet: bool,
    as_json: bool,
    **choices: Any,
) -> int:
    """Ask for facts in long prompts, with the cache of an artifact, BF16 and plain INT2.

    The prompts are of the families of RULER: one needle in a text, one of eight, all values of a
    key, several needles, variable tracking, the most common words of a list, and documents. An
    answer is right when every one of its tokens is the model's most likely one.

    The result is the share of right answers for each cache and length, and with --plot a map of
    length by depth for each cache.

    \b
    Examples:
      oscar-zoo ruler Qwen3-8B --lengths 4096,16384,65536 --plot map.html --plot map.png
      oscar-zoo ruler ./my-rotation --model ./my-model --family single --depths 11
      oscar-zoo ruler Qwen3-8B --url http://127.0.0.1:30000 --json
    """
    from oscar_zoo.artifact.output_files import check_file
    from oscar_zoo.cli.render.long_context import print_report
    from oscar_zoo.cli.render.progress import TerminalObserver
    from oscar_zoo.cli.saving import save_after_result

    for file in plot:
        if file.suffix.lower() not in FORMATS:
            raise UsageError(
                f"{file} is neither a page nor a picture.", hint="name an .html or a .png file"
            )
        check_file(file)
    if offline:
        options.go_offline()  # before the libraries below are imported
    given = {name: value for name, value in choices.items() if value not in (None, ())}
    given |= {"families": families} if families else {}
    given |= {"caches": caches} if caches else {}
    if lengths is not None:
        given["lengths"] = parsing.numbers("--lengths", lengths)
    request = RulerRequest(artifact, clip=parsing.parse_clip(clip), **given)
    with TerminalObserver(quiet=quiet, as_json=as_json) as observer:
        report = ask(request, observer)
    if as_json:
        terminal.emit_json(report.to_json())
    else:
        print_report(report)
    title = f"Facts in long prompts: {artifact}"

    def drawn(file: Path) -> bytes:
        if file.suffix.lower() == ".html":
            from oscar_zoo.evaluate.long_context.page import render_html

            return render_html(report, title)
        from oscar_zoo.evaluate.long_context.chart import render_png

        return render_png(report, title)

    files = {file: partial(drawn, file) for file in plot}
    return save_after_result(files, quiet=quiet or as_json)
