"""What `serve` knows before it starts anything: that the request can be met, and the artifact."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

from oscar_zoo.app.api_key import key_for
from oscar_zoo.app.artifacts import Artifact
from oscar_zoo.app.compute_wish import ComputeWish
from oscar_zoo.app.draft_choice import wish_of
from oscar_zoo.app.prepare_serve import check_asked_gpus
from oscar_zoo.app.refused_models import check_served
from oscar_zoo.app.serve_artifact import open_to_serve
from oscar_zoo.app.serve_request import ServeRequest
from oscar_zoo.app.servers import check_port
from oscar_zoo.engines.requirements import require_serve
from oscar_zoo.engines.sglang.concurrency import Layout
from oscar_zoo.engines.sglang.flags import SizeFlags
from oscar_zoo.engines.sglang.front.addresses import parse_origin
from oscar_zoo.engines.sglang.launch import devices, draft_flags, plan
from oscar_zoo.engines.sglang.launch.draft_flags import Wish
from oscar_zoo.errors import AmbiguousName, NetworkError, PortInUse, UsageError
from oscar_zoo.models import hardware
from oscar_zoo.observer import Observer
from oscar_zoo.registry import targets
from oscar_zoo.registry.hubs.address import Sources
from oscar_zoo.registry.lookup import known_entries
from oscar_zoo.registry.targets import ModelChoice, NameTarget


@dataclass(frozen=True)
class Checked:
    """A request that can be met as far as that is known before its artifact is looked for.

    Attributes:
        key: API key of the server, or `None`.
        origins: of web pages that may ask and read.
        host: address to listen on.
        device, gpu: where it will run, and the number of its first GPU.
        size: the engine flags of the user that decide how large the server is.
        drafts: where drafts should come from, or `None`.
        model: the model that the user named, or `None`.
        sources: hubs to ask for the artifact.
        wish: what to do where nobody has an artifact.
    """

    key: str | None
    origins: tuple[str, ...]
    host: str
    device: str
    gpu: int
    size: SizeFlags
    drafts: Wish | None
    model: ModelChoice | None
    sources: Sources
    wish: ComputeWish


def check(request: ServeRequest, observer: Observer) -> Checked:
    """Refuse what cannot be served, before an artifact is fetched or computed."""
    flags, size, drafts = request.flags, request.flags.sizes(), wish_of(request.drafts)
    if request.engine_api and request.expose is not None:
        raise UsageError(
            "--engine-api opens what can end a server, so it is for this machine only.",
            hint="leave out --expose, or --engine-api",
        )
    key = key_for(request.expose, request.api_key_file, make=request.require_key)
    origins = tuple(map(parse_origin, request.allow_origin))
    sources = Sources(request.hubs, offline=request.offline)
    wish = request.wish(offline=sources.offline)
    wish.check()
    again = request.command_line  # what was typed, with options to add or to replace
    require_serve()
    host = request.expose or plan.LOOPBACK
    check_place(request, host)
    device, gpu = hardware.pick_serving_device(request.device)
    draft_flags.check_wish(drafts, flags, device)
    devices.check_devices(Layout.of_flags(size, tp=size.tensor_parallel or 1), device, gpu)
    model = targets.parse_given_model(request.model, observer, again=again(model="FOLDER"))
    check_served(model or request.target.choice, request.revision, device)
    check_asked_gpus(model or request.target.choice, device, size)
    return Checked(key, origins, host, device, gpu, size, drafts, model, sources, wish)


def check_place(request: ServeRequest, host: str) -> None:
    """Refuse a port that is taken, but first a name that nobody has an artifact for."""
    try:
        check_port(host, request.port, lambda port: request.command_line(port=port))
    except PortInUse:
        target, makes = request.target, request.compute or request.ask
        if isinstance(target, NameTarget) and (target.choice is None or not makes):
            with contextlib.suppress(AmbiguousName, NetworkError):
                known_entries([target], Sources(request.hubs, offline=request.offline))
        raise


def find_artifact(request: ServeRequest, checked: Checked, observer: Observer) -> Artifact:
    """The artifact to serve, computed first where nobody has one; raises as `open_to_serve`."""
    return open_to_serve(
        request.target,
        checked.model,
        checked.sources,
        checked.wish,
        observer,
        again=request.command_line,
    )
