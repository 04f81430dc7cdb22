"""The dashboard and the alert rules ask for what there is, in valid PromQL."""

from __future__ import annotations

import json
import re
import urllib.request
from itertools import combinations
from pathlib import Path

import promql_parser as promql
import pytest
import yaml
from busy_spool import write_spool
from prometheus_client.parser import text_string_to_metric_families

from stagetrace import Horizon, Kind, Outcome, Reason, Stage, partition, read_spool
from stagetrace_export.metrics import StageMetrics
from stagetrace_export.prometheus import PrometheusPage

ROOT = Path(__file__).parents[2]
DASHBOARD = json.loads((ROOT / "dashboards/grafana/stagetrace.json").read_text(encoding="utf-8"))
RULES = [
    rule
    for group in yaml.safe_load((ROOT / "dashboards/grafana/alerts.yaml").read_text(encoding="utf-8"))[
        "groups"
    ]
    for rule in group["rules"]
]
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
VARIABLES = {variable["name"]: variable for variable in DASHBOARD["templating"]["list"]}
BUILT_IN = {"__rate_interval": "5m", "__range": "1h"}
VALUES = {"class": ".*", "instance": ".*", "horizon": "ttft"}

PROMETHEUS_LABELS = {"instance", "job"}
"""Labels that Prometheus adds to what it scrapes."""

CLOSED = {
    "stage": set(Stage),
    "ended_stage": set(Stage),
    "kind": set(Kind),
    "reason": set(Reason),
    "horizon": set(Horizon),
    "outcome": set(Outcome),
    "le": {"+Inf"},
}
"""Labels whose values are known beforehand."""


@pytest.fixture(scope="module")
def scraped(tmp_path_factory):
    """Labels of every sample name on a real page."""
    folder = tmp_path_factory.mktemp("grafana") / "spool"
    write_spool(folder)
    data = read_spool(folder)
    page = PrometheusPage(port=0)
    metrics = StageMetrics([page.reader])
    for request in data.requests:
        metrics.observe(request, partition(request), data.pair(request.instance))
    with urllib.request.urlopen(page.url, timeout=30) as answer:  # noqa: S310 - our own page
        content = answer.read().decode()
    metrics.shutdown()
    page.stop()
    labels = {}
    for family in text_string_to_metric_families(content):
        for sample in family.samples:
            labels.setdefault(sample.name, set()).update(sample.labels)
    return labels


def substituted(query):
    """A query as Grafana sends it, with a value for each variable."""
    for name, value in (BUILT_IN | VALUES).items():
        query = query.replace(f"${{{name}}}", value).replace(f"${name}", value)
    return query


QUERIES = {
    f"{panel['title']} {target['refId']}": substituted(target["expr"])
    for panel in PANELS
    for target in panel["targets"]
} | {rule["alert"]: rule["expr"] for rule in RULES}


def parsed(query):
    """Selectors of a query, and the labels that it groups by and joins on."""
    selectors, labels = [], set()

    def visit(node):
        if isinstance(node, promql.MatrixSelector):
            selectors.append(node.vector_selector)
        elif isinstance(node, promql.VectorSelector):
            selectors.append(node)
        elif isinstance(node, promql.AggregateExpr) and node.modifier is not None:
            labels.update(node.modifier.labels)
        elif (
            isinstance(node, promql.BinaryExpr)
            and node.modifier is not None
            and node.modifier.matching is not None
        ):
            labels.update(node.modifier.matching.labels)

    promql.walk(promql.parse(query), visit)
    return selectors, labels


@pytest.mark.parametrize("name", QUERIES)
def test_queries_ask_for_what_is_on_the_page(name, scraped):
    """Every metric, every label and every fixed value in a query exists; a parser of PromQL takes the query."""
    selectors, labels = parsed(QUERIES[name])
    assert selectors
    known = set(PROMETHEUS_LABELS)
    for selector in selectors:
        assert selector.name in scraped
        known |= scraped[selector.name]
        for matcher in selector.matchers.matchers:
            assert matcher.name in scraped[selector.name] | PROMETHEUS_LABELS
            if matcher.op in (promql.MatchOp.Equal, promql.MatchOp.NotEqual):
                assert matcher.value in CLOSED[matcher.name]
    assert labels <= known


def test_every_metric_of_the_page_is_on_the_dashboard(scraped):
    """Nothing is exported that nobody looks at."""
    asked = {
        re.sub("_(bucket|sum|count)$", "", selector.name)
        for query in QUERIES.values()
        for selector in parsed(query)[0]
    }
    assert {re.sub("_(bucket|sum|count)$", "", name) for name in scraped} == asked


