"""`oscar-zoo compute`: fit a rotation for a model."""

from __future__ import annotations

from pathlib import Path
from shlex import quote
from typing import Any

import click

from oscar_zoo.cli import options, render

METHODS = ("auto", "oscar", "oscar-exact", "oscar-per-head", "wush", "wush-tuned", "hadamard")


@click.command("compute")
@click.argument("model")
@click.option(
    "--calib-data",
    default="manuals",
    show_default=True,
    metavar="SOURCE",
    help="Text or JSONL file, folder of such, a text known by name, or a Hugging Face dataset: "
    "ORG/NAME[@REV][:CONFIG][:SPLIT][#FIELD].",
)
@click.option("--calib-tokens", type=click.IntRange(1), metavar="N", help="Tokens to read. [default: the recipe's]")
@click.option("--seq-len", type=click.IntRange(2), metavar="N", help="Tokens per sequence. [default: up to 4096]")
@click.option(
    "--method",
    type=click.Choice(METHODS),
    default="auto",
    show_default=True,
    help="How to fit; auto measures all on held-out text and keeps the best.",
)
@click.option(
    "--compat", is_flag=True, help="Only what the OSCAR server loads: one rotation per layer (--method oscar)."
)
@click.option(
    "--engine",
    type=click.Choice(["transformers", "sglang"]),
    default="transformers",
    show_default=True,
    help="What runs the model; several processes with transformers: torchrun -m oscar_zoo compute ...",
)
@click.option("--tensor-parallel", type=click.IntRange(1), default=1, metavar="N", help="Ranks of the sglang engine.")
@click.option("--chat-template/--no-chat-template", default=None, help="Render text as chat, or chats as text.")
@click.option("--seed", type=click.IntRange(0), metavar="N", help="Shuffle the documents. [default: as they come]")
@click.option("--allow-overlap", is_flag=True, help="Calibrate although the text holds questions of an evaluation set.")
@click.option("--allow-poor", is_flag=True, help="Write a result that fails its quality gates.")
@click.option("--fast", is_flag=True, help="With auto, choose by errors of attention alone: no perplexity, no recall.")
@click.option("--no-tune", is_flag=True, help="With auto, leave out wush-tuned, which runs over the text once more.")
@click.option("--resume", is_flag=True, help="Go on from what an interrupted run of the same command left.")
@click.option("--output-dir", type=click.Path(path_type=Path), metavar="DIR", help="[default: ./<Model>/<tag>]")
@click.option("--model-id", metavar="ORG/NAME", help="Identity to record for a local folder.")
@options.revision_option
@click.option(
    "--clip", metavar="K,V", help="Clip ratios to record for serving. [default: the recipe's, else 0.96,0.92]"
)
@click.option("--group-size", type=click.IntRange(4), metavar="N", help="Channels per scale. [default: the recipe's]")
@options.dtype_option
@options.devices_option
@options.stream_option
@click.option("--force", is_flag=True, help="Replace an artifact that is already in the output folder.")
@options.quiet_option
@options.json_option
def command(
    model: str, calib_data: str, clip: str | None, group_size: int | None, quiet: bool, as_json: bool, **choices: object
) -> None:
    """Fit a rotation for MODEL: a local folder, a name of the zoo, or an id such as Qwen/Qwen3-8B.

    Runs the model over calibration text once and keeps only sums (nothing of the size of the cache touches the disk),
    fits every method, measures each on held-out text, and writes the best as a verified artifact. Beside it: the
    moments, from which `oscar-zoo fit` makes other methods without the model, and a report.

    \b
    Examples:
      oscar-zoo compute Qwen/Qwen3-8B --calib-data prompts.jsonl --calib-tokens 8192
      oscar-zoo compute ./my-model --calib-data text.txt --output-dir ./my-rotation --method wush
    """
    from oscar_zoo.cli.comparing import print_choice
    from oscar_zoo.cli.loading import compute_options, require_compute
    from oscar_zoo.registry.summary import artifact_summary

    require_compute()
    from oscar_zoo.compute.job import compute_artifact

    wanted = compute_options(model, calib_data, clip, group_size, choices)
    with render.progress("tokens", enabled=not (quiet or as_json)) as advance:
        result = compute_artifact(wanted, progress=advance)
    if result is None:  # a process of torchrun that only lent a hand
        return
    if as_json:
        facts: dict[str, Any] = {"schema": "oscar-zoo.compute/1", "path": str(result.path)}
        facts |= {"notes": list(result.notes)}
        facts |= {"moments": str(result.moments) if result.moments else None, "seconds": dict(result.seconds)}
        facts |= {"report": str(result.report) if result.report else None}
        facts |= {"selection": result.manifest.fit.selection, "quality": result.manifest.quality}
        render.emit_json(facts | artifact_summary(result.manifest))
        return
    if result.choice is not None:
        print_choice(result.choice)
    render.out().print(f"Saved {render.clean(result.path)}  {result.manifest.id}  {result.manifest.digest}")
    if result.report is not None:
        render.note(f"Report: {result.report}", quiet=quiet)
    if result.moments is not None:
        render.note(f"Moments beside it, for another method without the model: {result.moments}", quiet=quiet)
    for note in result.notes:
        render.note(f"note: {note}", quiet=quiet)
    render.note(f"Next: oscar-zoo eval {quote(str(result.path))} --model {quote(model)}", quiet=quiet)
