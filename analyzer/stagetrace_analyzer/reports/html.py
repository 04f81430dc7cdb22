"""An analysis as one HTML file that fetches nothing: answers in words, figures, tables.

Everything from the data is escaped.  Scripts are ours and plotly's, named by their
hashes in the page's policy, which forbids everything else, the network included.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.resources
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from html import escape
from string import Template
from typing import Final

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from stagetrace.stages import Horizon
from stagetrace_analyzer.figures.distributions import DistributionOptions, Metric, latency_ecdf
from stagetrace_analyzer.figures.over_time import load_over_time, stages_over_time
from stagetrace_analyzer.figures.palette import (
    FONT,
    GROUNDS,
    PATTERN_INK,
    STAGE_COLOURS,
    TEMPLATES,
    stage_colour,
)
from stagetrace_analyzer.figures.partition import (
    Measure,
    PartitionOptions,
    stage_partition,
    typical_against_tail,
)
from stagetrace_analyzer.reports.document import Advice, ClassSection, Document, Row, Table, document_of
from stagetrace_analyzer.reports.words import printable
from stagetrace_analyzer.results import Analysis, ClassReport, Region

_OPEN_CLASSES: Final = 4

_PAGE: Final = Template("""\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="$policy">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Where requests wait</title>
<style>
$style</style>
</head>
<body>
<main>
$body
</main>
$figures
<script>$plotly</script>
<script>$script</script>
</body>
</html>
""")


def render_html(analysis: Analysis) -> str:
    """Return the analysis as the text of an HTML file."""
    figures = _Figures()
    body = "\n".join(_body(document_of(analysis), analysis, figures))
    scripts: dict[str, str] = {"plotly": get_plotlyjs(), "script": _asset("report.js")}
    return _PAGE.substitute(
        scripts,
        policy=_policy(list(scripts.values())),
        style=_style(),
        body=body,
        figures="\n".join(figures.scripts()),
    )


def _asset(name: str) -> str:
    return (importlib.resources.files(__package__) / name).read_text(encoding="utf-8")


def _style() -> str:
    colours = {
        f"{theme}_{name}": getattr(ground, name)
        for theme, ground in GROUNDS.items()
        for name in ("page", "surface", "ink", "muted", "grid", "alarm")
    }
    return Template(_asset("report.css")).substitute(colours, font=FONT, pattern_ink=PATTERN_INK)


def _policy(scripts: Sequence[str]) -> str:
    """Allow the page's own scripts and styles, and nothing else; plotly writes styles, and images to save."""
    hashes = " ".join(
        f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"
        for script in scripts
    )
    return f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:"


@dataclass(slots=True)
class _Figures:
    """Figures of the page; the page's script draws them."""

    drawn: list[go.Figure] = field(default_factory=list)

    def add(self, caption: str, remark: str, figure: go.Figure) -> str:
        """Keep a figure; return its place in the page."""
        self.drawn.append(figure)
        name = f"figure-{len(self.drawn)}"
        small = f"<small>{_plain(remark)}</small>" if remark else ""
        height = int(figure.layout.height)
        return (
            f"<figure><figcaption>{_plain(caption)}{small}</figcaption>"
            f'<div class="plot" data-figure="{name}" style="height:{height}px"></div></figure>'
        )

    def scripts(self) -> Iterator[str]:
        """Yield the figures and templates as data blocks."""
        templates = {name: template.to_plotly_json() for name, template in TEMPLATES.items()}
        yield _data("templates", json.dumps(templates))
        for number, figure in enumerate(self.drawn, start=1):
            figure.layout.template = None
            yield _data(f"figure-{number}", figure.to_json())


def _data(name: str, text: str) -> str:
    # Within a script element only "<" can end it or open a comment.
    safe = text.replace("<", "\\u003c")
    return f'<script type="application/json" id="{name}">{safe}</script>'


def _body(document: Document, analysis: Analysis, figures: _Figures) -> Iterator[str]:
    yield "<h1>Where requests wait</h1>"
    yield f'<p class="headline">{_plain(document.headline)}</p>'
    if document.selection:
        yield f'<p class="muted">{_plain(document.selection)}</p>'
    yield from (f'<p class="about">{_plain(remark)}</p>' for remark in document.about)
    yield from (f'<p class="alarm">{_plain(alarm)}</p>' for alarm in document.alarms)
    yield "<h2>Answers</h2>"
    yield '<div class="answers">'
    yield from (_card(title, answer) for title, answer in document.answers)
    yield "</div>"
    if document.advice:
        yield "<h2>Cheaper things to try first</h2>"
        yield from map(_advice, document.advice)
    yield from _overview(analysis.classes, figures)
    yield "<h2>Class by class</h2>"
    open_ = len(document.classes) <= _OPEN_CLASSES
    for section, report in zip(document.classes, analysis.classes, strict=True):
        yield from _section(section, report, figures, "open" if open_ else "")
    yield "<h2>Load</h2>"
    yield from _table(document.load)
    yield "<h2>Data quality</h2>"
    yield '<table class="quality">'
    yield from (
        f"<tr><td>{_plain(label)}</td><td>{_plain(text)}</td></tr>" for label, text in document.quality
    )
    yield "</table>"


