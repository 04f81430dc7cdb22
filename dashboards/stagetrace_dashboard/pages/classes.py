"""Class: one class from all sides: typical against slow, distributions, over time, taken apart."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

import dash_mantine_components as dmc
from dash import html
from dash.development.base_component import Component

from stagetrace_analyzer.figures.distributions import (
    DistributionOptions,
    Metric,
    latency_ecdf,
    latency_histogram,
)
from stagetrace_analyzer.figures.labels import HORIZONS
from stagetrace_analyzer.figures.over_time import OverTimeOptions, load_over_time, stages_over_time
from stagetrace_analyzer.figures.partition import PartitionOptions, stage_partition, typical_against_tail
from stagetrace_analyzer.reports.document import document_of
from stagetrace_analyzer.reports.json_report import to_dict
from stagetrace_dashboard.page import Page
from stagetrace_dashboard.pages.overview import remedy_in_words, shown, stages_table
from stagetrace_dashboard.parts import (
    card,
    download,
    figure_table,
    graph,
    link,
    nothing,
    picture_buttons,
    stack,
)
from stagetrace_dashboard.splits import SPLITS, Split, split_classes, split_rules

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from stagetrace_analyzer.figures.palette import Theme
    from stagetrace_analyzer.results import Analysis, ClassReport
    from stagetrace_dashboard.data import Data
    from stagetrace_dashboard.view import View

_DISTRIBUTION_HEIGHT: Final = 340
_TITLES: Final = {Metric.TTFT: "TTFT", Metric.COMPLETION: "Completion"}


def report_of(view: View, data: Data) -> ClassReport | None:
    """Return the class that a view is about: the one that it names, or that has most requests."""
    return max(shown(view, data.analysis_of(view)), key=lambda report: report.requests, default=None)


def layout(view: View, data: Data, theme: Theme) -> Component:
    """Return everything about the class."""
    report = report_of(view, data)
    if report is None:
        return nothing("No request is like this", "Take back some of the choices above.")
    analysis = data.analysis_of(view)
    document = document_of(analysis)
    place = analysis.classes.index(report)
    section = document.classes[place]
    latencies, where, questions, *stages = section.tables
    return stack(
        card(
            section.name,
            dmc.Text(document.answers[place][1], mb="sm", className="st-wrap"),
            dmc.SimpleGrid(
                [figure_table(latencies), figure_table(questions)], cols={"base": 1, "md": 2}, spacing="md"
            ),
            *(dmc.Text(remark, size="sm", c="dimmed") for remark in section.remarks),
            actions=[link("its requests", _requests_of(report, view).href)],
            note=section.counts,
        ),
        *_remedies(report),
        _typical_against_tail(report, view, theme, figure_table(where)),
        *_distributions(report, theme),
        *_over_time(report, theme),
        *(card("Stages", figure_table(table), actions=[_csv(view)]) for table in stages),
        _split(report, view, data, theme),
    )


def _requests_of(report: ClassReport, view: View) -> View:
    phase = view.phase if report.phase is None else report.phase
    return view.on("requests").choose(
        traffic_class=report.traffic_class, phase=phase, sort="ttft_ns", descending=True
    )


def _csv(view: View) -> Component:
    return download("CSV", PAGE.csv_href(view, "stages"))


def _remedies(report: ClassReport) -> Iterator[Component]:
    if report.remedies:
        items = [dmc.ListItem(remedy_in_words(remedy)) for remedy in report.remedies]
        yield card("Cheaper things to try first", dmc.List(items, spacing="xs"))


def _typical_against_tail(report: ClassReport, view: View, theme: Theme, where: Component) -> Component:
    name = "typical-against-tail"
    figure = typical_against_tail(report, PartitionOptions(view.horizon, theme=theme))
    return card(
        f"Typical requests against the slowest 5 %, {HORIZONS[view.horizon]}",
        graph(name, figure, theme),
        where,
        actions=picture_buttons(name),
    )


def _distributions(report: ClassReport, theme: Theme) -> Iterator[Component]:
    cards = []
    for metric, metric_title in _TITLES.items():
        options = DistributionOptions(metric, theme)
        for kind, said, figure in (
            ("ecdf", "share that took at most so long", latency_ecdf([report], options)),
            ("histogram", "how long requests take", latency_histogram([report], options)),
        ):
            name = f"{metric.value}-{kind}"
            shown_alone = figure.update_layout(showlegend=False, height=_DISTRIBUTION_HEIGHT)
            cards.append(_figure_card(f"{metric_title}: {said}", name, shown_alone, theme))
    yield dmc.SimpleGrid(cards, cols={"base": 1, "lg": 2}, spacing="md")


def _figure_card(said: str, name: str, figure: go.Figure, theme: Theme) -> Component:
    return card(said, graph(name, figure, theme), actions=picture_buttons(name))


def _over_time(report: ClassReport, theme: Theme) -> Iterator[Component]:
    options = OverTimeOptions(theme)
    for said, name, figure in (
        ("Stages over time, under the load", "stages-over-time", stages_over_time(report, options)),
        ("Load and median TTFT over time", "load-over-time", load_over_time([report], options)),
    ):
        yield card(
            said,
            graph(name, figure, theme, "time"),
            actions=picture_buttons(name),
            note="Drag over a time to look at it alone.",
        )


def _split(report: ClassReport, view: View, data: Data, theme: Theme) -> Component:
    tabs = [
        link(
            html.Span(split.title, className="st-button st-chosen" if name == view.split else "st-button"),
            view.choose(split=None if name == view.split else name).href,
            stays=True,
        )
        for name, split in SPLITS.items()
    ]
    if view.split is None:
        return card("Taken apart", dmc.Group(tabs, gap="xs"), note="The same analysis by one more fact.")
    parts = split_reports(report, view, data, SPLITS[view.split])
    name = f"split-{view.split}"
    if not parts:
        return card(
            "Taken apart", dmc.Group(tabs, gap="xs"), dmc.Text("This is not known of its requests.", mt="md")
        )
    unknown = report.requests - sum(part.requests for part in parts)
    said = [dmc.Text(f"Not known of {unknown:,} requests.", size="sm", c="dimmed")] if unknown > 0 else []
    return card(
        f"Taken apart {SPLITS[view.split].title}",
        dmc.Group(tabs, gap="xs", mb="md"),
        graph(name, stage_partition(parts, PartitionOptions(view.horizon, theme=theme)), theme),
        graph(
            f"{name}-ecdf", latency_ecdf(parts, DistributionOptions(Metric(view.horizon.value), theme)), theme
        ),
        *said,
        actions=picture_buttons(name),
        note="What the output became is known only at the end: not for comparing."
        if view.split == "output"
        else None,
    )


def split_reports(report: ClassReport, view: View, data: Data, split: Split) -> list[ClassReport]:
    """Return the class in a report for each range of a fact that it has, in order."""
    found: Analysis = data.analysis(
        view.selection(with_phase=not data.by_phase(view)),
        by_phase=data.by_phase(view),
        rules=split_rules(data.rules, report.traffic_class, split),
        classes=split_classes(data.scope.selection.classes, report.traffic_class, split),
    )
    parts = [
        part for part in found.classes if part.traffic_class in split.upper and part.phase == report.phase
    ]
    return sorted(parts, key=lambda part: list(split.upper).index(part.traffic_class))


def twin(view: View, data: Data) -> Any:
    """Return the class as ``stagetrace analyze --json`` has it, and taken apart likewise."""
    report = report_of(view, data)
    if report is None:
        return {"class": None, "split": None}
    analysis = data.analysis_of(view)
    as_dict = to_dict(analysis)["classes"][analysis.classes.index(report)]
    if view.split is None:
        return {"class": as_dict, "split": None}
    parts = split_reports(report, view, data, SPLITS[view.split])
    return {"class": as_dict, "split": {part.traffic_class: part for part in parts}}


PAGE: Final = Page(
    name="class",
    title="Class",
    layout=layout,
    twin=twin,
    filters=("traffic_class", "phase", "model", "arm", "instance", "by_phase", "horizon"),
    tables={"stages": stages_table},
)
