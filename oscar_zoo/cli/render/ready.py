"""A server that is ready, or the command of `serve --print`: as text, and as JSON with the same
facts."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from oscar_zoo.cli.render import terminal
from oscar_zoo.cli.streams import with_bytes
from oscar_zoo.engines.sglang.launch.plan import client_url
from oscar_zoo.serving.command import ServeCommand
from oscar_zoo.serving.running import RunningServer

SCHEMA = "oscar-zoo.serve/1"


def ready_facts(server: RunningServer, *, port: int, key_file: Path | None) -> dict[str, Any]:
    """The facts of a server that is ready, for `--json`."""
    ready = server.facts
    return {
        "schema": SCHEMA,
        "model_id": ready.model,
        "model": server.model,
        "artifact": server.artifact,
        "digest": server.digest,
        "level": server.level,
        "recipe": server.recipe.model_dump(mode="json"),
        "sglang": ready.version,
        "device": server.device,
        "tensor_parallel": server.tensor_parallel,
        "ranks": server.ranks,
        "drafts": server.drafts,
        "bits_per_element": ready.bits,
        "code_bits": ready.code_bits,
        "windows": {"sink": ready.sink, "recent": ready.recent},
        "clip": {"k": ready.k_clip, "v": ready.v_clip},
        "capacity_tokens": ready.capacity,
        "bf16_capacity_tokens": ready.plain_capacity,
        "max_running_requests": ready.requests,
        "context_tokens": ready.context,
        "curl": curl_line(
            client_url(server.url),
            ready.model,
            key_file=str(key_file.absolute()) if key_file else None,
        ),
        "key_file": str(key_file.absolute()) if key_file else None,
        "stop": f"oscar-zoo stop {port}",
        "url": server.url,
        "log": str(server.log),
        "seconds": round(server.seconds, 1),
        "pid": server.pid,
        "warnings": list(server.warnings),
    }


def curl_line(url: str, model: str, *, key_file: str | None) -> str:
    """A request that a shell runs as it stands, to the API at `url`.

    A key is read from `key_file` when it runs, and reaches curl through a pipe: arguments are
    visible to every local user.
    """
    body = {"model": model, "messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 64}
    key = (
        f"printf 'Authorization: Bearer %s' \"$(cat {shlex.quote(key_file)})\" | "
        if key_file
        else ""
    )
    header = "-H @- " if key_file else ""
    data = shlex.quote(json.dumps(body, ensure_ascii=False))
    address = shlex.quote(f"{url}/chat/completions")
    return f"{key}curl {address} {header}-H 'Content-Type: application/json' -d {data}"


def print_ready(facts: dict[str, Any], *, stop: str, new_key: bool = False) -> None:
    """The block for people.

    Args:
        new_key: the key was made for this server; its file goes with the server.
    """
    console = terminal.out()
    windows, clip, plain = facts["windows"], facts["clip"], facts["bf16_capacity_tokens"]
    more = f" (BF16 would hold {plain:,})" if plain is not None else ""
    rows = {
        "Model": f"{facts['model_id']}, SGLang {facts['sglang']} on {_where(facts)}",
        "Artifact": f"{facts['artifact']}  {facts['digest']}, verified to level {facts['level']}",
        "Cache": (
            f"INT2{_wider(facts['code_bits'])}, {facts['bits_per_element']:.2f} bits per element, K"
            f" clip {clip['k']}, V clip {clip['v']}, first {windows['sink']} and last"
            f" {windows['recent']} tokens uncompressed"
        ),
        "Capacity": (
            f"{facts['capacity_tokens']:,} tokens{more}, {facts['max_running_requests']} requests"
            " at a time"
        ),
        **({"Drafts": facts["drafts"]} if facts["drafts"] else {}),
        "Ready": f"{facts['url']}   ({facts['seconds']:.0f} s)   stop with {stop}",
        "Try": facts["curl"],
    }
    for name, text in rows.items():
        console.print(f"{name:<9} {terminal.clean(text)}")
    if new_key and facts["key_file"] is not None:
        key = Path(facts["key_file"]).read_text("utf-8").strip()
        where = "in that file until the server ends; oscar-zoo chat finds it there"
        console.print(f"{'Key':<9} {where}")
        console.print(f"OPENAI_API_KEY={key}")


def _where(facts: dict[str, Any]) -> str:
    """What the server runs on, in words."""
    ranks, sharing = facts["ranks"], facts["tensor_parallel"]
    if ranks == 1:
        return str(facts["device"])
    if facts["device"] == "cuda":
        return f"{ranks} GPUs"
    return f"cpu, {ranks} ranks" + (" that share the model" if ranks == sharing else "")


def _wider(code_bits: str) -> str:
    """What to say of codes that do not have 2 bits everywhere."""
    return "" if code_bits == "2" else f" with codes of {code_bits} bits (keys/values)"


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
    return with_bytes(for_shell(made.argv, made.environment, unset))


def command_facts(made: ServeCommand) -> dict[str, Any]:
    """The command for `--json`."""
    return {
        "schema": "oscar-zoo.serve-command/1",
        "engine": "sglang",
        "argv": list(made.argv),
        "env": dict(made.environment),
        "unset": list(made.unset),
        "artifact": made.artifact,
        "digest": made.digest,
        "model": made.model,
        "recipe": made.recipe.model_dump(mode="json"),
        "device": made.device,
        "tensor_parallel": made.tensor_parallel,
        "drafts": made.drafts,
        "warnings": list(made.warnings),
    }
