"""Metrics of stages, as real OTLP receivers get them."""

from __future__ import annotations

import subprocess
import sys
import time
from bisect import bisect_left
from collections import Counter, defaultdict
from pathlib import Path

import duckdb
import pytest
from busy_spool import FAULTS, NOT_SAMPLED, write_spool
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.resources import Resource
from receivers import attributes, grpc_receiver, http_receiver

from stagetrace import Horizon, Outcome, UsageError, partition, read_spool
from stagetrace.clock import read_pair
from stagetrace.testing import RequestBuilder
from stagetrace_analyzer.classes import load_rules, parse_rules
from stagetrace_analyzer.ingest import ingest_spool
from stagetrace_export import metrics as names
from stagetrace_export.closed import ClosedRequests
from stagetrace_export.conventions import OTHER_ERROR
from stagetrace_export.metrics import ERROR_TYPES_MAX, StageMetrics, otlp_readers

SUPPORT = Path(__file__).parents[1] / "support"
RECEIVERS = {"grpc": grpc_receiver, "http/protobuf": http_receiver}


@pytest.fixture(scope="module")
def spool(tmp_path_factory):
    """A folder that a busy server records into, and the server."""
    folder = tmp_path_factory.mktemp("metrics") / "spool"
    return folder, write_spool(folder)


@pytest.fixture(scope="module")
def data(spool):
    """The spool, read and joined."""
    return read_spool(spool[0])


@pytest.fixture
def no_otel(monkeypatch):
    """An environment without settings of OpenTelemetry."""
    for name in (
        "METRICS_EXPORTER",
        "EXPORTER_OTLP_PROTOCOL",
        "EXPORTER_OTLP_METRICS_PROTOCOL",
        "METRIC_EXPORT_INTERVAL",
    ):
        monkeypatch.delenv(f"OTEL_{name}", raising=False)
    return monkeypatch


@pytest.fixture(scope="module")
def export(spool):
    """Count every closed request of the spool, as the exporter does."""
    source = ClosedRequests(spool[0])
    found = source.poll(final=True)
    source.commit()

    def observe(metrics):
        for request in found.requests:
            metrics.observe(request, partition(request), found.data.pair(request.instance))
        metrics.watch(source)

    return observe


def points(metric):
    """Data points of a metric by their attributes."""
    found = getattr(metric, metric.WhichOneof("data")).data_points
    by_attributes = {frozenset(attributes(point).items()): point for point in found}
    assert len(by_attributes) == len(found)
    return by_attributes


@pytest.fixture(scope="module", params=RECEIVERS)
def received(request, export):
    """What a receiver has got of the spool, by name of the metric, and the receiver."""
    with pytest.MonkeyPatch.context() as patch, RECEIVERS[request.param]() as receiver:
        patch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", request.param)
        patch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.endpoint)
        metrics = StageMetrics(otlp_readers(), resource=Resource({"service.name": "busy", "host.name": "h"}))
        export(metrics)
        metrics.shutdown()
    return receiver.last_metrics, receiver


def spent(data):
    """Seconds in each stage of every request that ended well, by the attributes of the metric."""
    found = defaultdict(list)
    for request in data.requests:
        if request.outcome is not Outcome.OK:
            continue
        for horizon in Horizon:
            mine = Counter()
            for interval in partition(request).of(horizon):
                mine[interval.stage, interval.reason] += interval.duration
            for (stage, reason), duration in mine.items():
                why = {} if reason is None else {"reason": str(reason)}
                key = {
                    "class": class_of(request),
                    "horizon": str(horizon),
                    "stage": str(stage),
                    "kind": str(stage.kind),
                }
                found[frozenset((key | why).items())].append(duration / 1e9)
    return found


def class_of(request):
    """The class that the spool's writer meant."""
    number = int(request.request_id.rpartition("-")[2])
    return f"{'text' if number % 3 else 'image'}/{'short' if request.facts['max_tokens'] <= 256 else 'long'}"


