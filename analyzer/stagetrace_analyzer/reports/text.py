"""An analysis as text for a terminal: first the answer in words, then tables, then data quality.

The text fits into 80 columns and has no colour codes unless it goes to a terminal.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from rich.console import Console, Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from stagetrace.stages import Horizon, Kind, Outcome, Reason
from stagetrace_analyzer.analysis import stage_order

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from typing import TextIO

    from rich.console import RenderableType

    from stagetrace_analyzer.analysis import (
        Analysis,
        Check,
        ClassReport,
        DominantWait,
        Ingest,
        Quantile,
        Quantiles,
        StageTime,
    )

FILE_WIDTH: Final = 80
"""Columns of a text that does not go to a terminal."""

UNATTRIBUTED_GOAL: Final = 0.02
"""A larger unattributed share of a horizon is called out."""

_NS_PER_MS: Final = 1_000_000
_SMALLEST: Final = 0.05
_STOPS_TOLD: Final = 4
_LABEL_WIDTH: Final = 32
_NO_VALUE: Final = "-"

_TITLES: Final = {Horizon.TTFT: "TTFT", Horizon.COMPLETION: "completion"}

_BECAUSE: Final = {
    Reason.STEP.value: "a step was running",
    Reason.SEATS.value: "all seats were taken",
    Reason.TOKENS.value: "the token budget of the step was used up",
    Reason.ENCODER_BUDGET.value: "the encoder budget of the step was used up",
    Reason.ENCODER_CACHE.value: "the encoder cache had no room",
    Reason.UNKNOWN.value: "of a reason nobody recorded",
}


def write_text(analysis: Analysis, file: TextIO) -> None:
    """Write the report to ``file``, in colour and in the terminal's width if it is a terminal."""
    terminal = file.isatty()
    console = Console(
        file=file,
        width=None if terminal else FILE_WIDTH,
        color_system="auto" if terminal else None,
        markup=False,
        emoji=False,
        highlight=False,
    )
    with console.capture() as capture:
        console.print(Group(*_report(analysis)))
    # Tables are padded to the full width.
    file.writelines(f"{line.rstrip()}\n" for line in capture.get().splitlines())


def answer(report: ClassReport) -> str:
    """Say in words where the requests of a class wait."""
    first, *others = report.dominant_waits
    if first.stage is None:
        sentences = [f"{_capitalized(first.reason or '')}."]
    else:
        sentences = [f"Requests mostly wait in {_wait_in_words(first)}."]
    sentences += [
        f"Until completion they mostly wait in {_wait_in_words(wait)}."
        for wait in others
        if wait.stage not in {None, first.stage}
    ]
    return " ".join(sentences)


def _wait_in_words(wait: DominantWait) -> str:
    words = f"{_clean(wait.stage or '')} ({wait.share or 0:.0%} of {_TITLES[wait.horizon]})"
    if wait.reasons:
        reason, share = next(iter(wait.reasons.items()))
        words += f", because {_BECAUSE.get(reason, _clean(reason))} ({share:.0%})"
    return words.replace("%", " %")


def _report(analysis: Analysis) -> Iterator[RenderableType]:
    yield Text(_headline(analysis), style="bold")
    yield Text()
    yield _answers(analysis.classes)
    for report in analysis.classes:
        yield Text()
        yield from _class(report)
    yield Text()
    yield Text("Data quality", style="bold")
    yield Padding(_quality(analysis), (0, 0, 0, 2))


def _headline(analysis: Analysis) -> str:
    parts = [f"{analysis.requests:,} requests"]
    if analysis.warm_up:
        parts.append(f"{analysis.warm_up:,} of warm-up left out")
    if analysis.unclassified:
        parts.append(f"{analysis.unclassified:,} match no class rule")
    return ", ".join(parts)


def _answers(reports: Sequence[ClassReport]) -> Table:
    table = _columns()
    for report in reports:
        table.add_row(Text(_title(report), style="bold"), Text(answer(report)))
    return table


def _class(report: ClassReport) -> Iterator[RenderableType]:
    outcomes = ", ".join(f"{count:,} {_clean(name)}" for name, count in report.outcomes.items())
    yield Text(f"{_title(report)}: {report.requests:,} requests ({outcomes})", style="bold")
    latencies = {"TTFT": report.ttft, "completion": report.completion, "waiting within TTFT": report.waiting}
    yield _latencies(latencies)
    for line in _missing(latencies):
        yield Text(f"  {line}", style="dim")
    if report.stages:
        yield _stages(report.stages)


def _latencies(latencies: Mapping[str, Quantiles]) -> Table:
    table = _figures("all requests", ("p50 ms", "p95 ms", "p99 ms"))
    for title, quantiles in latencies.items():
        table.add_row(f"  {title}", _ms(quantiles.p50), _ms(quantiles.p95), _ms(quantiles.p99))
    return table


def _missing(latencies: Mapping[str, Quantiles]) -> Iterator[str]:
    """Say why quantiles have no value, one line for each quantile and reason."""
    titles: dict[tuple[str, str], list[str]] = {}
    for title, quantiles in latencies.items():
        for name, quantile in (("p50", quantiles.p50), ("p95", quantiles.p95), ("p99", quantiles.p99)):
            if quantile.reason is not None:
                titles.setdefault((name, quantile.reason), []).append(title)
    for (name, reason), named in titles.items():
        of = "" if len(named) == len(latencies) else f" of {', '.join(named)}"
        yield f"{name}{of}: {reason}"


