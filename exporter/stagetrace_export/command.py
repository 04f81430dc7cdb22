"""``stagetrace export``: spans of a spool for OpenTelemetry's receivers."""

from __future__ import annotations

import argparse
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from opentelemetry.environment_variables import OTEL_METRICS_EXPORTER
from opentelemetry.sdk.environment_variables import OTEL_BSP_SCHEDULE_DELAY
from opentelemetry.sdk.metrics.export import MetricReader

from stagetrace.errors import DataError, UsageError
from stagetrace.spool import is_spool
from stagetrace_analyzer.classes import ClassRules, load_rules
from stagetrace_export.closed import GRACE_NS, POSITION_FILE, Closed, ClosedRequests
from stagetrace_export.exporters import OTLP, Delivery, exporter_name, open_delivery
from stagetrace_export.follow import INTERVAL_S, follow, say, sole_exporter, stop_signals
from stagetrace_export.metrics import StageMetrics, otlp_readers
from stagetrace_export.pipeline import Pipeline, Wanted
from stagetrace_export.prometheus import PrometheusPage, parse_address
from stagetrace_export.spans import service_resource

SUMMARY: Final = "send spans and metrics of a spool to OpenTelemetry's receivers"

_NOT_ENOUGH: Final = 3
_NOT_TAKEN: Final = 2
_NS: Final = 1e9
_GRACE_MAX_S: Final = 1e9
_DELAY_DIGITS: Final = 9
_COUNTED: Final = ("requests", "spans", "steps")
_HANDED_OUT: Final = ("exported", "partial")
_WANTED: Final = "STAGETRACE_SPOOL names the folder a server records into"

_DESCRIPTION: Final = """\
Make OpenTelemetry spans of the requests in a spool and send them: a span for
each request, in the trace of the client that sent a traceparent, and one below
it for every stage. Exporting again gives the same ids.

The standard variables are heeded, among them OTEL_TRACES_EXPORTER,
OTEL_EXPORTER_OTLP_PROTOCOL, _ENDPOINT, _HEADERS, _COMPRESSION, _TIMEOUT,
OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES.

With --follow it runs beside the server until it is told to stop: a request is
sent when all is recorded of it, what the receiver does not take is sent again,
and what was taken is remembered over a restart.

Exit codes: 0 done, 2 wrong usage, unreadable data or a receiver that does not
take the spans, 3 no requests."""

_EPILOG: Final = """\
examples:
  OTEL_EXPORTER_OTLP_ENDPOINT=http://collector:4317 stagetrace export spool/
  stagetrace export spool/ --to file:traces.jsonl
  stagetrace export spool/ --follow --prometheus 127.0.0.1:9464"""


def main(argv: list[str]) -> int:
    """Run the command; return its exit code.

    Raises:
        UsageError: An option, a variable or a path is wrong, or the receiver does not take the spans.
        DataError: A spool cannot be read.
    """
    options = _parser().parse_args(argv)
    _check(options)
    rules = load_rules(options.classes)
    wanted = Wanted(rules, unsampled=options.all, steps=options.steps, final=not options.follow)
    with open_delivery(options.to, append=options.follow, force=options.force) as delivery:
        if options.follow:
            return _follow(options, delivery, wanted)
        return _once(options.spools, delivery, wanted)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="stagetrace export",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "spools", metavar="SPOOL", nargs="+", type=Path, help="a folder that a server records into"
    )
    parser.add_argument(
        "--to",
        metavar="WHERE",
        help="otlp, console, none, or file:PATH for lines of OTLP JSON; "
        "without it OTEL_TRACES_EXPORTER, or otlp",
    )
    parser.add_argument("--force", action="store_true", help="let --to file:PATH replace a file")
    parser.add_argument(
        "--all", action="store_true", help="also requests whose traceparent says that it is not sampled"
    )
    parser.add_argument(
        "--steps", action="store_true", help="also the engine's steps, a trace each, and links to them"
    )
    parser.add_argument(
        "--classes", metavar="FILE", type=Path, help="traffic class rules (TOML) in place of the default ones"
    )
    _add_live_options(parser.add_argument_group("live"))
    return parser


def _add_live_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--follow", action="store_true", help="go on while the server runs")
    group.add_argument(
        "--until-ended", action="store_true", help="stop when all processes that record have ended"
    )
    # Of the exporter that a server starts, see stagetrace_export.detached.
    group.add_argument("--starter", metavar="PID", type=int, help=argparse.SUPPRESS)
    group.add_argument(
        "--prometheus", metavar="HOST:PORT", help="also serve metrics of stages for Prometheus to scrape"
    )
    group.add_argument(
        "--grace",
        metavar="SECONDS",
        type=float,
        help="how long to wait for what is missing of a request that has ended "
        f"(default: {GRACE_NS / _NS:g})",
    )
    group.add_argument(
        "--position",
        metavar="FILE",
        type=Path,
        help=f"where to remember what was sent (default: {POSITION_FILE} in the spool)",
    )


def _check(options: argparse.Namespace) -> None:
    if options.follow:
        _check_live(options)
        return
    for name in ("until_ended", "prometheus", "grace", "position"):
        value = getattr(options, name)
        if value is not None and value is not False:
            option = "--" + name.replace("_", "-")
            raise UsageError(f"{option} needs --follow", hint="without it, what is recorded is sent once")
    for spool in options.spools:
        if not spool.exists():
            raise UsageError(f"{spool} does not exist", hint=_WANTED)
        if not is_spool(spool):
            raise DataError(f"{spool}: no segments here", hint=_WANTED)


