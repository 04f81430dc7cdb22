"""The page that Prometheus scrapes, fetched over HTTP and read with Prometheus' own parsers."""

from __future__ import annotations

import gzip
import socket
import threading
import urllib.request
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor

import pytest
from busy_spool import write_spool
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from stagetrace import Horizon, Outcome, UsageError, partition, read_spool
from stagetrace_analyzer.classes import parse_rules
from stagetrace_export.metrics import StageMetrics
from stagetrace_export.prometheus import HOST, PORT, PrometheusPage, parse_address


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A spool that real recorders wrote, read and joined."""
    folder = tmp_path_factory.mktemp("prometheus") / "spool"
    write_spool(folder)
    return read_spool(folder)


@pytest.fixture
def page():
    """A page on a free port."""
    page = PrometheusPage(port=0)
    yield page
    page.stop()


@pytest.fixture
def metrics(page):
    """Metrics that are shown on the page."""
    metrics = StageMetrics([page.reader])
    yield metrics
    metrics.shutdown()


@pytest.fixture
def busy(metrics, data):
    """Metrics with every closed request of the spool."""
    for request in data.requests:
        metrics.observe(request, partition(request), data.pair(request.instance))
    return metrics


def fetch(url, timeout=30, **headers):
    """Status, headers and content of a page."""
    request = urllib.request.Request(url, headers=headers)  # noqa: S310 - our own page
    with urllib.request.urlopen(request, timeout=timeout) as answer:  # noqa: S310
        return answer.status, answer.headers, answer.read()


def families(url):
    """The metric families on a page, by name."""
    return {family.name: family for family in parse_text(fetch(url)[2].decode())}


def test_sums_and_counts_are_those_of_the_partitions(page, busy, data):
    """What the page says of a stage and a class is what the partitions say."""
    got = {"sum": Counter(), "count": Counter()}
    for sample in families(page.url)["stagetrace_stage_duration_seconds"].samples:
        kind = sample.name.rpartition("_")[2]
        if kind in got:
            got[kind][sample.labels["horizon"], sample.labels["stage"], sample.labels["reason"]] += (
                sample.value
            )
    sums, counts = defaultdict(int), Counter()
    for request in data.requests:
        for horizon in Horizon if request.outcome is Outcome.OK else ():
            seen = set()
            for interval in partition(request).of(horizon):
                key = str(horizon), str(interval.stage), str(interval.reason or "")
                sums[key] += interval.duration
                seen.add(key)
            counts.update(seen)
    assert got["sum"] == pytest.approx({key: total / 1e9 for key, total in sums.items()}, rel=1e-12)
    assert got["count"] == counts


def test_buckets_are_cumulative_and_end_at_infinity(page, busy):
    """Each bucket holds those below it, and the last one all."""
    series = defaultdict(dict)
    for family in families(page.url).values():
        for sample in family.samples if family.type == "histogram" else ():
            whose = family.name, *sorted((k, v) for k, v in sample.labels.items() if k != "le")
            name = sample.name.removeprefix(family.name)
            series[whose][sample.labels["le"] if name == "_bucket" else name] = sample.value
    assert len(series) > 60
    for found in series.values():
        counts = [found[le] for le in sorted((le for le in found if le[0] != "_"), key=float)]
        assert counts == sorted(counts)
        assert counts[-1] == found["+Inf"] == found["_count"] > 0


def test_names_and_types(page, busy):
    """Names have units and suffixes as Prometheus' conventions want them."""
    assert {name: family.type for name, family in families(page.url).items()} == {
        "stagetrace_stage_duration_seconds": "histogram",
        "stagetrace_request_ttft_seconds": "histogram",
        "stagetrace_request_completion_seconds": "histogram",
        "stagetrace_requests": "counter",
        "stagetrace_requests_not_sampled": "counter",
        "stagetrace_requests_partial": "counter",
        "stagetrace_requests_open": "gauge",
        "stagetrace_records_dropped": "counter",
        "stagetrace_recorder_faults": "counter",
        "stagetrace_set_aside": "counter",
        "stagetrace_data_age_seconds": "gauge",
    }
    assert all(family.documentation for family in families(page.url).values())


def test_page_before_the_first_request(page, metrics):
    """The page is there from the beginning, and counters of losses are at nought, so that their growth is seen."""
    found = families(page.url)
    assert [sample.value for sample in found["stagetrace_records_dropped"].samples] == [0]
    assert len(found["stagetrace_set_aside"].samples) == 4
    assert "stagetrace_data_age_seconds" not in found


