"""A parsed `serve` as a command line again: to suggest another one, and to run it in the
background."""

from __future__ import annotations

import shlex
from typing import Any

from oscar_zoo.cli.choosing import ServeRequest

PORT = 30000
"""The default of `--port`."""
TIMEOUT = 1800.0
"""The default of `--timeout`, in seconds."""


def arguments(request: ServeRequest, **changes: Any) -> list[str]:
    """The arguments behind `oscar-zoo` that mean `request`.

    Args:
        changes: options to add or to replace, by their names; `None` leaves one out.
    """
    values: dict[str, Any] = {
        "model": request.model,
        "revision": request.revision,
        "port": None if request.port == PORT else request.port,
        "expose": request.expose,
        "api-key-file": request.api_key_file,
        "clip": request.clip,
        "timeout": None if request.timeout == TIMEOUT else request.timeout,
        "calib-data": request.calib_data,
        "device": request.device,
        "compute": request.compute,
        "offline": request.offline,
        "detach": request.detach,
        "quiet": request.quiet,
        "json": request.as_json,
    }
    values |= {name.replace("_", "-"): value for name, value in changes.items()}
    words = ["serve", request.artifact]
    for hub in request.hubs:
        words += ["--hub", hub]
    for name, value in values.items():
        if value is True:
            words.append(f"--{name}")
        elif value is not None and value is not False:
            words += [f"--{name}", str(value)]
    return [*words, *(["--", *request.extra] if request.extra else [])]


def command_line(request: ServeRequest, **changes: Any) -> str:
    """The same for a shell."""
    return "oscar-zoo " + shlex.join(arguments(request, **changes))
