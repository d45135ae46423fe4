"""`oscar-zoo compute`: fit a rotation for a model."""

from __future__ import annotations

from pathlib import Path
from shlex import quote
from typing import Any

import click

from oscar_zoo.cli import completing, options
from oscar_zoo.cli.render import terminal
from oscar_zoo.errors import UsageError

METHODS = ("auto", "oscar", "oscar-exact", "oscar-per-head", "wush", "wush-tuned", "hadamard")


@click.command("compute")
@click.argument("model", required=False, shell_complete=completing.models)
@click.option("--model-path", metavar="MODEL", help="Another way to give MODEL.")
@click.option(
    "--calib-data",
    default="manuals",
    show_default=True,
    metavar="SOURCE",
    help=(
        "Text or JSONL file, folder of such, a text known by name (manuals, wikitext, mmlu,"
        " gpqa_diamond, ..), or a Hugging Face dataset: ORG/NAME[@REV][:CONFIG][:SPLIT][#FIELD]."
    ),
)
@click.option(
    "--calib-tokens",
    type=click.IntRange(1),
    metavar="N",
    help="Tokens to read. [default: the recipe's]",
)
@click.option(
    "--seq-len",
    type=click.IntRange(2),
    metavar="N",
    help="Tokens per sequence. [default: up to 4096]",
)
@click.option(
    "--method",
    type=click.Choice(METHODS),
    default="auto",
    show_default=True,
    help="How to fit; auto measures all on held-out text and keeps the best.",
)
@click.option(
    "--compat",
    is_flag=True,
    help="Only what the OSCAR server loads: one rotation per layer (--method oscar).",
)
@click.option(
    "--engine",
    type=click.Choice(["transformers", "sglang"]),
    default="transformers",
    show_default=True,
    help=(
        "What runs the model; several processes with transformers: torchrun -m oscar_zoo"
        " compute ..."
    ),
)
@click.option(
    "--tensor-parallel",
    type=click.IntRange(1),
    default=1,
    metavar="N",
    help="Ranks of the sglang engine.",
)
@click.option(
    "--chat-template/--no-chat-template",
    default=None,
    help="Render text as chat, or chats as text.",
)
@click.option(
    "--seed",
    type=click.IntRange(0),
    metavar="N",
    help="Shuffle the documents. [default: as they come]",
)
@click.option(
    "--allow-overlap",
    is_flag=True,
    help="Calibrate although the text holds questions of an evaluation set.",
)
@click.option("--allow-poor", is_flag=True, help="Write a result that fails its quality gates.")
@click.option(
    "--fast",
    is_flag=True,
    help="With auto, choose by errors of attention alone: no perplexity, no recall.",
)
@click.option(
    "--no-tune",
    is_flag=True,
    help="With auto, leave out wush-tuned, which runs over the text once more.",
)
@click.option(
    "--resume", is_flag=True, help="Go on from what an interrupted run of the same command left."
)
@click.option(
    "--output-dir",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="[default: ./<Model>/<tag>]",
)
@click.option("--model-id", metavar="ORG/NAME", help="Identity to record for a local folder.")
@options.revision_option
@click.option(
    "--clip",
    metavar="K,V",
    help="Clip ratios to record for serving. [default: the recipe's, else 0.96,0.92]",
)
@click.option(
    "--group-size",
    type=click.IntRange(4),
    metavar="N",
    help="Channels per scale. [default: the recipe's]",
)
@options.dtype_option
@options.devices_option
@options.stream_option
@click.option(
    "--force", is_flag=True, help="Replace an artifact that is already in the output folder."
)
@options.quiet_option
@options.json_option
def command(
    model: str | None,
    model_path: str | None,
    calib_data: str,
    clip: str | None,
    group_size: int | None,
    quiet: bool,
    as_json: bool,
    **choices: object,
) -> None:
    """Fit a rotation for MODEL: a local folder, a name of the zoo, or an id such as Qwen/Qwen3-8B.

    A folder begins with ./, ../, / or ~. Without that, a name of the zoo wins; an id, or another
    name, means a folder of that name when it holds a config.json, as it does for transformers.

    Runs the model over calibration text once and keeps only sums (nothing of the size of the cache
    touches the disk), fits every method, measures each on held-out text, and writes the best as a
    verified artifact. Beside it: the moments, from which `oscar-zoo fit` makes other methods
    without the model, and a report.

    \b
    Examples:
      oscar-zoo compute Qwen/Qwen3-8B --calib-data prompts.jsonl --calib-tokens 8192
      oscar-zoo compute ./my-model --calib-data text.txt --output-dir ./my-rotation --method wush
    """
    from oscar_zoo.app.devices import require_compute
    from oscar_zoo.cli.computing import watched
    from oscar_zoo.cli.loading import compute_options, refused_by_serve, will_be_refused
    from oscar_zoo.cli.pasting import model_argument, pasted, saved, typed
    from oscar_zoo.cli.render.choice import print_choice
    from oscar_zoo.registry.summary import artifact_summary

    require_compute()
    from oscar_zoo.compute.job import compute_artifact

    model = _one_model(model, model_path)
    wanted = compute_options(model, calib_data, clip, group_size, choices)
    told: list[str] = []
    refused = refused_by_serve(wanted.model, wanted.revision)
    with watched(wanted, enabled=not (quiet or as_json)) as shown:

        def tell(text: str) -> None:
            told.append(text)
            shown.note(f"note: {text}")

        if refused is not None:
            tell(will_be_refused(refused))
        result = compute_artifact(wanted, progress=shown, tell=tell)
    if result is None:  # a process of torchrun that only lent a hand
        return
    if as_json:
        facts: dict[str, Any] = {"schema": "oscar-zoo.compute/1", "path": typed(result.path)}
        facts |= {"notes": [*told, *result.notes]}
        facts |= {
            "moments": typed(result.moments) if result.moments else None,
            "seconds": dict(result.seconds),
        }
        facts |= {"report": typed(result.report) if result.report else None}
        facts |= {"selection": result.manifest.fit.selection, "quality": result.manifest.quality}
        terminal.emit_json(facts | artifact_summary(result.manifest))
        return
    if result.choice is not None:
        print_choice(result.choice)
    terminal.out().print(saved(result.path, result.manifest))
    if result.report is not None:
        terminal.note(f"Report: {typed(result.report)}", quiet=quiet)
    if result.moments is not None:
        terminal.note(
            f"Moments beside it, for another method without the model: {typed(result.moments)}",
            quiet=quiet,
        )
    for note in result.notes:
        terminal.note(f"note: {note}", quiet=quiet)
    at = f" --revision {quote(wanted.revision)}" if wanted.revision else ""
    terminal.note(
        f"Next: oscar-zoo eval {pasted(result.path)} --model {model_argument(model)}{at}",
        quiet=quiet,
    )


def _one_model(argument: str | None, option: str | None) -> str:
    """The model of a command line, given in one of two ways; raises `UsageError`."""
    if argument is not None and option is not None:
        raise UsageError("MODEL and --model-path say the same.", hint="give one of the two")
    model = argument or option
    if model is None:
        raise UsageError(
            "no model is given.", hint="oscar-zoo compute MODEL, or --model-path MODEL"
        )
    return model
