"""Models that are refused, known before an artifact, weights or an answer of the user are wanted.

What decides is the `config.json` of a model that is on this machine, or what the zoo knows about
the architecture of a name. No hub is asked.
"""

from __future__ import annotations

from oscar_zoo.engines.sglang import config_refusals
from oscar_zoo.errors import UnsupportedModel
from oscar_zoo.models.config_file import ConfigFile, check_cache
from oscar_zoo.registry.architectures import architecture
from oscar_zoo.registry.targets import ModelChoice


def check_served(
    choice: ModelChoice | None, revision: str | None = None, device: str | None = None
) -> None:
    """Refuse a model that no server takes, or none on `device`.

    Args:
        choice: the model; `None` is never refused.
        device: `cpu` or `cuda`, where it is known.
    """
    if choice is None:
        return
    config = ConfigFile.kept(choice.source, revision)
    if config is not None:
        config_refusals.check_config(config, choice.model_id)
    kind = choice.recipe.model_type if choice.recipe else getattr(config, "model_type", None)
    known = architecture(str(kind))
    if known is None:
        return
    why = known.serve_gpu.reason if config is None else None
    if why is None and device == "cpu":
        why = known.serve_cpu.reason
    if why is not None:
        where = " on a CPU" if device == "cpu" else ""
        raise UnsupportedModel(
            f"oscar-zoo cannot serve {choice.name} ({kind}){where}: {why}.",
            hint=f"what works with it: oscar-zoo info {choice.name}",
        )


def check_used(choice: ModelChoice | None, revision: str | None = None) -> None:
    """Refuse a model that no command takes, neither `compute` nor `eval`; as `check_served`."""
    config = None if choice is None else ConfigFile.kept(choice.source, revision)
    if choice is not None and config is not None:
        check_cache(config, choice.model_id)
