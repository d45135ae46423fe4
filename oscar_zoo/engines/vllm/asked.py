"""Whether a command for vLLM can be given. Imports nothing, because `--help` does."""

from __future__ import annotations

from oscar_zoo.errors import UsageError


def check_vllm(drafts: str | None, *, print_only: bool) -> None:
    if not print_only:
        raise UsageError(
            "oscar-zoo starts no vLLM server itself yet.",
            hint="--print shows the command that starts one",
        )
    if drafts:
        raise UsageError("the INT2 cache in vLLM has no drafts.", hint="leave out --drafts")