def test_openmetrics_and_compression_on_request(page, busy):
    """Prometheus asks for OpenMetrics and gzip, and gets them."""
    _, headers, content = fetch(page.url, Accept="application/openmetrics-text; version=1.0.0")
    assert headers["content-type"].startswith("application/openmetrics-text")
    names = {family.name for family in parse_openmetrics(content.decode())}
    assert names == set(families(page.url))
    _, headers, packed = fetch(page.url, **{"Accept-Encoding": "gzip"})
    assert headers["content-encoding"] == "gzip"
    assert b"stagetrace_requests_total" in gzip.decompress(packed)


def test_scrapes_at_the_same_time_are_each_whole(page, busy):
    """Two Prometheus servers get the same page, while requests are being counted."""
    with ThreadPoolExecutor(4) as pool:
        pages = list(pool.map(lambda _: families(page.url), range(12)))
    assert all(len(found) == 11 for found in pages)
    requests = [sum(sample.value for sample in found["stagetrace_requests"].samples) for found in pages]
    assert requests == [59] * 12


def test_label_values_are_escaped(page, data):
    """Quotes and backslashes in the name of a class survive a scrape."""
    name = 'a "b" \\ c {d}'
    rules = parse_rules(f"[[class]]\nname = '{name}'\nwhere = {{}}", source="test")
    metrics = StageMetrics([page.reader], rules=rules)
    metrics.observe(data.requests[0], partition(data.requests[0]), data.pair(data.requests[0].instance))
    assert [sample.labels["class"] for sample in families(page.url)["stagetrace_requests"].samples] == [name]
    metrics.shutdown()


def test_a_client_that_says_nothing_keeps_nobody_waiting(page, metrics):
    """An open connection without a request does not hold up a scrape."""
    address = page.url.split("/")[2].split(":")
    with socket.create_connection((address[0], int(address[1]))):
        assert fetch(page.url, timeout=5)[0] == 200


def test_a_client_that_leaves_is_not_told_of(page, metrics, capfd):
    """A connection that is reset leaves no traceback, and the page goes on."""
    host, port = page.url.split("/")[2].split(":")
    with socket.create_connection((host, int(port))) as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        client.sendall(b"GET /met")
    assert fetch(page.url)[0] == 200
    assert capfd.readouterr().err == ""


def test_stopping_lets_go_of_the_port():
    """After ``stop`` nobody listens, no thread is left, and the port can be had again."""
    page = PrometheusPage(port=0)
    metrics = StageMetrics([page.reader])
    host, port = page.url.split("/")[2].split(":")
    fetch(page.url)
    page.stop()
    metrics.shutdown()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((host, int(port)))
    assert not [thread for thread in threading.enumerate() if thread.name == "stagetrace-prometheus"]
    PrometheusPage(port=int(port)).stop()


def test_loopback_unless_told_otherwise(page):
    """Nobody outside the host can ask, unless somebody wanted it so."""
    assert page.url.startswith("http://127.0.0.1:")
    assert (HOST, PORT) == ("127.0.0.1", 9464)


@pytest.mark.skipif(not socket.has_ipv6, reason="no IPv6 here")
def test_ipv6():
    """An address of six is served, too."""
    try:
        page = PrometheusPage("::1", 0)
    except UsageError:
        pytest.skip("no IPv6 loopback here")
    assert page.url.startswith("http://[::1]:")
    assert fetch(page.url)[0] == 200
    page.stop()


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("127.0.0.1:9464", ("127.0.0.1", 9464)),
        ("10.1.2.3:1", ("10.1.2.3", 1)),
        (":9000", (HOST, 9000)),
        ("9000", (HOST, 9000)),
        ("[::1]:9000", ("::1", 9000)),
        (" host.example:0 ", ("host.example", 0)),
    ],
)
def test_addresses(text, address):
    """A host and a port; without a host it is loopback."""
    assert parse_address(text) == address


@pytest.mark.parametrize(
    "text", ["", ":", "host", "host:", "host:x", "host:-1", "host:65536", "1:²", "h:" + "9" * 5000]
)
def test_what_is_no_address(text):
    """What is no address is a usage error with an example."""
    with pytest.raises(UsageError, match="no address") as caught:
        parse_address(text)
    assert "127.0.0.1:9464" in caught.value.hint


def test_an_address_that_is_not_to_be_had(page):
    """A port in use and a host that is not ours are usage errors."""
    port = int(page.url.split("/")[2].split(":")[1])
    with pytest.raises(
        UsageError, match=rf"cannot serve metrics on 127\.0\.0\.1:{port}: Address already in use"
    ):
        PrometheusPage(port=port)
    with pytest.raises(UsageError, match="cannot serve metrics on 192"):
        PrometheusPage("192.0.2.1", 0)