def test_variables_are_there(scraped):
    """Queries use the dashboard's variables and Grafana's, and each variable's own query asks for what there is."""
    used = {
        name for panel in PANELS for t in panel["targets"] for name in re.findall(r"\$\{?(\w+)", t["expr"])
    }
    assert used == set(VALUES) | set(BUILT_IN)
    assert set(VARIABLES) == {"datasource", "instance", "class", "horizon"}
    assert VARIABLES["horizon"]["query"].split(",") == list(Horizon)
    for name in ("instance", "class"):
        query = VARIABLES[name]["query"]["query"]
        metric, _, label = re.fullmatch(r"label_values\((\w+)(\{.*\})?, (\w+)\)", query).groups()
        assert label == name
        assert label in scraped[metric] | PROMETHEUS_LABELS


def test_panels_are_whole():
    """Each panel has what Grafana needs, and a title, a unit and a description for who looks at it."""
    for panel in PANELS:
        assert panel["title"]
        assert panel["description"].endswith(".")
        assert panel["fieldConfig"]["defaults"]["unit"]
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        assert all(target["datasource"] == panel["datasource"] for target in panel["targets"])
        references = [target["refId"] for target in panel["targets"]]
        assert references == list("ABCDEFGH"[: len(references)])
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    assert len({panel["title"] for panel in DASHBOARD["panels"]}) == len(ids)


def test_panels_do_not_overlap():
    """Every panel has its own place in a grid of 24 columns."""
    places = [panel["gridPos"] for panel in DASHBOARD["panels"]]
    assert all(place["x"] >= 0 and place["w"] > 0 and place["x"] + place["w"] <= 24 for place in places)
    for one, other in combinations(places, 2):
        apart = (
            one["x"] + one["w"] <= other["x"]
            or other["x"] + other["w"] <= one["x"]
            or one["y"] + one["h"] <= other["y"]
            or other["y"] + other["h"] <= one["y"]
        )
        assert apart, (one, other)


def test_dashboard_can_be_imported():
    """It brings an id of its own that is the same everywhere, and a version of the schema."""
    assert DASHBOARD["uid"] == "stagetrace"
    assert DASHBOARD["schemaVersion"] >= 36
    assert "id" not in DASHBOARD
    assert re.search(r"\b(localhost|127\.|[0-9a-f]{8}-)", json.dumps(DASHBOARD)) is None


def test_a_stage_has_one_colour_everywhere():
    """Where series are stages, every stage has its own colour, with and without a reason, in every panel the same."""
    palettes = []
    for panel in PANELS:
        if not re.match(r"\{\{stage\}\}", panel["targets"][0]["legendFormat"]):
            continue
        palette = {}
        for override in panel["fieldConfig"]["overrides"]:
            pattern = re.compile(override["matcher"]["options"].strip("/"))
            (colour,) = (p["value"]["fixedColor"] for p in override["properties"] if p["id"] == "color")
            for stage in Stage:
                if pattern.match(stage) and pattern.match(f"{stage} step"):
                    assert stage not in palette
                    palette[stage] = colour
        palettes.append(palette)
    assert len(palettes) == 3
    assert all(palette == palettes[0] for palette in palettes)
    assert set(palettes[0]) == set(Stage)
    assert len(set(palettes[0].values())) == len(Stage)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_alert_rules_are_whole(rule):
    """A rule has a name, a severity, words for who is woken, and names only labels that its result has."""
    assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
    assert re.fullmatch(r"Stagetrace[A-Z]\w+", rule["alert"])
    assert rule["labels"]["severity"] in {"critical", "warning"}
    assert rule["annotations"]["summary"]
    assert rule["annotations"]["description"].endswith(".")
    assert promql.parse_duration(rule.get("for", "1m")).total_seconds() >= 60
    named = set(re.findall(r"\$labels\.(\w+)", " ".join(rule["annotations"].values())))
    assert named <= parsed(rule["expr"])[1] | {"instance"}


def test_what_is_alerted():
    """There is a rule for each way in which the service or the figures can go wrong."""
    assert [rule["alert"] for rule in RULES] == [
        "StagetraceDominantWait",
        "StagetraceUnattributed",
        "StagetraceRecordsDropped",
        "StagetraceRecorderFaults",
        "StagetraceDataOld",
        "StagetraceNoData",
    ]
    expressions = {rule["alert"]: rule["expr"] for rule in RULES}
    assert "> 0.02" in expressions["StagetraceUnattributed"]
    assert next(rule for rule in RULES if rule["alert"] == "StagetraceDominantWait")["for"] == "10m"


def table_of_the_page():
    """Rows of the table of metrics in the documentation: metric, sample name, type, labels."""
    text = (ROOT / "docs/metrics.md").read_text(encoding="utf-8")
    table = text[text.index("| metric | on the page |") :].split("\n\n", 1)[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table]


def test_documentation_names_what_is_on_the_page(scraped):
    """The page of metrics names every metric, with its labels, and no other."""
    documented = {row[1].strip("`"): set(re.findall(r"`(\w+)`", row[3])) for row in table_of_the_page()}
    found = {}
    for name, labels in scraped.items():
        family = re.sub("_(bucket|sum|count)$", "", name)
        found.setdefault(family, set()).update(labels - {"le"})
    assert documented == found
