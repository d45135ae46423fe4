"""`oscar-zoo verify`: check files, folders, trees or installed artifacts. Needs no torch."""

from __future__ import annotations

from pathlib import Path

import click

from oscar_zoo.cli import completing, options


@click.command("verify")
@click.argument(
    "targets",
    metavar="PATH|NAME...",
    nargs=-1,
    required=True,
    shell_complete=completing.stored_or_paths,
)
@click.option(
    "--model",
    metavar="NAME|DIR",
    help="The model the rotation is for: its geometry is checked too.",
    shell_complete=completing.models,
)
@click.option(
    "--digest", metavar="SHA256", help="Digest the file or artifact must have (one target only)."
)
@click.option(
    "--strict", is_flag=True, help="Apply the rules of publishing: names and roles must agree."
)
@options.signature_options
@options.quiet_option
@options.json_option
def command(
    targets: tuple[str, ...],
    model: str | None,
    digest: str | None,
    strict: bool,
    require_signature: bool,
    keys: tuple[Path, ...],
    quiet: bool,
    as_json: bool,
) -> int:
    """Check rotation files, artifact folders, or whole trees of them; no manifest is needed.

    A PATH is one rotation file, a folder with a K/V pair, or a tree of such folders; folders begin
    with ./, ../, / or ~. A NAME is an artifact that was pulled before. Untrusted bytes are read by
    a strict parser; nothing in them is ever executed. The exit code is 4 when an artifact fails.
    With --quiet only failures are printed.

    A signature beside oscar.json is held against the files and shown. It decides nothing, unless
    --require-signature asks for one of a known key.

    \b
    Examples:
      oscar-zoo verify ./OSCAR-RotationZoo
      oscar-zoo verify Qwen3-8B --model ./my-qwen3 --strict
      oscar-zoo verify ./Qwen3.5-4B/calibrated --model Qwen3.5-4B --json
      oscar-zoo verify Qwen3-8B --require-signature --key ./their-key.pem
    """
    from oscar_zoo.app.targets import parse
    from oscar_zoo.app.verify import VerifyRequest, verify_all
    from oscar_zoo.artifact.outcome import Verified
    from oscar_zoo.cli.render import outcomes
    from oscar_zoo.cli.render.progress import TerminalObserver
    from oscar_zoo.registry.signatures import SignatureWish

    signing = SignatureWish(require_signature, keys)
    request = VerifyRequest(tuple(map(parse, targets)), model, digest, strict, signing)
    results = verify_all(request, TerminalObserver(quiet=quiet, as_json=as_json))
    warnings = list(dict.fromkeys(text for checked in results for text in checked.warnings))
    if as_json:
        outcomes.emit_results(results, warnings)
    else:
        outcomes.print_results(results, warnings, model=model, digest=digest, quiet=quiet)
    return 0 if all(isinstance(checked.outcome, Verified) for checked in results) else 4
