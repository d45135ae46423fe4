"""What `card` shows."""

from __future__ import annotations

import click

from oscar_zoo.app.card import Card
from oscar_zoo.cli.render import terminal


def emit_card(made: Card) -> None:
    """The JSON of `card`."""
    facts = {
        "output": None if made.output is None else str(made.output),
        "artifacts": list(made.artifacts),
        "report": [str(path) for path in made.report],
        "card": made.content.decode("utf-8", "replace"),
    }
    terminal.emit_json({"schema": "oscar-zoo.card/1"} | facts)


def print_card(made: Card) -> None:
    """The card itself, or where it was written."""
    if made.output is None:
        click.echo(made.content.decode("utf-8", "replace"), nl=False)
        return
    many = "1 artifact" if len(made.artifacts) == 1 else f"{len(made.artifacts)} artifacts"
    beside = f", its report beside it: {len(made.report)} files" if made.report else ""
    terminal.out().print(terminal.clean(f"Wrote {made.output}: {many}{beside}"))
