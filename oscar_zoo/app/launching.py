"""Start a server that was prepared, and keep its record while it runs."""

from __future__ import annotations

import time
from contextlib import ExitStack

from oscar_zoo.app import server_records
from oscar_zoo.app.prepare_serve import Prepared
from oscar_zoo.app.running_server import COUNT_SECONDS, RunningServer
from oscar_zoo.app.server_record import ServerRecord
from oscar_zoo.app.server_start import StartObserver, with_next_step
from oscar_zoo.engines.server_client import ServerClient
from oscar_zoo.engines.sglang.launch.own_server import WantedServer, own_server
from oscar_zoo.engines.sglang.launch.ready import read_facts
from oscar_zoo.errors import ServerFailed
from oscar_zoo.observer import Observer

ANSWER_SECONDS = 60.0
"""Seconds that a server that is ready may take to describe itself."""


def launch(
    wanted: WantedServer,
    prepared: Prepared,
    port: int,
    observer: Observer,
    *,
    again: str,
    ranks: int,
    drafts: str | None = None,
) -> RunningServer:
    """Start `wanted`, which serves what was `prepared`, and wait until it is ready.

    Args:
        ranks: of the whole server, each on a GPU or a part of the CPU.
    """
    try:
        return _started(wanted, prepared, port, observer, ranks, drafts)
    except ServerFailed as error:
        raise with_next_step(error, prepared.choice.source, again) from None


def _started(
    wanted: WantedServer,
    prepared: Prepared,
    port: int,
    observer: Observer,
    ranks: int,
    drafts: str | None,
) -> RunningServer:
    began, artifact = time.monotonic(), prepared.artifact
    record = ServerRecord.of_this_process(
        host=wanted.host,
        port=port,
        model=prepared.choice.model_id,
        artifact=artifact.label,
        log=wanted.log,
    )
    with ExitStack() as stack:
        entry = stack.enter_context(server_records.registered(record))
        news = StartObserver(prepared.choice.source, observer)
        started = stack.enter_context(own_server(wanted, news))
        client = ServerClient(started.url, timeout=ANSWER_SECONDS, key=started.administration_key)
        facts = read_facts(client)
        client.timeout = COUNT_SECONDS
        entry.keep_keys(wanted.api_key, started.administration_key)
        entry.change(state="ready", model=facts.model)
        observer.begin((), timed=False)
        return RunningServer(
            url=entry.record.url,
            log=wanted.log,
            pid=entry.record.process.pid,
            artifact=artifact.label,
            digest=artifact.verified.digest,
            level=artifact.verified.level,
            model=prepared.choice.source,
            recipe=prepared.recipe,
            device=prepared.device,
            tensor_parallel=prepared.tensor_parallel,
            ranks=ranks,
            drafts=drafts,
            facts=facts,
            key_file=server_records.key_file(entry.record) if wanted.api_key else None,
            seconds=time.monotonic() - began,
            warnings=artifact.warnings,
            _child=started.child,
            _client=client,
            _entry=entry,
            _ends=stack.pop_all(),
        )
