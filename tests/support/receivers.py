"""Real OTLP receivers in this process, over gRPC and over HTTP, that keep all that they were sent."""

from __future__ import annotations

import contextlib
import gzip
import socket
import threading
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import grpc
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2, metrics_service_pb2_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

HOST = "127.0.0.1"
_REQUESTS = {
    "/v1/traces": (trace_service_pb2.ExportTraceServiceRequest, trace_service_pb2.ExportTraceServiceResponse),
    "/v1/metrics": (
        metrics_service_pb2.ExportMetricsServiceRequest,
        metrics_service_pb2.ExportMetricsServiceResponse,
    ),
}
_DECODERS = {"": bytes, "identity": bytes, "gzip": gzip.decompress, "deflate": zlib.decompress}


class Receiver:
    """What a receiver was sent, and how it is to answer.

    Attributes:
        endpoint: Base address, for OTEL_EXPORTER_OTLP_ENDPOINT.
        traces: Decoded requests for traces, in order.
        metrics: Decoded requests for metrics, in order.
        headers: Headers (gRPC: metadata) of each request, in lower case.
        encodings: How each request was compressed; empty when not, None when gRPC undid it and told nobody.
        refuse: Number of requests that are still to be refused as overloaded.
        delay_s: How long each answer takes.
    """

    def __init__(self):
        self.endpoint = ""
        self.traces, self.metrics, self.headers, self.encodings = [], [], [], []
        self.refuse = 0
        self.delay_s = 0.0
        self._lock = threading.Lock()

    @property
    def spans(self):
        """All spans, decoded, in the order in which they came."""
        return [span for _, _, span in self.placed_spans]

    @property
    def placed_spans(self):
        """All spans with the attributes of their resource and their scope: (resource, scope, span)."""
        return [
            (attributes(resource.resource), scope.scope, span)
            for request in list(self.traces)
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]

    @property
    def last_metrics(self):
        """The last state of every metric, by name."""
        return {
            metric.name: metric
            for request in list(self.metrics)
            for resource in request.resource_metrics
            for scope in resource.scope_metrics
            for metric in scope.metrics
        }

    def takes(self, request, headers, encoding):
        """Keep a request, unless it is to be refused; returns whether it was kept."""
        time.sleep(self.delay_s)
        with self._lock:
            self.headers.append(headers)
            self.encodings.append(encoding)
            if self.refuse:
                self.refuse -= 1
                return False
            of_traces = isinstance(request, trace_service_pb2.ExportTraceServiceRequest)
            (self.traces if of_traces else self.metrics).append(request)
            return True


def attributes(holder):
    """Attributes of a decoded span, event, link, resource or data point as a dict of plain values."""
    return {each.key: _plain(each.value) for each in holder.attributes}


def _plain(value):
    kind = value.WhichOneof("value")
    found = getattr(value, kind)
    return tuple(_plain(each) for each in found.values) if kind == "array_value" else found


@contextlib.contextmanager
def grpc_receiver(port=0):
    """A receiver of OTLP over gRPC; a context manager."""
    receiver = Receiver()
    server = grpc.server(ThreadPoolExecutor(2))

    def export(response):
        def answer(request, context):
            sent = {key.lower(): value for key, value in context.invocation_metadata()}
            if not receiver.takes(request, sent, None):
                context.abort(grpc.StatusCode.UNAVAILABLE, "overloaded")
            return response()

        return answer

    class Traces(trace_service_pb2_grpc.TraceServiceServicer):
        Export = staticmethod(export(trace_service_pb2.ExportTraceServiceResponse))

    class Metrics(metrics_service_pb2_grpc.MetricsServiceServicer):
        Export = staticmethod(export(metrics_service_pb2.ExportMetricsServiceResponse))

    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(Traces(), server)
    metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server(Metrics(), server)
    receiver.endpoint = f"http://{HOST}:{server.add_insecure_port(f'{HOST}:{port}')}"
    server.start()
    try:
        yield receiver
    finally:
        server.stop(0).wait()


@contextlib.contextmanager
def http_receiver(port=0):
    """A receiver of OTLP over HTTP with protobuf; a context manager."""
    receiver = Receiver()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            content = self.rfile.read(int(self.headers["content-length"]))
            encoding = self.headers.get("content-encoding", "")
            kinds = _REQUESTS.get(self.path)
            if kinds is None:
                self._answer(404)
                return
            request = kinds[0].FromString(_DECODERS[encoding](content))
            sent = {key.lower(): value for key, value in self.headers.items()}
            taken = receiver.takes(request, sent, encoding)
            self._answer(200 if taken else 503, kinds[1]().SerializeToString())

        def _answer(self, status, content=b""):
            with contextlib.suppress(OSError):  # the client may have lost patience
                self.send_response(status)
                self.send_header("content-type", "application/x-protobuf")
                self.send_header("content-length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

        def log_message(self, *args):
            """Say nothing."""

    server = ThreadingHTTPServer((HOST, port), Handler)
    server.daemon_threads = True
    receiver.endpoint = f"http://{HOST}:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield receiver
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextlib.contextmanager
def counting_relay(endpoint):
    """Pass on one connection to a receiver; yields its own address, and the bytes that went through in a list."""
    host, port = endpoint.removeprefix("http://").split(":")
    counted = []

    def pump(source, target, *, count):
        with contextlib.suppress(OSError):
            while content := source.recv(1 << 16):
                if count:
                    counted.append(len(content))
                target.sendall(content)
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def relay():
        with contextlib.suppress(OSError):  # nobody came
            client, _ = listener.accept()
            with client, socket.create_connection((host, int(port))) as server:
                back = threading.Thread(target=pump, args=(server, client), kwargs={"count": False})
                back.start()
                pump(client, server, count=True)
                back.join()

    with socket.create_server((HOST, 0)) as listener:
        thread = threading.Thread(target=relay)
        thread.start()
        try:
            yield f"http://{HOST}:{listener.getsockname()[1]}", counted
        finally:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            thread.join()
