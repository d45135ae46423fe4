"""`oscar-zoo ruler`: facts in long prompts, over length and depth."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from oscar_zoo.cli import build
from oscar_zoo.evaluate.params import RulerParams

if TYPE_CHECKING:
    from oscar_zoo.observer import Observer

FORMATS = (".html", ".png")


def run(params: RulerParams, observer: Observer) -> Any:
    """Ask, when the files can be written."""
    from oscar_zoo.artifact.durable import check_file
    from oscar_zoo.cli.commands.eval import check_plot
    from oscar_zoo.evaluate.ruler import ask

    for file in params.plots:
        check_plot(str(file), FORMATS)
        check_file(file)
    return ask(params, observer)


def after(report: Any, params: RulerParams, *, quiet: bool) -> int:
    """Draw the maps; 1 when one could not be written."""
    from oscar_zoo.cli.pasting import save_after_result

    def drawn(kind: Any) -> bytes:
        from oscar_zoo.evaluate.charts import recall_maps

        return recall_maps(report, f"Facts in long prompts: {params.artifact}", kind)

    kinds = {file: file.suffix.lower().removeprefix(".") for file in params.plots}
    files = {file: partial(drawn, kind) for file, kind in kinds.items()}
    return save_after_result(files, quiet=quiet)


command = build.command(
    "ruler",
    RulerParams,
    run=f"{__name__}:run",
    view="oscar_zoo.cli.render.evaluation:print_ruler",
    then=f"{__name__}:after",
)
