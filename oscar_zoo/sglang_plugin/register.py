"""Entry point of group `sglang.srt.plugins`; SGLang calls it once in every process that may need a hook.

Importable without sglang. SGLang logs and swallows an exception raised here, and then refuses the unknown dtype, so
int2 cannot start without its hooks.
"""

from __future__ import annotations


def register() -> None:
    """Install the hooks of the INT2 cache; every one of them returns at once unless the KV dtype is int2.

    Raises:
        UsageError: this sglang is not a supported version.
    """
    from oscar_zoo.sglang_plugin import hooks, plain_errors

    plain_errors.install()
    hooks.install()
