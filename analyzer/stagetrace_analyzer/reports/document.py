"""What a report holds, before it is text, Markdown or HTML: answers, tables and remarks.

Nothing is left out here for want of room, and nothing is cleaned: names from the
data are as they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from stagetrace.stages import Horizon, Kind, Outcome
from stagetrace_analyzer.composition import stage_order
from stagetrace_analyzer.load import ACHIEVED
from stagetrace_analyzer.reports import words
from stagetrace_analyzer.results import (
    NOT_MATERIAL,
    Analysis,
    Answer,
    Check,
    ClassReport,
    Composition,
    Dominant,
    Ingest,
    Latency,
    Load,
    MediaFacts,
    Quantile,
    Quantiles,
    Remedy,
    StageTime,
)

UNATTRIBUTED_GOAL: Final = 0.02
"""A larger unattributed share of a horizon is called out."""

_STOPS_TOLD: Final = 4
_TOLD_PAUSE_S: Final = 1.0
_TRENDS: Final = {1: "became longer", -1: "became shorter"}
_LATENCIES: Final = {"TTFT": "ttft", "completion": "completion", "waiting in TTFT": "waiting"}


@dataclass(frozen=True, slots=True)
class Row:
    """A row of a table: what it is about, and its cells; ``wait`` marks a stage in which requests wait."""

    name: str
    cells: tuple[str, ...]
    wait: bool = False


@dataclass(frozen=True, slots=True)
class Table:
    """Figures with remarks under them; ``worded`` columns hold words rather than figures."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    remarks: tuple[str, ...] = ()
    worded: frozenset[str] = frozenset()

    @property
    def has_waits(self) -> bool:
        """Whether some rows are about waits, which a report has to mark."""
        return any(row.wait for row in self.rows)


@dataclass(frozen=True, slots=True)
class ClassSection:
    """Everything about a class: its name with its counts, tables, and remarks."""

    name: str
    counts: str
    tables: tuple[Table, ...]
    remarks: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Advice:
    """A remedy, and the classes that it is for."""

    remedy: Remedy
    classes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Document:
    """A report.

    ``about`` belongs beside every figure.  ``alarms`` are what makes figures
    misleading.  ``answers`` are by class; ``quality`` is by what it is about.
    """

    about: tuple[str, ...]
    headline: str
    selection: str
    alarms: tuple[str, ...]
    answers: tuple[tuple[str, str], ...]
    advice: tuple[Advice, ...]
    classes: tuple[ClassSection, ...]
    load: Table
    quality: tuple[tuple[str, str], ...]


def document_of(analysis: Analysis) -> Document:
    """Put an analysis into words and tables."""
    return Document(
        about=tuple(analysis.ingest.about),
        headline=_headline(analysis),
        selection=_selection(analysis),
        alarms=tuple(_alarms(analysis)),
        answers=tuple((words.title(report), _answer(report)) for report in analysis.classes),
        advice=_advice(analysis.classes),
        classes=tuple(_section(report) for report in analysis.classes),
        load=_load(analysis),
        quality=tuple(_quality(analysis)),
    )


def _headline(analysis: Analysis) -> str:
    parts = [f"{analysis.requests:,} requests"]
    if analysis.warm_up:
        parts.append(f"{analysis.warm_up:,} of warm-up left out")
    if analysis.unclassified:
        parts.append(f"{analysis.unclassified:,} match no class rule")
    return ", ".join(parts)


def _selection(analysis: Analysis) -> str:
    """Say which requests were asked for, or nothing if all were."""
    asked = [f"{option} {value}" for option, values in analysis.selection.items() for value in values]
    if not asked and not analysis.not_selected:
        return ""
    return f"Selected: {', '.join(asked) or 'some'}; {analysis.not_selected:,} other requests are not in here"