def _stages(stages: Sequence[StageTime]) -> Table:
    columns = ("TTFT %", "p50 ms", "p95 ms", "compl. %", "p50 ms", "p95 ms")
    table = _figures(f"{Outcome.OK} requests (*: wait)", columns)
    by_place = {(time.stage, time.horizon): time for time in stages}
    kinds = {time.stage: time.kind for time in stages}
    for stage in sorted(kinds, key=stage_order):
        cells = [cell for horizon in Horizon for cell in _cells(by_place.get((stage, horizon)))]
        mark, style = ("* ", "yellow") if kinds[stage] is Kind.WAIT else ("  ", "")
        table.add_row(mark + _clean(stage), *cells, style=style)
    return table


def _figures(title: str, columns: Sequence[str]) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column(title, min_width=22)
    for name in columns:
        table.add_column(name, justify="right", min_width=8, no_wrap=True)
    return table


def _cells(time: StageTime | None) -> tuple[str, str, str]:
    return ("", "", "") if time is None else (_percent(time.share), _ms(time.p50), _ms(time.p95))


def _quality(analysis: Analysis) -> Table:
    table = _columns()
    ingest = analysis.ingest
    table.add_row("unattributed", _unattributed(analysis.classes))
    if mismatches := sum(analysis.partition_mismatches.values()):
        table.add_row("mismatches", f"{mismatches:,} horizons whose stages do not add up; left out of shares")
    table.add_row("joined", _counts(analysis.joins))
    table.add_row("records", f"{ingest.records:,} read, {ingest.dropped:,} dropped, {ingest.faults:,} faults")
    table.add_row("set aside", _counts(ingest.set_aside))
    for label, text in _switches(ingest):
        table.add_row(label, text)
    table.add_row("reconciled", _reconciled(ingest.checks))
    if ingest.hooks_off:
        table.add_row("hooks off", _counts(ingest.hooks_off))
    return table


def _switches(ingest: Ingest) -> Iterator[tuple[str, str]]:
    """Say what was not recorded on purpose, or is no longer there, and what recording has cost."""
    if ingest.not_sampled:
        yield "not sampled", f"{ingest.not_sampled:,} requests"
    if ingest.removed["segments"]:
        size = ingest.removed["bytes"] / 1e6
        yield "removed", f"{ingest.removed['segments']:,} old segments ({size:,.1f} MB) to make room"
    if ingest.stopped:
        told = "; ".join(_clean(text) for text in ingest.stopped[:_STOPS_TOLD])
        more = len(ingest.stopped) - _STOPS_TOLD
        yield "stopped", told + (f"; and {more:,} more" if more > 0 else "")
    for cost in ingest.own_cost:
        share = _percent(cost.share)
        process = " ".join(_clean(cost.process).split(" ")[:2])
        yield "own cost", f"{cost.ns_per_step / 1000:.1f} us a step, {share} % of {process}'s time with steps"


def _unattributed(reports: Sequence[ClassReport]) -> str:
    """Say the largest share of each horizon, and whose it is if it is too large."""
    parts = []
    for horizon in Horizon:
        shares = [(share, _title(r)) for r in reports if (share := r.unattributed[horizon]) is not None]
        if shares:
            share, title = max(shares)
            whose = (
                f" ({title}; should be under {100 * UNATTRIBUTED_GOAL:.0f} %)"
                if share > UNATTRIBUTED_GOAL
                else ""
            )
            parts.append(f"{_percent(share)} % of {_TITLES[horizon]}{whose}")
    return "at most " + ", ".join(parts) if parts else "unknown: no request ended well"


def _columns() -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True, overflow="crop", max_width=_LABEL_WIDTH)
    table.add_column()
    return table


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count:,} {_clean(name)}" for name, count in counts.items()) or "nothing"


def _reconciled(checks: Sequence[Check]) -> str:
    """Say whether all counts agree, or which do not and by how much."""
    wrong = [check for check in checks if not check.holds]
    if not checks:
        return "nothing to compare"
    if not wrong:
        return f"all {len(checks)} counts that must agree do"
    told = (f"{_clean(check.name)}: {check.expected:,.0f} against {check.found:,.0f}" for check in wrong)
    return "NOT: " + "; ".join(told)


def _title(report: ClassReport) -> str:
    phase = "" if report.phase is None else f"[{report.phase}] "
    return _clean(phase + report.traffic_class)


def _ms(quantile: Quantile) -> str:
    return _NO_VALUE if quantile.value_ns is None else _rounded(quantile.value_ns / _NS_PER_MS)


def _percent(share: float | None) -> str:
    return _NO_VALUE if share is None else _rounded(100 * share)


def _rounded(value: float) -> str:
    """One decimal; a small value stays apart from none."""
    return f"<{2 * _SMALLEST:.1f}" if 0 < value < _SMALLEST else f"{value:,.1f}"


def _capitalized(text: str) -> str:
    return text[:1].upper() + text[1:]


def _clean(text: str) -> str:
    """Keep a name from the data from steering the terminal."""
    return "".join(character if character.isprintable() else "?" for character in text)
