"""The `bench load` use case on a terminal: a server, many clients, and what does not hold."""

from __future__ import annotations

from dataclasses import dataclass

from oscar_zoo.app.devices import pick_serving_device, require_serve
from oscar_zoo.bench import load_run
from oscar_zoo.bench.load_clients import Load
from oscar_zoo.bench.load_memory import Usage
from oscar_zoo.bench.load_run import LoadLimits, LoadReport
from oscar_zoo.cli.benching import Subject, check_subject, find_subject
from oscar_zoo.cli.choosing import recipe_for_model
from oscar_zoo.cli.render import terminal
from oscar_zoo.cli.starting import Told
from oscar_zoo.engines.sglang import flags
from oscar_zoo.engines.sglang.launch import plan, staging
from oscar_zoo.engines.sglang.launch.own_server import WantedServer, log_file, own_server


@dataclass(frozen=True)
class LoadRequest:
    """The command line of `bench load`, parsed; see its help for the meaning of each."""

    artifact: str | None
    extra: tuple[str, ...]
    clients: int
    seconds: float
    context: int
    new_tokens: int
    aborts: float
    growth: int
    dummy_weights: str | None
    model: str | None
    revision: str | None
    timeout: float
    hubs: tuple[str, ...]
    device: str | None
    quiet: bool
    as_json: bool

    @property
    def silent(self) -> bool:
        """Whether to show neither progress nor notes."""
        return self.quiet or self.as_json

    @property
    def longest(self) -> int:
        """Tokens of the longest request, prompt and answer."""
        return self.context + self.new_tokens

    @property
    def load(self) -> Load:
        """What clients do."""
        return Load(self.clients, self.seconds, self.context, self.new_tokens, self.aborts)


def load_test(request: LoadRequest) -> int:
    """Run `bench load`; 1 when something does not hold."""
    plan.check_extra_flags(request.extra)
    check_subject(request)
    require_serve()
    with staging.private_folder() as private:
        subject = find_subject(request, private)
        wanted = _wanted(request, subject)
        with own_server(wanted, Told(subject.choice.name, silent=request.silent)) as started:
            with terminal.progress("s", enabled=not request.silent) as advance:
                limits = LoadLimits(growth=request.growth << 20)
                report = load_run.measure(
                    started.child, started.client, request.load, limits, advance, gpus=_gpus(wanted)
                )
    if request.as_json:
        terminal.emit_json({"model": subject.choice.name, **report.to_json()})
    else:
        _print(report)
    return 1 if report.violations else 0


def _wanted(request: LoadRequest, subject: Subject) -> WantedServer:
    device, gpu = pick_serving_device(request.device)
    random_weights = (
        ("--load-format=dummy", "--skip-tokenizer-init") if request.dummy_weights else ()
    )
    return WantedServer(
        log=log_file("bench-load"),
        model=subject.source,
        revision=request.revision,
        verified=subject.artifact.verified,
        recipe=recipe_for_model(subject.artifact, subject.choice, subject.geometry),
        device=device,
        flags=(*random_weights, *request.extra),
        timeout=request.timeout,
        gpu=gpu,
    )


def _gpus(wanted: WantedServer) -> range:
    """Numbers of the GPUs that the server runs on."""
    count = 0 if wanted.device == "cpu" else flags.tensor_parallel(wanted.flags) or 1
    return range(wanted.gpu, wanted.gpu + count)


def _print(report: LoadReport) -> None:
    facts, drain = report.to_json(), report.drain
    table = terminal.table("", "")
    table.show_header = False
    firsts = facts["ttft_median_s"]
    table.add_row("requests", f"{facts['finished']:,} finished, {facts['aborted']:,} hung up")
    table.add_row("errors", f"{report.tally.errors.total():,}")
    table.add_row("tokens/s", f"{facts['tokens_per_second']:,.0f}")
    table.add_row(
        "first token", terminal.NOT_REPORTED if firsts is None else f"{firsts:,.3f} s (median)"
    )
    table.add_row("host memory", _memory(report.host))
    table.add_row("GPU memory", _memory(report.gpu))
    after = terminal.NOT_REPORTED if report.free_after is None else f"{sum(report.free_after):,}"
    table.add_row("free tokens", f"{sum(report.free_before):,} before, {after} after")
    ended = (
        f"{drain.finished} of {drain.running} running requests finished, {drain.status} after"
        f" {drain.seconds:.1f} s"
    )
    table.add_row("SIGTERM", f"{ended}; a request that came later: {drain.late_request}")
    console = terminal.out()
    console.print(table)
    for line in report.violations:
        console.print(f"{terminal.MARKS['failed']} {terminal.clean(line)}")


def _memory(used: Usage | None) -> str:
    if used is None:
        return terminal.NOT_REPORTED
    middle, end, most = (f"{size / 1e6:,.0f} MB" for size in (used.early, used.late, used.peak))
    return f"{middle} in the middle, {end} at the end, {most} at most"
