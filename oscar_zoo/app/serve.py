"""Start stock SGLang with an INT2 cache, and watch it until it ends."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from oscar_zoo.app.arguments import clip_of
from oscar_zoo.app.draft_choice import choose_drafts
from oscar_zoo.app.launching import launch
from oscar_zoo.app.prepare_serve import check_groups, check_memory, prepare
from oscar_zoo.app.running_server import RunningServer
from oscar_zoo.app.serve_checks import check, find_artifact
from oscar_zoo.app.serve_request import PORT, TIMEOUT, ServeRequest
from oscar_zoo.app.servers import serve_log
from oscar_zoo.artifact.specs import Clip
from oscar_zoo.engines.sglang.concurrency import Layout
from oscar_zoo.engines.sglang.launch.own_server import WantedServer
from oscar_zoo.models import hardware
from oscar_zoo.observer import SILENT, Observer
from oscar_zoo.registry import targets


def serve(
    target: str | Path,
    *,
    model: str | None = None,
    revision: str | None = None,
    port: int = PORT,
    expose: str | None = None,
    api_key_file: str | Path | None = None,
    require_key: bool = False,
    allow_origin: Sequence[str] = (),
    engine_api: bool = False,
    clip: tuple[float, float] | Clip | None = None,
    drafts: str | None = None,
    flags: Sequence[str] = (),
    device: str | None = None,
    timeout: float = TIMEOUT,
    hubs: str | Sequence[str] | None = None,
    offline: bool = False,
    compute: bool = False,
    observer: Observer = SILENT,
) -> RunningServer:
    """Serve a model with an INT2 cache over the OpenAI-compatible API.

    The server ends with the block when the result is used as a context manager, and with this
    process in any case.

    Args:
        target: name of an artifact, its folder, or the folder of a model.
        clip: clip ratios of keys and values in place of the recipe's.
        drafts: where drafts come from: `auto`, `mtp` or `ngram`.
        flags: flags of SGLang, such as `--tp=2`.
        hubs: hubs to use in place of the configured ones.
        observer: hears how the start goes on.

    The other arguments are those of `ServeRequest`.

    Raises:
        OscarZooError: as `start`.
    """
    request = ServeRequest(
        targets.parse(target),
        model=model,
        revision=revision,
        port=port,
        expose=expose,
        api_key_file=None if api_key_file is None else Path(api_key_file),
        require_key=require_key,
        allow_origin=tuple(allow_origin),
        engine_api=engine_api,
        clip=clip_of(clip),
        drafts=drafts,
        extra=tuple(flags),
        device=device,
        timeout=timeout,
        hubs=(hubs,) if isinstance(hubs, str) else tuple(hubs or ()),
        offline=offline,
        compute=compute,
    )
    return start(request, observer)


def start(request: ServeRequest, observer: Observer = SILENT) -> RunningServer:
    """Start a server and wait until it is ready."""
    checked = check(request, observer)
    artifact = find_artifact(request, checked, observer)
    flags, again = request.flags, request.command_line
    with hardware.one_look():
        prepared = prepare(
            artifact,
            observer,
            again=again(model="FOLDER"),
            model=checked.model,
            clip=request.clip,
            device=checked.device,
            gpu=checked.gpu,
            flags=checked.size,
        )
        check_groups(prepared, flags)
        check_memory(prepared, checked.size)
    drafts = choose_drafts(checked.drafts, prepared, flags, request.revision, observer)
    wanted = WantedServer(
        model=prepared.model,
        revision=request.revision,
        verified=artifact.verified,
        recipe=prepared.recipe,
        device=checked.device,
        log=serve_log(request.port),
        timeout=request.timeout,
        gpu=checked.gpu,
        tensor_parallel=prepared.tensor_parallel,
        flags=drafts.flags,
        host=checked.host,
        port=request.port,
        api_key=checked.key,
        origins=checked.origins,
        engine_api=request.engine_api,
        name=prepared.name,
        served_name=prepared.served_name,
        environment={"HF_HUB_OFFLINE": "1"} if request.offline else {},
    )
    return launch(
        wanted,
        prepared,
        request.port,
        observer,
        again=again(model="DIR"),
        ranks=Layout.of_flags(checked.size, tp=prepared.tensor_parallel).gpus,
        drafts=drafts.told,
    )
