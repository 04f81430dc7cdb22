"""Overview: the answer in words, a card a class, where the time goes, and how good the data are."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

import dash_mantine_components as dmc
from dash.development.base_component import Component

from stagetrace.stages import Horizon
from stagetrace_analyzer.figures.partition import PartitionOptions, stage_partition
from stagetrace_analyzer.reports.document import ClassSection, Document, document_of
from stagetrace_analyzer.reports.json_report import to_dict
from stagetrace_analyzer.reports.words import title
from stagetrace_dashboard.page import Page, Table
from stagetrace_dashboard.parts import (
    card,
    download,
    facts,
    figure_table,
    graph,
    link,
    nothing,
    picture_buttons,
    stack,
)

if TYPE_CHECKING:
    from stagetrace_analyzer.figures.palette import Theme
    from stagetrace_analyzer.results import Analysis, ClassReport, Remedy
    from stagetrace_dashboard.data import Data
    from stagetrace_dashboard.view import View

_TRY_FIRST: Final = 2
_UNTIL: Final = {
    Horizon.TTFT: "until the first useful byte (TTFT)",
    Horizon.COMPLETION: "until the last byte (completion)",
}


def shown(view: View, analysis: Analysis) -> list[ClassReport]:
    """Return the classes of an analysis that a view is about."""
    return [
        report
        for report in analysis.classes
        if view.traffic_class in {None, report.traffic_class}
        and (report.phase is None or view.phase in {None, report.phase})
    ]


def layout(view: View, data: Data, theme: Theme) -> Component:
    """Return the answers first, then what they rest on."""
    analysis = data.analysis_of(view)
    reports = shown(view, analysis)
    if not reports:
        return nothing("No request is like this", "Take back some of the choices above.")
    document = document_of(analysis)
    sections = dict(zip(map(title, analysis.classes), document.classes, strict=True))
    answers = dict(document.answers)
    figure = stage_partition(reports, PartitionOptions(view.horizon, theme=theme))
    return stack(
        *_headline(_texts(reports, analysis, document), document.alarms),
        dmc.SimpleGrid(
            [
                _class_card(report, answers[title(report)], sections[title(report)], view)
                for report in reports
            ],
            cols={"base": 1, "md": 2, "xl": 2 if len(reports) == 4 else min(3, len(reports))},  # noqa: PLR2004 - two by two
            spacing="md",
        ),
        card(
            f"Where the time goes, {_UNTIL[view.horizon]}",
            graph("partition", figure, theme, "bar"),
            actions=[*picture_buttons("partition"), download("CSV", PAGE.csv_href(view, "stages"))],
            note="Mean of the requests that ended well. Waits are hatched, in the hue of the work that they "
            "wait for; transfers are dotted. A click on a bar shows its class alone.",
        ),
        card("Data quality", facts(document.quality), actions=[link("more", view.on("quality").href)]),
    )


def bars(view: View, data: Data) -> list[dict[str, str]]:
    """Return the class that each bar is of."""
    return [_of_class(report) for report in shown(view, data.analysis_of(view))]


def _of_class(report: ClassReport) -> dict[str, str]:
    chosen = {"traffic_class": report.traffic_class}
    return chosen if report.phase is None else chosen | {"phase": report.phase}


def _texts(reports: Sequence[ClassReport], analysis: Analysis, document: Document) -> Iterator[str]:
    yield document.headline
    yield document.selection
    if len(reports) < len(analysis.classes):
        yield f"Shown here are {sum(report.requests for report in reports):,} of them"


def _headline(texts: Iterable[str], alarms: Sequence[str]) -> Iterator[Component]:
    yield dmc.Text(" ".join(f"{text}." for text in texts if text), c="dimmed")
    for alarm in alarms:
        yield dmc.Alert(alarm, color="red", variant="light")


def _class_card(report: ClassReport, answer: str, section: ClassSection, view: View) -> Component:
    of_class = view.on("class").choose(**_of_class(report))
    latencies = section.tables[0]
    return card(
        section.name,
        dmc.Text(answer, mb="sm", className="st-wrap"),
        figure_table(latencies, with_remarks=False),
        *_try_first(report.remedies),
        actions=[link("more", of_class.href)],
        note=section.counts,
    )


def _try_first(remedies: Sequence[Remedy]) -> Iterator[Component]:
    if not remedies:
        return
    yield dmc.Text("Try first", fw=600, size="sm", mt="sm")
    yield dmc.List([dmc.ListItem(remedy_in_words(remedy)) for remedy in remedies[:_TRY_FIRST]], size="sm")


def remedy_in_words(remedy: Remedy) -> Component:
    """Return a remedy with its option and how one sees that it worked."""
    option = [] if remedy.option is None else [" ", dmc.Code(remedy.option, className="st-whole")]
    return dmc.Text(
        [remedy.advice, *option, dmc.Text(f"Worked if: {remedy.check}", c="dimmed", size="sm")], size="sm"
    )


def twin(view: View, data: Data) -> Any:
    """Return what ``stagetrace analyze --json`` gives, without the classes that the view is not about."""
    analysis = data.analysis_of(view)
    found = to_dict(analysis)
    kept = [title(report) for report in shown(view, analysis)]
    pairs = zip(analysis.classes, found["classes"], strict=True)
    return found | {"classes": [as_dict for report, as_dict in pairs if title(report) in kept]}


def stages_table(view: View, data: Data) -> Table:
    """Return the time in every stage as a file."""
    columns = (
        "class",
        "phase",
        "horizon",
        "stage",
        "kind",
        "share",
        "share_low",
        "share_high",
        "mean_ns",
        "p50_ns",
        "p95_ns",
    )
    return Table(
        columns,
        [
            (
                report.traffic_class,
                report.phase,
                time.horizon.value,
                time.stage,
                time.kind.value,
                time.share.value,
                time.share.low,
                time.share.high,
                time.mean_ns,
                time.p50.value_ns,
                time.p95.value_ns,
            )
            for report in shown(view, data.analysis_of(view))
            for time in report.stages
        ],
    )


PAGE: Final = Page(
    name="overview",
    title="Overview",
    layout=layout,
    twin=twin,
    filters=("traffic_class", "phase", "model", "arm", "instance", "by_phase", "horizon"),
    tables={"stages": stages_table},
    bars=bars,
)
