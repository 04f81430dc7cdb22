"""A page of metrics for Prometheus to scrape, in its text format or in OpenMetrics.

Names follow the OpenTelemetry specification's rules for Prometheus: dots become
underscores, the unit ``s`` becomes ``_seconds``, counters end in ``_total``.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterable, Iterator
from socketserver import ThreadingMixIn
from typing import Any, Final
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from opentelemetry.sdk.metrics.export import (
    Histogram,
    HistogramDataPoint,
    InMemoryMetricReader,
    Metric,
    MetricReader,
    MetricsData,
    NumberDataPoint,
    Sum,
)
from opentelemetry.util.types import Attributes
from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.core import Metric as Family

from stagetrace.errors import UsageError

HOST: Final = "127.0.0.1"
"""Where the page is served unless another address is asked for."""

PORT: Final = 9464
"""Port that OpenTelemetry's specification gives to Prometheus exporters."""

_UNITS: Final = {"s": "seconds"}
_PATIENCE_S: Final = 10
_PORTS: Final = 1 << 16
_PORT_DIGITS: Final = 5


def parse_address(text: str) -> tuple[str, int]:
    """Read ``HOST:PORT``, ``:PORT``, ``PORT`` or ``[IPV6]:PORT``; without a host it is loopback.

    Raises:
        UsageError: It is none of these.
    """
    host, _, port = text.strip().rpartition(":")
    if not (port.isascii() and port.isdecimal() and len(port) <= _PORT_DIGITS and int(port) < _PORTS):
        raise UsageError(f"{text!r} is no address", hint=f"it is HOST:PORT, such as {HOST}:{PORT}")
    return host.removeprefix("[").removesuffix("]") or HOST, int(port)


class PrometheusPage:
    """Serves what its reader collects, from the construction on until ``stop``.

    Each scrape reads the metrics as they are at that instant.

    Args:
        host: Address or name to listen on.
        port: Port to listen on; 0 takes a free one.

    Raises:
        UsageError: The address is not to be had.
    """

    def __init__(self, host: str = HOST, port: int = PORT) -> None:
        self._reader = InMemoryMetricReader()
        registry = CollectorRegistry()
        registry.register(_Collector(self._reader))
        try:
            server = _Server if _address_family(host, port) is socket.AF_INET else _Server6
            self._server = make_server(host, port, make_wsgi_app(registry), server, _Handler)
        except OSError as error:
            raise UsageError(
                f"cannot serve metrics on {host}:{port}: {error.strerror or error}",
                hint="--prometheus takes another HOST:PORT",
            ) from error
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.1,), name="stagetrace-prometheus", daemon=True
        )
        self._thread.start()

    @property
    def reader(self) -> MetricReader:
        """The reader to give to the metrics that are to be shown."""
        return self._reader

    @property
    def url(self) -> str:
        """Address of the page."""
        host, port = self._server.server_address[:2]
        name = host.decode() if isinstance(host, bytes | bytearray) else host
        return f"http://[{name}]:{port}/metrics" if ":" in name else f"http://{name}:{port}/metrics"

    def stop(self) -> None:
        """Answer no more, and let go of the port."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(ThreadingMixIn, WSGIServer):
    """A thread for each connection, so that an idle one keeps nobody waiting."""

    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of a client that went away."""


class _Server6(_Server):
    address_family = socket.AF_INET6


class _Handler(WSGIRequestHandler):
    timeout = _PATIENCE_S

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - its name in the library
        """Write no line for each scrape."""


def _address_family(host: str, port: int) -> socket.AddressFamily:
    """Return the family of an address."""
    return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]


class _Collector:
    """The metrics of a reader, as families of ``prometheus_client``."""

    def __init__(self, reader: InMemoryMetricReader) -> None:
        self._reader = reader

    def describe(self) -> Iterable[Family]:
        """Name no family beforehand: before the first request there is none."""
        return []

    def collect(self) -> Iterator[Family]:
        """Collect and translate."""
        data: MetricsData | None = self._reader.get_metrics_data()
        for resource in data.resource_metrics if data is not None else ():
            for scope in resource.scope_metrics:
                for metric in scope.metrics:
                    yield _translate(metric)


def _translate(metric: Metric) -> Family:
    data = metric.data
    keys = sorted({key for point in data.data_points for key in point.attributes or {}})
    name, about = metric.name.replace(".", "_"), metric.description or ""
    names, unit = [key.replace(".", "_") for key in keys], _UNITS.get(metric.unit or "", "")

    def labels(attributes: Attributes) -> list[str]:
        # An empty label is none to Prometheus.
        return [str((attributes or {}).get(key, "")) for key in keys]

    if isinstance(data, Histogram):
        histogram = HistogramMetricFamily(name, about, labels=names, unit=unit)
        for point in data.data_points:
            histogram.add_metric(labels(point.attributes), _buckets(point), point.sum)
        return histogram
    kind = CounterMetricFamily if isinstance(data, Sum) else GaugeMetricFamily
    family = kind(name, about, labels=names, unit=unit)
    for number in data.data_points:
        if isinstance(number, NumberDataPoint):
            family.add_metric(labels(number.attributes), number.value)
    return family


def _buckets(point: HistogramDataPoint) -> list[tuple[str, float]]:
    """Return upper bounds and counts, each with those of the buckets below."""
    total = 0
    buckets = []
    for bound, count in zip([*point.explicit_bounds, "+Inf"], point.bucket_counts, strict=True):
        total += count
        buckets.append((str(bound), float(total)))
    return buckets