def _alarms(analysis: Analysis) -> Iterator[str]:
    for load in analysis.loads:
        if load.overloaded:
            ended = f"only {words.percent(load.achieved)} % of the requests had ended by the last arrival"
            part = "many requests of a phase or dataset had not ended by its last arrival"
            yield (
                f"OVERLOADED{_in_phase(load.phase)}: {ended if load.achieved < ACHIEVED else part}; "
                "the queue kept growing, and latencies grow with the run"
            )
    for warm_up in analysis.warm_ups:
        drifting = f"STILL DRIFTING{_in_phase(warm_up.phase)}"
        if warm_up.trend:
            yield (
                f"{drifting}: TTFT {_TRENDS[warm_up.trend]} from the begin of the phase to its end; figures "
                "go with the length of the run, so run it longer, or at a steady load"
            )
        elif not warm_up.settled:
            yield (
                f"{drifting}: not settled after the {warm_up.requests:,} of {warm_up.of:,} requests that are "
                "left out at most; run it longer"
            )
    doubts = list(_doubts(analysis))
    if doubts:
        yield f"CHECK THE DATA: {'; '.join(doubts)} (see data quality)"


def _in_phase(phase: str | None) -> str:
    return "" if phase is None else f" [{phase}]"


def _doubts(analysis: Analysis) -> Iterator[str]:
    wrong = sum(not check.holds for check in analysis.ingest.checks)
    if wrong:
        yield f"{wrong} of {len(analysis.ingest.checks)} counts that must agree do not"
    if mismatches := sum(analysis.partition_mismatches.values()):
        yield f"the stages of {mismatches:,} horizons do not add up"
    if unusable := sum(analysis.unusable.values()):
        yield f"{unusable:,} rows of the data cannot be used"
    shares = [s for report in analysis.classes for s in report.unattributed.values() if s is not None]
    if max(shares, default=0.0) > UNATTRIBUTED_GOAL:
        yield f"up to {words.percent(max(shares))} % of the time is unattributed"


def _answer(report: ClassReport) -> str:
    """Say how fast and how good a class is, and where it waits."""
    p50, p95 = report.ttft.quantiles.p50, report.ttft.quantiles.p95
    if p50.value_ns is None:
        speed = f"TTFT p50 {p50.reason}."
    else:
        tail = "" if p95.value_ns is None else f", p95 {words.milliseconds(p95.value_ns)}"
        speed = f"TTFT p50 {words.milliseconds(p50.value_ns)}{tail} ms."
    failed = words.failed_in_words(report)
    return " ".join([*([f"{failed}."] if failed else []), speed, words.answer(report)])


def _advice(reports: Sequence[ClassReport]) -> tuple[Advice, ...]:
    """Collect remedies, each once: what comes first for some class comes first."""
    found: dict[Remedy, list[str]] = {}
    ranks: dict[Remedy, int] = {}
    for report in reports:
        for rank, remedy in enumerate(report.remedies):
            found.setdefault(remedy, []).append(words.title(report))
            ranks[remedy] = min(rank, ranks.get(remedy, rank))
    in_order = sorted(found, key=lambda remedy: ranks[remedy])
    return tuple(Advice(remedy, tuple(found[remedy])) for remedy in in_order)


def _section(report: ClassReport) -> ClassSection:
    tables = [_latencies(report), _where(report), _questions(report)]
    if report.stages:
        tables.append(_stages(report))
    return ClassSection(
        name=words.title(report),
        counts=f"{report.requests:,} requests ({words.counts(report.outcomes)})",
        tables=tuple(tables),
        remarks=tuple(_remarks(report)),
    )


def _remarks(report: ClassReport) -> Iterator[str]:
    if report.post:
        yield "post: the class is decided by what was known only at the end: not for comparing or gating"
    yield from report.notes
    if report.media is not None:
        yield f"media: {_media(report.media)}"


def _media(media: MediaFacts) -> str:
    parts = [f"{media.items:,} items"]
    if media.mean_bytes is not None:
        parts.append(f"mean {media.mean_bytes / 1000:,.1f} kB")
    if media.mean_pixels is not None:
        parts.append(f"mean {media.mean_pixels:,.0f} pixels")
    for name, cache in (("processor", media.processor_cache), ("encoder", media.encoder_cache)):
        if cache:
            parts.append(f"{name} cache {words.counts(cache)}")
    return "; ".join(parts)


# --- latencies ---------------------------------------------------------------------------------------