def _check_live(options: argparse.Namespace) -> None:
    if len(options.spools) > 1:
        raise UsageError("--follow takes one spool", hint="start it once for each")
    if options.spools[0].exists() and not options.spools[0].is_dir():
        raise UsageError(f"{options.spools[0]} is a file", hint="name the folder that holds it")
    if options.force:
        raise UsageError("--force would lose what was sent before", hint="--follow continues a file")
    if options.grace is not None and not 0 <= options.grace < _GRACE_MAX_S:
        raise UsageError(f"--grace {options.grace:g}: no time to wait", hint="seconds, as in 10")


# --- once ---


def _once(spools: Sequence[Path], delivery: Delivery, wanted: Wanted) -> int:
    pipeline = Pipeline(delivery, wanted)
    sources = [ClosedRequests(spool) for spool in spools]
    taken = all(_all_of(source, pipeline) for source in sources)
    if taken:
        _tell(pipeline, sources, delivery)
    elif delivery.spans:
        say(f"{delivery.spans} spans went to {delivery.target}, which then took no more")
    if not taken:
        raise UsageError(_refused(delivery), hint="look at the variables that begin with OTEL_EXPORTER_OTLP")
    return 0 if pipeline.counts["requests"] else _NOT_ENOUGH


def _all_of(source: ClosedRequests, pipeline: Pipeline) -> bool:
    """Send all that a spool holds; returns whether the receiver took it."""
    while True:
        closed = source.poll(final=True)
        if not pipeline.export(closed):
            return False
        source.commit()
        if not closed.more:
            return True


def _refused(delivery: Delivery) -> str:
    return f"{delivery.target} does not take the spans: {delivery.reason}"


def _tell(pipeline: Pipeline, sources: Sequence[ClosedRequests], delivery: Delivery) -> None:
    counts = pipeline.counts
    steps = f" and of {counts['steps']} steps" if counts["steps"] else ""
    say(f"{counts['spans']} spans of {counts['requests']} requests{steps} went to {delivery.target}")
    aside = Counter({reason: number for reason, number in counts.items() if reason not in _COUNTED})
    for source in sources:
        aside.update({r: number for r, number in source.counts.items() if r not in _HANDED_OUT})
    if +aside:
        told = ", ".join(
            f"{number} {reason.replace('_', ' ')}" for reason, number in sorted((+aside).items())
        )
        say(f"set aside: {told}")


# --- live ---


def _follow(options: argparse.Namespace, delivery: Delivery, wanted: Wanted) -> int:
    (spool,) = options.spools
    interval_s = _interval_s()
    with sole_exporter(spool), _metrics(options, wanted.rules) as metrics, stop_signals() as stop:
        pipeline = Pipeline(delivery, wanted, metrics)
        position = options.position or spool / POSITION_FILE
        grace_ns = GRACE_NS if options.grace is None else round(options.grace * _NS)
        source = ClosedRequests(spool, position, grace_ns)
        if metrics is not None:
            metrics.watch(source)
        live = _Live(pipeline, delivery)
        followed = follow(
            source,
            live.export,
            stop=stop,
            interval_s=interval_s,
            until_ended=options.until_ended,
            starter=options.starter,
        )
    _tell(pipeline, [], delivery)
    return 0 if followed.is_complete else _NOT_TAKEN


class _Live:
    """Exports, and passes on what the exporters have to say, each thing once."""

    def __init__(self, pipeline: Pipeline, delivery: Delivery) -> None:
        self._pipeline = pipeline
        self._delivery = delivery
        self._said = {""}

    def export(self, closed: Closed) -> bool:
        taken = self._pipeline.export(closed)
        remark = self._delivery.remark()
        if not taken:
            remark = _refused(self._delivery)
        if remark not in self._said:
            self._said.add(remark)
            say(remark)
        return taken


def _interval_s() -> float:
    text = os.environ.get(OTEL_BSP_SCHEDULE_DELAY, "").strip()
    if text and not (text.isdecimal() and len(text) <= _DELAY_DIGITS):
        raise UsageError(f"{OTEL_BSP_SCHEDULE_DELAY}={text}: no delay", hint="milliseconds, as in 5000")
    return int(text) / 1e3 if text else INTERVAL_S


@contextmanager
def _metrics(options: argparse.Namespace, rules: ClassRules) -> Iterator[StageMetrics | None]:
    """Serve and send metrics of stages as long as the block lasts; None when nobody wants them."""
    page = PrometheusPage(*parse_address(options.prometheus)) if options.prometheus else None
    readers: list[MetricReader] = [] if page is None else [page.reader]
    if exporter_name(options.to).startswith(OTLP) or os.environ.get(OTEL_METRICS_EXPORTER):
        readers += otlp_readers()
    if not readers:
        yield None
        return
    resource = service_resource(options.spools[0])
    metrics = StageMetrics(readers, resource=resource, rules=rules)
    try:
        if page is not None:
            say(f"metrics are served at {page.url}")
        yield metrics
    finally:
        metrics.shutdown()
        if page is not None:
            page.stop()