def _card(title: str, *texts: str) -> str:
    paragraphs = "".join(f"<p>{_plain(text)}</p>" for text in texts)
    return f'<div class="card"><h3>{_plain(title)}</h3>{paragraphs}</div>'


def _advice(advice: Advice) -> str:
    remedy = advice.remedy
    option = "" if remedy.option is None else f"Option {remedy.option}. "
    return _card(
        remedy.advice,
        f"{option}Worked if: {remedy.check}",
        f"For {', '.join(advice.classes)}. Source: {remedy.source}",
    )


def _overview(reports: Sequence[ClassReport], figures: _Figures) -> Iterator[str]:
    yield "<h2>What the time consists of</h2>"
    yield (
        '<p class="muted">Mean over the requests of a class that ended well. Waits are hatched, in the hue '
        "of the work that they wait for; transfers are dotted. A class of which no request ended well is "
        "absent.</p>"
    )
    titles = {
        Horizon.TTFT: "Until the first useful byte (TTFT)",
        Horizon.COMPLETION: "Until the last byte (completion)",
    }
    for horizon, title in titles.items():
        yield '<div class="pair">'
        for measure, of in ((Measure.TIME, "how long"), (Measure.SHARE, "in shares")):
            options = PartitionOptions(horizon, measure)
            yield figures.add(f"{title}, {of}", "", stage_partition(reports, options))
        yield "</div>"
    yield "<h2>How long requests take</h2>"
    yield (
        '<p class="muted">A point says which share of all requests took at most so long. Requests that '
        "failed are infinitely slow: a curve that ends below 100 % ends where they begin.</p>"
    )
    yield '<div class="pair">'
    yield figures.add(titles[Horizon.TTFT], "", latency_ecdf(reports))
    completion = DistributionOptions(Metric.COMPLETION)
    yield figures.add(titles[Horizon.COMPLETION], "", latency_ecdf(reports, completion))
    yield "</div>"
    yield "<h2>Over time</h2>"
    yield figures.add("Load, and the median TTFT of what arrived", "", load_over_time(reports))


def _section(section: ClassSection, report: ClassReport, figures: _Figures, state: str) -> Iterator[str]:
    summary = f"{_plain(section.name)} <small>{_plain(section.counts)}</small>"
    yield f"<details {state}><summary>{summary}</summary>"
    yield _remarks(section.remarks)
    if report.stages:
        yield '<div class="pair">'
        tail = report.composition(Horizon.TTFT, Region.TAIL)
        reason = tail.dominant_wait.reason or ""
        seen = f"Only seen in these requests; {reason}" if reason.startswith("not estimable") else ""
        yield figures.add(
            "TTFT: typical requests against the slowest 5 %", seen, typical_against_tail(report)
        )
        yield figures.add("Stages over time", "", stages_over_time(report))
        yield "</div>"
    yield '<div class="tables">'
    for table in section.tables:
        yield from _table(table)
    yield "</div></details>"


def _table(table: Table) -> Iterator[str]:
    heads = "".join(f"<th{_worded(table, name)}>{_plain(name)}</th>" for name in table.columns)
    title = f"{table.title} (hatched: wait)" if table.has_waits else table.title
    yield f'<div class="table"><table><thead><tr><th>{_plain(title)}</th>{heads}</tr></thead><tbody>'
    for row in table.rows:
        cells = "".join(
            f"<td{_worded(table, name)}>{_plain(cell)}</td>"
            for name, cell in zip(table.columns, row.cells, strict=True)
        )
        yield f"<tr{' class=wait' if row.wait else ''}><td>{_swatch(row)}{_plain(row.name)}</td>{cells}</tr>"
    yield f"</tbody></table>{_remarks(table.remarks)}</div>"


def _swatch(row: Row) -> str:
    """Return the colour of a row that is about a stage."""
    if row.name not in STAGE_COLOURS and not row.wait:
        return ""
    return f'<span class="swatch" style="background-color:{stage_colour(row.name)}"></span>'


def _worded(table: Table, name: str) -> str:
    return ' class="worded"' if name in table.worded else ""


def _remarks(remarks: Sequence[str]) -> str:
    if not remarks:
        return ""
    return '<ul class="remarks">' + "".join(f"<li>{_plain(remark)}</li>" for remark in remarks) + "</ul>"


def _plain(text: str) -> str:
    return escape(printable(text))