def test_sums_and_counts_are_those_of_the_partitions(received, data):
    """Every stage's sum is the sum of its intervals, every count the number of requests that were in it."""
    got, expected = points(received[0][names.STAGE_DURATION]), spent(data)
    assert got.keys() == expected.keys()
    assert len(got) > 60
    for key, durations in expected.items():
        assert got[key].sum == pytest.approx(sum(durations), rel=1e-12, abs=0), key
        assert got[key].count == len(durations)


def test_buckets_hold_what_they_say(received, data):
    """Each request is in the bucket of its time in the stage, upper bounds included."""
    got = points(received[0][names.STAGE_DURATION])
    for key, durations in spent(data).items():
        bounds = list(got[key].explicit_bounds)
        expected = Counter(bisect_left(bounds, duration) for duration in durations)
        assert list(got[key].bucket_counts) == [expected[place] for place in range(len(bounds) + 1)]
    assert (bounds[0], bounds[-1]) == (0.0001, 300)


def test_sums_are_those_of_the_dataset(received, spool, tmp_path):
    """SQL over the dataset of the same spool, classes included, comes to the same sums."""
    ingest_spool(spool[0], tmp_path / "dataset")
    expression, parameters = load_rules().case_expression()
    rows = duckdb.sql(
        f"""
        WITH facts AS (
            SELECT *, CASE WHEN media_items > 0 THEN 'image' WHEN media_items = 0 THEN 'text' END AS modality
            FROM '{tmp_path}/dataset/requests/*.parquet'
        )
        SELECT {expression}, h.horizon, stage, kind, reason, sum(duration_ns)::BIGINT
        FROM facts
        JOIN '{tmp_path}/dataset/stages/*.parquet' AS s USING (request)
        JOIN (VALUES ('ttft'), ('completion')) AS h(horizon) ON s.horizon IN (h.horizon, 'both')
        WHERE outcome = 'ok'
        GROUP BY ALL
        """,
        params=parameters,
    ).fetchall()
    expected = {}
    for traffic_class, horizon, stage, kind, reason, total in rows:
        key = {"class": traffic_class, "horizon": horizon, "stage": stage, "kind": kind, "reason": reason}
        expected[frozenset((k, v) for k, v in key.items() if v is not None)] = total / 1e9
    got = points(received[0][names.STAGE_DURATION])
    assert {key: point.sum for key, point in got.items()} == pytest.approx(expected, rel=1e-12, abs=0)


def test_requests_are_counted_by_how_they_ended(received, data):
    """Every closed request is counted once, one that did not end well with where and, if it failed, why."""
    counted = points(received[0][names.REQUESTS])
    assert sum(point.as_int for point in counted.values()) == len(data.requests) == 59
    by_outcome, errors, stages = Counter(), Counter(), Counter()
    for key, point in counted.items():
        known = dict(key)
        by_outcome[known["outcome"]] += point.as_int
        errors[known.get("error.type")] += point.as_int
        stages[known["outcome"] == "ok", known.get("ended_stage")] += point.as_int
    assert by_outcome == {"ok": 47, "error": 6, "cancelled": 6}
    assert errors == {None: 53, "500": 2, "501": 2, "502": 2}
    assert stages == {(True, None): 47, (False, "decode"): 12}


@pytest.mark.parametrize(("name", "end"), [(names.TTFT, "first_useful"), (names.COMPLETION, "last_byte")])
def test_latencies_are_those_that_were_reached(received, data, name, end):
    """Only a request whose byte was sent has a latency, and an answer of an error is not one that is ok."""
    expected = defaultdict(list)
    for request in data.requests:
        if getattr(request, end) is not None:
            key = frozenset({"class": class_of(request), "outcome": str(request.outcome)}.items())
            expected[key].append((getattr(request, end) - request.received) / 1e9)
    got = points(received[0][name])
    assert {key: point.count for key, point in got.items()} == {
        key: len(all_) for key, all_ in expected.items()
    }
    for key, latencies in expected.items():
        assert got[key].sum == pytest.approx(sum(latencies), rel=1e-12)
    assert {dict(key)["outcome"] for key in got} == {"ok", "cancelled" if name == names.TTFT else "error"}


