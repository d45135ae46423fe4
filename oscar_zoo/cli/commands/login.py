"""`oscar-zoo login`: the hub's own login, and who one is then. Nothing is stored by this
program."""

from __future__ import annotations

from oscar_zoo.cli import build
from oscar_zoo.registry.params import LoginParams

command = build.command(
    "login",
    LoginParams,
    run="oscar_zoo.registry.login:run",
    view="oscar_zoo.cli.render.writing:print_account",
)
