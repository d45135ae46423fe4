"""`oscar-zoo verify`: check files, folders, trees or installed artifacts. Needs no torch."""

from __future__ import annotations

import click

from oscar_zoo.cli import options, render


@click.command("verify")
@click.argument("targets", metavar="PATH|NAME...", nargs=-1, required=True)
@click.option("--model", metavar="NAME|DIR", help="The model the rotation is for: its geometry is checked too.")
@click.option("--digest", metavar="SHA256", help="Digest the file or artifact must have (one target only).")
@click.option("--strict", is_flag=True, help="Apply the rules of publishing: names and roles must agree.")
@options.json_option
def command(targets: tuple[str, ...], model: str | None, digest: str | None, strict: bool, as_json: bool) -> int:
    """Check rotation files, artifact folders, or whole trees of them; no manifest is needed.

    A PATH is one rotation file, a folder with a K/V pair, or a tree of such folders. A NAME is an artifact that was
    pulled before. Untrusted bytes are read by a strict parser; nothing in them is ever executed.

    \b
    Examples:
      oscar-zoo verify ./OSCAR-RotationZoo
      oscar-zoo verify k_rotation.pt --digest sha256:3f9a...
      oscar-zoo verify ./Qwen3.5-4B/calibrated --model Qwen3.5-4B --json
    """
    from oscar_zoo.artifact.names import check_digest
    from oscar_zoo.artifact.outcome import Verified
    from oscar_zoo.cli import outcomes
    from oscar_zoo.cli.targets import looks_like_path, verify_targets
    from oscar_zoo.errors import UsageError

    if digest is not None and len(targets) > 1:
        raise UsageError("--digest goes with exactly one target.")
    if digest is not None:
        digest = check_digest("sha256:" + digest.lower().removeprefix("sha256:"))
    results = verify_targets(targets, model=model, digest=digest, strict=strict)
    failed = [outcome for _, outcome in results if not isinstance(outcome, Verified)]
    if as_json:
        rows = [outcomes.outcome_json(path, outcome) for path, outcome in results]
        render.emit_json({"schema": "oscar-zoo.verify/1", "ok": not failed, "results": rows})
        return 4 if failed else 0
    console = render.out()
    for path, outcome in results:
        outcomes.print_outcome(console, path, outcome)
    if len(results) > 1:
        console.print(f"{len(results) - len(failed)} of {len(results)} artifacts passed")
    for path, outcome in results:
        step = outcomes.next_step(outcome, stored_as=None if looks_like_path(path) else path)
        if step is not None:
            render.note(f"Next: {step}" if len(results) == 1 else f"Next, {path}: {step}")
    return 4 if failed else 0