def test_stages_of_a_class_add_up_to_its_latency(received):
    """The denominator of a share is there twice: as all stages, and as the latency of those that ended well."""
    stages, sums = points(received[0][names.STAGE_DURATION]), defaultdict(float)
    for key, point in stages.items():
        sums[dict(key)["class"], dict(key)["horizon"]] += point.sum
    latencies = {
        (dict(key)["class"], horizon): point.sum
        for horizon, name in (("ttft", names.TTFT), ("completion", names.COMPLETION))
        for key, point in points(received[0][name]).items()
        if dict(key)["outcome"] == "ok"
    }
    assert sums == pytest.approx(latencies, rel=1e-12)


def test_losses_are_told(received, spool):
    """Lost records, faults, sampled-out requests and open ones are metrics, too."""
    metrics, _ = received
    found = {
        name: [point.as_int for point in points(metrics[name]).values()]
        for name in (names.DROPPED, names.FAULTS, names.NOT_SAMPLED, names.OPEN, names.PARTIAL)
    }
    assert found == {
        names.DROPPED: [spool[1].lost],
        names.FAULTS: [FAULTS],
        names.NOT_SAMPLED: [NOT_SAMPLED],
        names.OPEN: [1],
        names.PARTIAL: [0],
    }


def test_age_is_that_of_the_newest_request(received, data):
    """The gauge is the time since the request that ended last, at the time of the export."""
    ((point),) = points(received[0][names.DATA_AGE]).values()
    newest = max(data.pair(request.instance).unix(request.ended) for request in data.requests)
    assert point.as_double == pytest.approx((point.time_unix_nano - newest) / 1e9, abs=0.1)


def test_names_units_and_kinds(received):
    """Metrics come in the scope of stagetrace, with units in UCUM, cumulative, and counters only grow."""
    metrics, receiver = received
    kinds = {name: metric.WhichOneof("data") for name, metric in metrics.items()}
    histograms = {names.STAGE_DURATION, names.TTFT, names.COMPLETION}
    counters = {
        names.REQUESTS,
        names.NOT_SAMPLED,
        names.PARTIAL,
        names.DROPPED,
        names.FAULTS,
        names.SET_ASIDE,
    }
    gauges = {names.OPEN, names.DATA_AGE}
    assert kinds == (
        dict.fromkeys(histograms, "histogram")
        | dict.fromkeys(counters, "sum")
        | dict.fromkeys(gauges, "gauge")
    )
    assert {name for name, metric in metrics.items() if metric.unit == "s"} == histograms | {names.DATA_AGE}
    assert all(metrics[name].sum.is_monotonic for name in counters)
    assert all(metric.description for metric in metrics.values())
    (resource,) = receiver.metrics[-1].resource_metrics
    assert attributes(resource.resource)["service.name"] == "busy"
    assert [scope.scope.name for scope in resource.scope_metrics] == ["stagetrace"]


def test_nothing_that_a_client_says_is_sent(received):
    """Labels of clients are no attributes, however many there are."""
    _, receiver = received
    assert receiver.metrics
    assert not any(b"own words" in request.SerializeToString() for request in receiver.metrics)


def in_memory(**options):
    """Metrics, and a function that collects the points of one of them by attributes."""
    reader = InMemoryMetricReader()
    metrics = StageMetrics([reader], **options)

    def collect(name):
        (resource,) = reader.get_metrics_data().resource_metrics
        (scope,) = resource.scope_metrics
        found = [metric.data.data_points for metric in scope.metrics if metric.name == name]
        return {frozenset(point.attributes.items()): point for each in found for point in each}

    return metrics, collect