def _latencies(report: ClassReport) -> Table:
    latencies: dict[str, Latency] = {name: getattr(report, field) for name, field in _LATENCIES.items()}
    all_of_them = {name: latency.quantiles for name, latency in latencies.items()}
    survivors = {
        f"{name}, survivors": latency.survivors
        for name, latency in latencies.items()
        if latency.survivors is not None and latency.survivors.requests
    }
    return Table(
        title="all requests",
        columns=("p50 ms", "p95 ms", "p99 ms"),
        rows=tuple(_quantiles_row(name, of) for name, of in (all_of_them | survivors).items()),
        remarks=tuple(_latency_remarks(all_of_them, survivors)),
    )


def _quantiles_row(name: str, found: Quantiles) -> Row:
    return Row(name, tuple(words.quantile(quantile) for _, quantile in _by_name(found)))


def _by_name(found: Quantiles) -> tuple[tuple[str, Quantile], ...]:
    return (("p50", found.p50), ("p95", found.p95), ("p99", found.p99))


def _latency_remarks(
    all_of_them: Mapping[str, Quantiles], survivors: Mapping[str, Quantiles]
) -> Iterator[str]:
    yield from _missing(all_of_them)
    worth = [f"{name} {worth}" for name, found in all_of_them.items() if (worth := _worth(found))]
    if worth:
        yield f"worth independent requests (n_eff) at p50, p95, p99: {'; '.join(worth)}"
    if survivors:
        lost = ", ".join(
            f"{found.requests - found.reached:,} of {found.requests:,} never reached {name}"
            for name, found in all_of_them.items()
            if found.reached < found.requests
        )
        yield f"survivors are the others only, and look faster than the server is: {lost}"


def _missing(latencies: Mapping[str, Quantiles]) -> Iterator[str]:
    """Say why quantiles have no value or no upper bound, one line for each quantile and reason."""
    titles: dict[tuple[str, str], list[str]] = {}
    for title, quantiles in latencies.items():
        for name, quantile in _by_name(quantiles):
            if quantile.reason is not None:
                titles.setdefault((name, quantile.reason), []).append(title)
    for (name, reason), named in titles.items():
        of = "" if len(named) == len(latencies) else f" of {', '.join(named)}"
        yield f"{name}{of}: {reason}"


def _worth(found: Quantiles) -> str:
    """Say how many independent requests the quantiles rest on, or nothing if that is unknown."""
    known = [quantile.n_eff for _, quantile in _by_name(found)]
    if all(n_eff is None for n_eff in known):
        return ""
    return ", ".join(words.NO_VALUE if n_eff is None else f"{n_eff:,.0f}" for n_eff in known)


# --- what time consists of ---------------------------------------------------------------------------


def _where(report: ClassReport) -> Table:
    return Table(
        title=f"{Outcome.OK} requests",
        columns=("n", "mean ms", "mostly wait in", "spend most in"),
        rows=tuple(_where_row(composition) for composition in report.compositions),
        remarks=tuple(_where_remarks(report)),
        worded=frozenset({"mostly wait in", "spend most in"}),
    )


def _where_row(composition: Composition) -> Row:
    mean = words.NO_VALUE if composition.mean_ns is None else words.milliseconds(composition.mean_ns)
    dominant = (composition.dominant_wait, composition.dominant_stage)
    return Row(
        _place(composition), (f"{composition.requests:,.0f}", mean, *(_dominant(found) for found in dominant))
    )


def _place(composition: Composition) -> str:
    return f"{words.HORIZONS[composition.horizon]}, {words.REGIONS[composition.region]}"


def _dominant(found: Dominant) -> str:
    if found.stages:
        share = "" if found.share is None else f" {words.figure(found.share)}"
        together = ", together" if len(found.stages) > 1 else ""
        return words.listed(found.stages) + together + share
    if found.reason == NOT_MATERIAL:
        return "nobody materially"
    return "?" if found.seen is None else f"? seen {found.seen}"


def _where_remarks(report: ClassReport) -> Iterator[str]:
    reasons: dict[str, list[str]] = {}
    for composition in report.compositions:
        reason = composition.dominant_wait.reason
        if reason is not None and reason != NOT_MATERIAL:
            reasons.setdefault(reason, []).append(_place(composition))
    for reason, named in reasons.items():
        yield f"? {_places(named)}: {reason}"
    yield from _why(report)


