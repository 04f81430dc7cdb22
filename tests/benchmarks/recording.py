"""Cost of one record beside one SDK span, in the same run.

python tests/benchmarks/recording.py
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

import stagetrace
from stagetrace import Recorder, Stage
from stagetrace.records import RecordKind

ROUNDS = 15
CALLS = 20_000
STALL_CALLS = 1_000_000
HEADERS = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "accept": "*/*"}


class _Discard(SpanExporter):
    """Takes spans and does nothing, so that only the SDK itself is measured."""

    def export(self, spans: object) -> SpanExportResult:
        return SpanExportResult.SUCCESS


def _ns_per_call(call: Callable[[], object], calls: int) -> float:
    begin = time.perf_counter_ns()
    for _ in range(calls):
        call()
    return (time.perf_counter_ns() - begin) / calls


def _longest_delays(recorder: Recorder, kind: int) -> dict[str, float]:
    """Nanoseconds that the slowest of many records took; several of them open a segment."""
    took = []
    for number in range(STALL_CALLS):
        begin = time.perf_counter_ns()
        recorder.record(kind, number, 2, 3, 4, 5)
        took.append(time.perf_counter_ns() - begin)
    took.sort()
    return {"p99.9": took[-len(took) // 1000], "longest": took[-1]}


def _nothing() -> None:
    return None


def _stage() -> None:
    with stagetrace.stage(Stage.ENCODE):
        pass


def _ticket() -> None:
    with stagetrace.wait(Stage.ENCODE).work():
        pass


def _request() -> None:
    with stagetrace.request(HEADERS, {"model": "tiny"}):
        pass


def _cost_of_a_stage() -> float:
    return statistics.median(_ns_per_call(_stage, CALLS) for _ in range(ROUNDS))


def main() -> None:
    provider = TracerProvider()
    provider.add_span_processor(
        BatchSpanProcessor(_Discard(), max_queue_size=4096, max_export_batch_size=512)
    )
    tracer = provider.get_tracer("bench")
    with tempfile.TemporaryDirectory() as folder:
        unrecorded = _cost_of_a_stage()
        stagetrace.start(folder)
        recorder = Recorder(Path(folder))
        step = int(RecordKind.STEP)

        def record() -> None:
            recorder.record(step, 1, 2, 3, 4, 5)

        def span() -> None:
            tracer.start_span("stage", attributes={"stagetrace.stage": "prefill"}).end()

        # Interleaved, so that the machine's moods meet all alike.
        with stagetrace.request():
            rounds = [
                (
                    _ns_per_call(_nothing, CALLS),
                    _ns_per_call(record, CALLS),
                    _ns_per_call(_stage, CALLS),
                    _ns_per_call(_ticket, CALLS),
                    _ns_per_call(span, CALLS // 20),
                )
                for _ in range(ROUNDS)
            ]
        requests = [_ns_per_call(_request, CALLS // 10) for _ in range(ROUNDS)]
        stalls = _longest_delays(recorder, step)
    empty, ours, staged, waited, theirs = (statistics.median(column) for column in zip(*rounds, strict=True))
    provider.shutdown()
    print(f"record            {ours - empty:9.0f} ns   (budget: 500 ns)")
    print(f"SDK span          {theirs - empty:9.0f} ns   (BatchSpanProcessor, exporter that discards)")
    print(f"stage             {staged - empty:9.0f} ns   (two records and their wrapper; budget: 1,000 ns)")
    print(f"wait and its work {waited - empty:9.0f} ns   (three records)")
    print(f"request           {statistics.median(requests) - empty:9.0f} ns   (with traceparent and a fact)")
    print(f"stage, no spool   {unrecorded - empty:9.0f} ns")
    for what, ns in stalls.items():
        print(f"record, {what:<10}{ns / 1000:9.1f} us   (opening a segment of 4 MiB included)")
    print(f"span / record     {(theirs - empty) / (ours - empty):9.1f} x    (budget: 20 x)")
    print(f"span / stage      {(theirs - empty) / (staged - empty):9.1f} x    (budget: 10 x)")


if __name__ == "__main__":
    main()
