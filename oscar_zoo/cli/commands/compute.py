"""`oscar-zoo compute`: fit a rotation for a model."""

from __future__ import annotations

from typing import Any

import click

from oscar_zoo.app.compute_request import METHODS, ComputeRequest
from oscar_zoo.cli import completing, options, parsing
from oscar_zoo.cli.render import terminal
from oscar_zoo.errors import UsageError
from oscar_zoo.observer import Note


@click.command("compute")
@click.argument("model", required=False, shell_complete=completing.models)
@click.option("--model-path", metavar="MODEL", help="Another way to give MODEL.")
@click.option(
    "--calib-data",
    default=ComputeRequest.calib_data,
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
    default=ComputeRequest.method,
    show_default=True,
    help="How to fit; auto measures all on held-out text and keeps the best.",
)
@click.option(
    "--compat",
    is_flag=True,
    help="Only what the OSCAR server loads: one rotation per layer (--method oscar).",
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
    "--bits",
    metavar="BITS",
    help=(
        "2 or 4: all codes have so many bits. Another number is a budget: at most so many bits for"
        " a stored element on average, its share of scales and offsets included, spent on codes of"
        " 4 bits where they gain most (in groups of 128, codes of 2 bits cost 2.25 and codes of 4"
        " bits 4.25). auto: the smallest budget up to 3.25 that keeps the model's recall and 0.2 %"
        " of perplexity. [default: 2 where that passes the quality gates, else auto, else 4]"
    ),
)
@options.max_loss_option
@click.option(
    "--resume/--no-resume",
    default=None,
    help="Go on from what an interrupted run of the same command left. [default: where it did]",
)
@options.output_dir_option
@click.option("--model-id", metavar="ORG/NAME", help="Identity to record for a local folder.")
@options.revision_option
@options.recorded_clip_option("the recipe's")
@options.group_size_option("the recipe's")
@options.dtype_option
@options.devices_option
@options.stream_option
@options.offline_option
@options.force_option
@options.quiet_option
@options.json_option
def command(
    model: str | None,
    model_path: str | None,
    method: str,
    compat: bool,
    no_tune: bool,
    bits: str | None,
    max_loss: str | None,
    clip: str | None,
    offline: bool,
    quiet: bool,
    as_json: bool,
    **choices: Any,
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
      oscar-zoo compute ./my-model --bits 2.75
    """
    from oscar_zoo.app.compute import compute
    from oscar_zoo.cli.pasting import typed_again
    from oscar_zoo.cli.render.computing import next_steps, print_result, result_facts
    from oscar_zoo.cli.render.progress import TerminalObserver

    if offline:
        options.go_offline()
    chosen = _one_model(model, model_path)
    method = "oscar" if compat else method
    if compat and (bits is not None or max_loss is not None):
        raise UsageError(
            "the OSCAR server reads codes of 2 bits only, so --compat has no other bits.",
            hint="leave out --compat, or --bits and --max-loss",
        )
    request = ComputeRequest(
        chosen,
        method=method,
        tune=not no_tune,
        bits=parsing.parse_bits(bits),
        max_loss=parsing.parse_percent(max_loss, "--max-loss"),
        clip=parsing.parse_clip(clip),
        **choices,
    )
    with TerminalObserver(quiet=quiet, as_json=as_json) as observer:
        try:
            result = compute(request, observer)
        except (KeyboardInterrupt, SystemExit) as error:
            if hasattr(error, "__notes__"):  # something is kept
                error.add_note(f"to go on from there: {typed_again('--resume')}")
            raise
    if as_json:
        terminal.emit_json(result_facts(result))
        return
    print_result(result)
    *files, step = next_steps(result, chosen, request.revision)
    for line in files:
        terminal.note(line, quiet=quiet)
    for text in result.notes:
        observer.note(Note("compute.remark", text))
    terminal.note(step, quiet=quiet)


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