def _places(named: Sequence[str]) -> str:
    """List horizons with their regions; a region of both horizons once."""
    regions = {text: [f"{h}, {text}" for h in words.HORIZONS.values()] for text in words.REGIONS.values()}
    both = [region for region, places in regions.items() if set(places) <= set(named)]
    return "; ".join([*both, *(place for place in named if place.split(", ")[1] not in both)])


def _why(report: ClassReport) -> Iterator[str]:
    """Say the scheduler's reasons of every dominant wait, once where they are the same."""
    places: dict[tuple[str, str], list[str]] = {}
    for composition in report.compositions:
        for stage, reasons in (composition.dominant_wait.reasons or {}).items():
            key = stage, words.reasons_in_words(reasons)
            places.setdefault(key, []).append(_place(composition))
    for (stage, why), named in places.items():
        yield f"why {stage} ({_places(named)}): {why}"


def _questions(report: ClassReport) -> Table:
    return Table(
        title="plain questions",
        columns=("answer", "share %", "mean ms"),
        rows=tuple(Row(cells[0], cells[1:]) for cells in map(words.plain_answer, report.answers)),
        remarks=tuple(_question_remarks(report)),
        worded=frozenset({"answer"}),
    )


def _question_remarks(report: ClassReport) -> Iterator[str]:
    reasons: dict[str, list[str]] = {}
    for found in report.answers:
        if found.reason is not None:
            reasons.setdefault(found.reason, []).append(words.QUESTIONS[found.question])
    for reason, named in reasons.items():
        which = Answer.CANNOT_TELL.value if len(named) == len(report.answers) else " ".join(named)
        yield f"{which.removesuffix('?')}: {reason}"


def _stages(report: ClassReport) -> Table:
    by_place = {(time.stage, time.horizon): time for time in report.stages}
    kinds = {time.stage: time.kind for time in report.stages}
    return Table(
        title=f"{Outcome.OK} requests",
        columns=("TTFT %", "p50 ms", "p95 ms", "compl. %", "p50 ms", "p95 ms"),
        rows=tuple(
            Row(
                stage,
                tuple(cell for horizon in Horizon for cell in _cells(by_place.get((stage, horizon)))),
                wait=kinds[stage] is Kind.WAIT,
            )
            for stage in sorted(kinds, key=stage_order)
        ),
        remarks=tuple(_partitioned(report)),
    )


def _cells(time: StageTime | None) -> tuple[str, str, str]:
    if time is None:
        return ("", "", "")
    return words.percent_with_interval(time.share), words.quantile(time.p50), words.quantile(time.p95)


def _partitioned(report: ClassReport) -> Iterator[str]:
    ended_well = report.outcomes.get(Outcome.OK.value, 0)
    left_out = {h: ended_well - n for h, n in report.partitioned.items() if n < ended_well}
    if left_out:
        told = ", ".join(f"{n:,} on {words.HORIZONS[h]}" for h, n in left_out.items())
        yield f"left out because their stages do not add up, or the horizon was not reached: {told}"


# --- load and quality --------------------------------------------------------------------------------


def _load(analysis: Analysis) -> Table:
    told = {load.open_loop for load in analysis.loads}
    sends = "intended sends" if told == {True} else "intended sends where all were told, else receipts"
    between = f"gaps are between {sends if True in told else 'receipts'}"
    of_no_phase = "no phase" if analysis.by_phase else "all"
    return Table(
        title="load",
        columns=("requests", "per s", "gaps CV", "in flight", "ended %"),
        rows=tuple(
            Row(
                of_no_phase if load.phase is None else load.phase,
                (
                    f"{load.requests:,}",
                    words.NO_VALUE if load.rate_per_s is None else words.rounded(load.rate_per_s),
                    words.NO_VALUE if load.interarrival_cv is None else f"{load.interarrival_cv:.2f}",
                    words.rounded(load.in_flight),
                    words.percent(load.achieved) + (" OVERLOADED" if load.overloaded else ""),
                ),
            )
            for load in analysis.loads
        ),
        remarks=(
            f"{between}; their coefficient of variation (CV) is 1 for Poisson arrivals, more for bursts",
            "ended: by the time of the last arrival, when the server has kept up with nearly all",
            *_load_remarks(analysis.loads),
        ),
    )


