"""A server that is ready, and the command of `serve --print`, for people."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence

from oscar_zoo.cli.render import terminal
from oscar_zoo.cli.streams import with_bytes
from oscar_zoo.serving.params import ENGINES
from oscar_zoo.serving.serve import ReadyServer, ServeCommand


def print_ready(ready: ReadyServer, *, stop: str, new_key: bool = False) -> None:
    """The block for people; `new_key` is one that was made for this server, and whose file goes
    with it."""
    console = terminal.out()
    plain, code_bits = ready.plain_capacity, ready.code_bits
    more = f" (BF16 would hold {plain:,})" if plain is not None else ""
    wider = "" if code_bits == "2" else f" with codes of {code_bits} bits (keys/values)"
    files = f", and in files of up to {ready.disk_bytes / 1e9:.0f} GB" if ready.disk_bytes else ""
    rows = {
        "Model": f"{ready.model_id}, {ENGINES[ready.engine]} {ready.version} on {_where(ready)}",
        "Artifact": f"{ready.artifact}  {ready.digest}, verified to level {ready.level}",
        "Cache": (
            f"INT2{wider}, {ready.bits:.2f} bits per element, K clip {ready.clip['k'] or 'none'}, V"
            f" clip {ready.clip['v'] or 'none'}, first {ready.windows['sink']} and last"
            f" {ready.windows['recent']} tokens uncompressed"
        ),
        "Capacity": f"{ready.capacity:,} tokens{more}, {ready.requests} requests at a time",
        "Host": f"{ready.host_tokens:,} more tokens{files}" if ready.host_tokens else None,
        "Drafts": ready.drafts,
        "Ready": f"{ready.url}   ({ready.seconds:.0f} s)   stop with {stop}",
        "Try": ready.curl,
    }
    for name, text in rows.items():
        if text:
            console.print(f"{name:<9} {terminal.clean(text)}")
    if new_key and ready.key_file is not None:
        where = "in that file until the server ends; oscar-zoo chat finds it there"
        console.print(f"{'Key':<9} {where}")
        console.print(f"OPENAI_API_KEY={ready.key_file.read_text('utf-8').strip()}")


def _where(ready: ReadyServer) -> str:
    """What the server runs on, in words."""
    if ready.ranks == 1:
        return ready.device
    if ready.device == "cuda":
        return f"{ready.ranks} GPUs"
    shared = " that share the model" if ready.ranks == ready.tensor_parallel else ""
    return f"cpu, {ready.ranks} ranks{shared}"


def for_shell(argv: Sequence[str], env: Mapping[str, str], unset: Sequence[str] = ()) -> str:
    """One command that a shell runs as it stands, with one flag or variable per line."""
    program = next((i for i, part in enumerate(argv) if part.startswith("--")), len(argv))
    words = ["env", *(f"-u {shlex.quote(name)}" for name in unset)]
    words += [f"{name}={shlex.quote(value)}" for name, value in env.items()]
    words.append(shlex.join(argv[:program]))
    words += [shlex.quote(part) for part in argv[program:]]
    return " \\\n  ".join([" ".join(words[:2]), *words[2:]])


def shell_text(made: ServeCommand) -> str:
    """`for_shell` of a command; it unsets only variables that are set here."""
    unset = [name for name in made.unset if name in os.environ]
    return with_bytes(for_shell(made.argv, made.env, unset))