def failed(code):
    """A request that failed with a code."""
    builder = RequestBuilder()
    request = builder.broken_off(2)
    request.outcome, request.facts["error_code"] = Outcome.ERROR, code
    return request


def test_error_types_are_bounded():
    """So many are told apart; all later ones are counted together, and none is lost."""
    metrics, collect = in_memory()
    codes = [f"Error{number}" for number in range(ERROR_TYPES_MAX + 10)] * 2
    for code in codes:
        metrics.observe(failed(code), partition(failed(code)), read_pair())
    counted = {dict(key)["error.type"]: point.value for key, point in collect(names.REQUESTS).items()}
    assert counted == {f"Error{n}": 2 for n in range(ERROR_TYPES_MAX)} | {OTHER_ERROR: 20}


def test_time_of_requests_that_did_not_end_well_is_in_no_stage():
    """They are counted with the stage they ended in, as in the analysis; those who were closed without an end are lost."""
    metrics, collect = in_memory()
    lost = RequestBuilder().request
    for request in (failed("http_500"), RequestBuilder().broken_off(5), lost):
        metrics.observe(request, partition(request), read_pair())
    assert collect(names.STAGE_DURATION) == collect(names.COMPLETION) == {}
    assert {(dict(k)["outcome"], dict(k).get("ended_stage")) for k in collect(names.REQUESTS)} == {
        ("error", "receive"),
        ("cancelled", "receive"),
        ("lost", None),
    }


def test_classes_are_those_of_the_rules(export):
    """Rules of one's own, which may look at a client's label, give the only values that the class can have."""
    rules = parse_rules(
        '[[class]]\nname = "mine"\nwhere = { label = "client\'s own words 3" }', source="test"
    )
    metrics, collect = in_memory(rules=rules)
    export(metrics)
    counted = Counter()
    for key, point in collect(names.REQUESTS).items():
        counted[dict(key)["class"]] += point.value
    assert counted == {"mine": 1, "other": 58}


def test_losses_of_a_spool_that_is_read_again_and_again(tmp_path):
    """What is lost is told as soon as it is read, and once."""
    metrics, collect = in_memory()
    spool = tmp_path / "spool"
    source = ClosedRequests(spool)
    metrics.watch(source)

    def totals():
        source.poll(final=True)
        source.commit()
        return {
            dict(key).get("reason", name): point.value
            for name in (names.DROPPED, names.FAULTS, names.NOT_SAMPLED, names.OPEN, names.SET_ASIDE)
            for key, point in collect(name).items()
            if point.value
        }

    assert totals() == {}
    server = write_spool(spool, requests=4)
    losses = {names.DROPPED: server.lost, names.FAULTS: FAULTS, names.NOT_SAMPLED: NOT_SAMPLED}
    assert totals() == totals() == losses | {names.OPEN: 1}
    (spool / "broken.stagetrace").write_bytes(b"no segment")
    assert totals() == totals() == losses | {names.OPEN: 1, "unreadable_segment": 1}


def test_losses_of_a_process_that_is_gone_stay(tmp_path, monkeypatch):
    """A counter does not fall when the process that has lost something is dead and all its records are let go of."""
    monkeypatch.setattr("stagetrace_export.window.SETTLE_NS", 0)
    monkeypatch.setattr("stagetrace_export.closed.SETTLE_NS", 0)
    metrics, collect = in_memory()
    source = ClosedRequests(tmp_path)
    metrics.watch(source)
    for _ in range(2):
        serving = f"import sys; sys.path.insert(0, {str(SUPPORT)!r}); import busy_spool, pathlib; "
        serving += f"busy_spool.write_spool(pathlib.Path({str(tmp_path)!r}), requests=4)"
        subprocess.run([sys.executable, "-c", serving], check=True)
        while source.poll().data.processes:
            source.commit()
        for path in tmp_path.iterdir():
            path.unlink()
    found = [
        next(iter(collect(name).values())).value for name in (names.DROPPED, names.FAULTS, names.NOT_SAMPLED)
    ]
    assert found == [2 * 4, 2 * FAULTS, 2 * NOT_SAMPLED]


