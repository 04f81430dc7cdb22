"""A receiver of OTLP traces over gRPC that counts spans; prints its address, then the count at its end.

python tests/benchmarks/receiver.py
"""

from __future__ import annotations

import signal
import sys
from concurrent.futures import ThreadPoolExecutor

import grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)


class Counter(TraceServiceServicer):
    """Takes every span and keeps the number."""

    def __init__(self):
        self.spans = 0

    def Export(self, request, context):  # noqa: N802 - its name in the protocol
        """Count what has come."""
        self.spans += sum(
            len(scope.spans) for resource in request.resource_spans for scope in resource.scope_spans
        )
        return ExportTraceServiceResponse()


def main() -> None:
    """Receive until SIGTERM."""
    counter = Counter()
    server = grpc.server(ThreadPoolExecutor(2))
    add_TraceServiceServicer_to_server(counter, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    sys.stdout.write(f"http://127.0.0.1:{port}\n")
    sys.stdout.flush()
    signal.sigwait({signal.SIGTERM})
    server.stop(1).wait()
    sys.stdout.write(f"{counter.spans}\n")


if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    main()
