"""`oscar-zoo fit-gpu`: how much of a model fits a GPU. Needs no torch and no GPU."""

from __future__ import annotations

import click

from oscar_zoo.cli import completing, options, parsing


@click.command("fit-gpu")
@click.argument("model", metavar="MODEL|NAME:TAG|DIR", shell_complete=completing.names_or_paths)
@click.option(
    "--memory",
    "--gpu-memory",
    metavar="SIZE",
    help="Memory of one GPU, such as 24GiB; 24 and 24GB are the same, as GPUs are sold.",
)
@click.option(
    "--gpu",
    metavar="[N x] GPU",
    help="GPU to ask about instead of a memory, such as 'RTX 4090'; 2xH100 is --tp 2, too.",
)
@click.option(
    "--context",
    type=click.IntRange(1, 1 << 24),
    metavar="N",
    help="Tokens of each request. [default: 8192, or what the model takes at most]",
)
@click.option(
    "--requests",
    type=click.IntRange(1, 1 << 20),
    metavar="N",
    help="Requests that run at a time. [default: as many as serve lets run]",
)
@click.option(
    "--tp",
    "gpus",
    type=click.IntRange(1, 1024),
    metavar="N",
    help="GPUs that share the model. [default: 1 with --gpu, else those of its recipe]",
)
@click.option(
    "--weights",
    metavar="SIZE",
    help="Size of all weights, such as 16GB. [default: of its files, its shapes or its name]",
)
@click.option(
    "--bits",
    metavar="BITS",
    help=(
        "Bits of INT2 as for compute: 2 or 4 for all codes, or a budget such as 2.75."
        " [default: those of the artifact, else 2]"
    ),
)
@options.json_option
def command(
    model: str,
    memory: str | None,
    gpu: str | None,
    context: int | None,
    requests: int | None,
    gpus: int | None,
    weights: str | None,
    bits: str | None,
    as_json: bool,
) -> None:
    """Estimate how many tokens and requests of a model fit a GPU, with a BF16, an FP8 and an INT2
    KV cache.

    The model is a name of the zoo or a folder with a config.json; no hub is asked. INT2 has the
    bits of the artifact: of NAME:TAG, of an artifact's folder, or of the one that this machine
    knows for the model. Weights, the BF16 windows of INT2, sliding windows and the states of hybrid
    models share 85 % of the memory, divided as serve does. A name may lack facts about states; the
    answer is then a range, and says how to get the config.json.

    \b
    Examples:
      oscar-zoo fit-gpu Qwen3-8B --memory 24GiB
      oscar-zoo fit-gpu Qwen3-8B --gpu 'RTX 4090'
      oscar-zoo fit-gpu Qwen3-32B --gpu 2xH100 --context 32768
      oscar-zoo fit-gpu Qwen3-8B --memory 24GiB --bits 2.75
      oscar-zoo fit-gpu ./my-model --memory 141GB --requests 64 --json
    """
    from oscar_zoo.app.fit_gpu import FitRequest, fit
    from oscar_zoo.cli.render.fit_gpu import emit_fit, print_fit

    size = None if weights is None else parsing.parse_weights(weights)
    given = parsing.given_gpu(memory, gpu, gpus)
    report = fit(
        FitRequest(
            model,
            given.memory,
            context,
            requests,
            given.gpus,
            size,
            parsing.parse_bits(bits),
            memory_source=given.source,
        )
    )
    if as_json:
        emit_fit(report)
    else:
        print_fit(report, verdict=requests is not None)
