"""A process of its own that renders chat templates, started by `chat_template` as a plain script.

A template is a program of the model's author. The sandbox of Jinja bounds what it reaches, and not
how long it runs or how much it holds; this process has limits that the system enforces. It knows
nothing but the template and the chats, and imports nothing of ours. The environment is the one that
transformers renders in: a test compares the two.

It reads one JSON object per line, `{"template", "variables"}` and then `{"messages",
"add_generation_prompt"}` for each chat, and answers each with `{"text"}` or `{"error"}`.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from datetime import datetime
from typing import Any

CPU_SECONDS = 10
"""Processor time for one chat, in seconds; honest templates take milliseconds."""
MEMORY_BYTES = 512 << 20
"""Address space of the process."""
MAX_TEXT = 16 << 20
"""Most characters of one rendered chat."""
TOO_MUCH = "too much"
"""The error of a template that needs more memory or writes more text."""


def main(cpu_seconds: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends an answer of a chat, and not this
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    template: Any = None
    for line in sys.stdin:
        _allow(cpu_seconds)
        asked = json.loads(line)
        try:
            if "template" in asked:
                template, variables = _compiled(asked["template"]), asked["variables"]
                answer = {"text": ""}
            else:
                chat = {"tools": None, "documents": None, **variables, **asked}
                answer = {"text": template.render(**chat)}
                if len(answer["text"]) > MAX_TEXT:
                    answer = {"error": TOO_MUCH}
        except (MemoryError, RecursionError):
            answer = {"error": TOO_MUCH}
        except Exception as error:  # a template raises whatever it likes
            answer = {"error": (str(error).splitlines() or [type(error).__name__])[0][:200]}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


def _allow(seconds: int) -> None:
    """Give the process so much more processor time; the system ends it after that."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    soft = int(used.ru_utime + used.ru_stime) + 1 + seconds
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    if hard != resource.RLIM_INFINITY:
        soft = min(soft, hard)
    resource.setrlimit(resource.RLIMIT_CPU, (soft, hard))


def _compiled(source: str) -> Any:
    import jinja2
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}` marks what the model wrote; here its content stays as it is."""

        tags = {"generation"}  # noqa: RUF012  (the name that Jinja looks at)

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.Scope(body).set_lineno(line)

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def as_json(
        value: Any,
        ensure_ascii: bool = False,
        indent: Any = None,
        separators: Any = None,
        sort_keys: bool = False,
    ) -> str:
        how = {"indent": indent, "separators": separators, "sort_keys": sort_keys}
        return json.dumps(value, ensure_ascii=ensure_ascii, **how)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = as_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment.from_string(source)


if __name__ == "__main__":
    main(int(sys.argv[1]))
