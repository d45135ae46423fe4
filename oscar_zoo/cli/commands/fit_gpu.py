"""`oscar-zoo fit-gpu`: how much of a model fits a GPU. Needs no torch and no GPU."""

from __future__ import annotations

from typing import Any

from oscar_zoo.cli import build
from oscar_zoo.cli.render import terminal
from oscar_zoo.serving.params import FitGpuParams
from oscar_zoo.verb import checked


def _body(as_json: bool, **values: Any) -> int:
    from oscar_zoo.cli.render.fit_gpu import print_fit
    from oscar_zoo.serving.fit_gpu import run
    from oscar_zoo.verb import as_json as plain

    params = checked(FitGpuParams, values)
    report = run(params)
    if as_json:
        terminal.emit_json(plain(report))
    else:
        print_fit(report, verdict=params.requests is not None)
    return 0


command = build.of_body("fit-gpu", FitGpuParams, _body, quiet=False)
