"""What to serve, and the command line that means the same."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oscar_zoo.app.arguments import clip_word, command_line, option_words
from oscar_zoo.app.compute_wish import ComputeWish
from oscar_zoo.engines.sglang.launch.user_flags import UserFlags
from oscar_zoo.registry.targets import Target

if TYPE_CHECKING:
    from oscar_zoo.artifact.specs import Clip

PORT = 30000
TIMEOUT = 1800.0


@dataclass(frozen=True)
class ServeRequest:
    """What to serve, and how.

    Attributes:
        target: name of an artifact, its folder, or the folder of a model, parsed.
        model: model folder, zoo name or hub id; `None` for the artifact's base model.
        revision: commit of a model on a hub.
        port: port to listen on.
        expose: address to listen on in place of loopback; needs a key.
        api_key_file: file that holds the API key, or `None`.
        require_key: make an API key, which requests need.
        allow_origin: origins of web pages that may ask and read.
        engine_api: clients may set every field of the engine's requests; on loopback only.
        clip: clip ratios in place of the recipe's.
        drafts: where drafts come from, `auto`, `mtp` or `ngram`; `None` for no drafts of ours.
        extra: engine flags.
        device: `cpu` or `cuda[:N]`; `None` for the first GPU, else the CPU.
        timeout: seconds that the start may take.
        hubs: hubs to use in place of the configured ones.
        offline: ask no hub.
        compute: where no artifact exists, compute one.
        ask: where no artifact exists, ask the observer whether to compute one.
        calib_data: text to calibrate on, with `compute`.
        detach: the server was asked to outlive its terminal; only `command_line` looks at it.
    """

    target: Target
    model: str | None = None
    revision: str | None = None
    port: int = PORT
    expose: str | None = None
    api_key_file: Path | None = None
    require_key: bool = False
    allow_origin: tuple[str, ...] = ()
    engine_api: bool = False
    clip: Clip | None = None
    drafts: str | None = None
    extra: tuple[str, ...] = ()
    device: str | None = None
    timeout: float = TIMEOUT
    hubs: tuple[str, ...] = ()
    offline: bool = False
    compute: bool = False
    ask: bool = False
    calib_data: str | None = None
    detach: bool = False

    @cached_property
    def flags(self) -> UserFlags:
        """The engine flags, read once; raises `UsageError` for one that `serve` does not allow."""
        return UserFlags(self.extra)

    def wish(self, *, offline: bool) -> ComputeWish:
        """What to do where no artifact exists; `offline` is what the configuration says, too."""
        return ComputeWish(
            compute=self.compute,
            ask=self.ask,
            calib_data=self.calib_data,
            device=self.device,
            revision=self.revision,
            offline=offline,
            to_serve=True,
        )

    def arguments(self, **changes: Any) -> list[str]:
        """The arguments behind `oscar-zoo` that mean this request.

        Args:
            changes: options to add or to replace, by their names; `None` leaves one out.
        """
        values: dict[str, Any] = {
            "model": self.model,
            "revision": self.revision,
            "port": None if self.port == PORT else self.port,
            "expose": self.expose,
            "api-key-file": self.api_key_file,
            "require-key": self.require_key,
            "allow-origin": self.allow_origin,
            "engine-api": self.engine_api,
            "clip": clip_word(self.clip),
            "drafts": self.drafts,
            "timeout": None if self.timeout == TIMEOUT else self.timeout,
            "calib-data": self.calib_data,
            "device": self.device,
            "compute": self.compute,
            "offline": self.offline,
            "detach": self.detach,
        }
        values |= {name.replace("_", "-"): value for name, value in changes.items()}
        words = ["serve", str(self.target), *option_words({"hub": self.hubs} | values)]
        return [*words, *(["--", *self.extra] if self.extra else [])]

    def command_line(self, **changes: Any) -> str:
        """The same, for a shell."""
        return command_line(self.arguments(**changes))