@pytest.mark.parametrize(
    ("counted", "metric", "reason"),
    [
        ("set_aside", names.SET_ASIDE, "incomplete"),
        ("removed", names.SET_ASIDE, "removed"),
        ("given_up", names.SET_ASIDE, "given_up"),
        ("unreadable_segments", names.SET_ASIDE, "unreadable_segment"),
        ("partial", names.PARTIAL, None),
        ("open", names.OPEN, None),
    ],
)
def test_what_the_exporter_counts_is_a_metric(tmp_path, counted, metric, reason):
    """Each count of every spool's appears under its reason or its name, and nowhere else."""
    metrics, collect = in_memory()
    for number in (2, 3):
        source = ClosedRequests(tmp_path / f"spool-{number}")
        source.counts[counted] = number
        metrics.watch(source)
    found = [
        (name, dict(key).get("reason"), point.value)
        for name in (names.SET_ASIDE, names.PARTIAL, names.OPEN)
        for key, point in collect(name).items()
        if point.value
    ]
    assert found == [(metric, reason, 5)]


def test_metrics_are_sent_without_being_asked(no_otel, export):
    """The periodic reader exports at the interval of the standard variable."""
    with http_receiver() as receiver:
        no_otel.setenv("OTEL_EXPORTER_OTLP_METRICS_PROTOCOL", "http/protobuf")
        no_otel.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.endpoint)
        no_otel.setenv("OTEL_METRIC_EXPORT_INTERVAL", "50")
        metrics = StageMetrics(otlp_readers())
        export(metrics)
        deadline = time.monotonic() + 30
        while names.REQUESTS not in receiver.last_metrics and time.monotonic() < deadline:
            time.sleep(0.02)
        assert names.REQUESTS in receiver.last_metrics
        metrics.shutdown()


def test_a_receiver_that_is_gone_hurts_nobody(no_otel, export):
    """Without anybody at the endpoint nothing is raised, neither while counting nor at the end."""
    with http_receiver() as receiver:
        no_otel.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
        no_otel.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.endpoint)
        no_otel.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    metrics = StageMetrics(otlp_readers())
    export(metrics)
    metrics.shutdown()
    assert receiver.metrics == []


def test_none_wants_no_otlp(no_otel):
    """``OTEL_METRICS_EXPORTER=none`` sends nothing, and counting goes on for the other readers."""
    no_otel.setenv("OTEL_METRICS_EXPORTER", "none")
    assert otlp_readers() == []


@pytest.mark.parametrize(
    ("variable", "value", "hint"),
    [
        ("OTEL_METRICS_EXPORTER", "prometheus", "--prometheus"),
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "http/json", "grpc or http/protobuf"),
        ("OTEL_EXPORTER_OTLP_METRICS_PROTOCOL", "udp", "grpc or http/protobuf"),
        ("OTEL_METRIC_EXPORT_INTERVAL", "0", "OTEL_METRIC_EXPORT"),
        ("OTEL_EXPORTER_OTLP_COMPRESSION", "zip", "OTEL_EXPORTER_OTLP"),
        ("OTEL_EXPORTER_OTLP_TIMEOUT", "soon", "OTEL_EXPORTER_OTLP"),
    ],
)
def test_wrong_settings_are_one_line(no_otel, variable, value, hint):
    """A value that nothing can be made of is a usage error with a hint."""
    no_otel.setenv(variable, value)
    with pytest.raises(UsageError) as caught:
        otlp_readers()
    assert hint in caught.value.hint
    assert "\n" not in str(caught.value)