def _load_remarks(loads: Sequence[Load]) -> Iterator[str]:
    pauses_s = sum(load.pauses_s for load in loads)
    if pauses_s >= _TOLD_PAUSE_S:
        yield (
            f"pauses of {words.rounded(pauses_s)} s together, between phases or datasets, are left out: "
            "rates, gaps and requests in flight are of the time between them"
        )
    if set_aside := sum(load.intended_set_aside for load in loads):
        yield (
            f"{set_aside:,} intended sends are set aside: over a day before the receipt, or over a minute "
            "after it"
        )


def _quality(analysis: Analysis) -> Iterator[tuple[str, str]]:
    ingest = analysis.ingest
    yield "unattributed", _unattributed(analysis.classes)
    if mismatches := sum(analysis.partition_mismatches.values()):
        yield "mismatches", f"{mismatches:,} horizons whose stages do not add up; left out of shares"
    for warm_up in analysis.warm_ups:
        phase = "" if warm_up.phase is None else f"[{warm_up.phase}] "
        drifts = "; still drifting" if not warm_up.settled else ""
        yield "warm-up", f"{phase}{warm_up.requests:,} of {warm_up.of:,} left out ({warm_up.rule}){drifts}"
    if analysis.unknown_facts:
        unknown = ", ".join(f"{name} of {n:,} requests" for name, n in analysis.unknown_facts.items())
        yield "unknown facts", f"{unknown}; rules that ask for them do not take these"
    yield "joined", words.counts(analysis.joins)
    yield "records", f"{ingest.records:,} read, {ingest.dropped:,} dropped, {ingest.faults:,} faults"
    yield "set aside", words.counts(ingest.set_aside)
    if analysis.unusable:
        yield "unusable", words.counts(analysis.unusable)
    yield from _switches(ingest)
    yield "reconciled", _reconciled(ingest.checks)
    if ingest.hooks_off:
        yield "hooks off", words.counts(ingest.hooks_off)


def _switches(ingest: Ingest) -> Iterator[tuple[str, str]]:
    """Say what was not recorded on purpose, or is no longer there, and what recording has cost."""
    if ingest.not_sampled:
        yield "not sampled", f"{ingest.not_sampled:,} requests"
    if ingest.removed.get("segments"):
        size = ingest.removed.get("bytes", 0) / 1e6
        yield "removed", f"{ingest.removed['segments']:,} old segments ({size:,.1f} MB) to make room"
    if ingest.stopped:
        more = len(ingest.stopped) - _STOPS_TOLD
        told = "; ".join(ingest.stopped[:_STOPS_TOLD])
        yield "stopped", told + (f"; and {more:,} more" if more > 0 else "")
    for cost in ingest.own_cost:
        share = words.percent(cost.share)
        process = " ".join(cost.process.split(" ")[:2])
        yield "own cost", f"{cost.ns_per_step / 1000:.1f} us a step, {share} % of {process}'s time with steps"


def _unattributed(reports: Iterable[ClassReport]) -> str:
    """Say the largest share of each horizon, and whose it is if it is too large."""
    parts = []
    for horizon in Horizon:
        shares = [(share, words.title(r)) for r in reports if (share := r.unattributed[horizon]) is not None]
        if shares:
            share, title = max(shares)
            goal = 100 * UNATTRIBUTED_GOAL
            whose = f" ({title}; should be under {goal:.0f} %)" if share > UNATTRIBUTED_GOAL else ""
            parts.append(f"{words.percent(share)} % of {words.HORIZONS[horizon]}{whose}")
    return "at most " + ", ".join(parts) if parts else "unknown: no request ended well"


def _reconciled(checks: Sequence[Check]) -> str:
    """Say whether all counts agree, or which do not and by how much."""
    wrong = [check for check in checks if not check.holds]
    if not checks:
        return "nothing to compare"
    if not wrong:
        return f"all {len(checks)} counts that must agree do"
    told = (f"{check.name}: {check.expected:,.0f} against {check.found:,.0f}" for check in wrong)
    return "NOT: " + "; ".join(told)
