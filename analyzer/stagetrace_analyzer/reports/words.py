"""Figures as words: the same numbers and sentences in every report.

Names from the data are in them as they are; whoever renders a sentence cleans it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from stagetrace.stages import Horizon, Outcome, Reason
from stagetrace_analyzer.results import (
    NOT_MATERIAL,
    Answer,
    ClassReport,
    Composition,
    Dominant,
    PlainAnswer,
    Quantile,
    Question,
    Region,
    Share,
)

HORIZONS: Final = {Horizon.TTFT: "TTFT", Horizon.COMPLETION: "completion"}
"""What the horizons are called."""

REGIONS: Final = {Region.ALL: "all", Region.TYPICAL: "typical", Region.TAIL: "tail"}
"""What the regions are called."""

QUESTIONS: Final = {
    Question.DOWNLOAD: "is download slow?",
    Question.ENCODER_QUEUE: "does encoding queue?",
    Question.TRANSFER_WAIT: "does a transfer wait?",
    Question.INPUT: "is input processing jammed?",
    Question.OUTPUT: "does output dominate?",
}
"""The plain questions."""

NO_VALUE: Final = "-"
"""Stands where there is no figure."""

_YES: Final = {
    Question.DOWNLOAD: "Download is slow",
    Question.ENCODER_QUEUE: "Encoding queues",
    Question.TRANSFER_WAIT: "A transfer waits",
    Question.INPUT: "Input processing is jammed",
    Question.OUTPUT: "Output dominates",
}

_BECAUSE: Final = {
    Reason.STEP.value: "a step was running",
    Reason.SEATS.value: "all seats were taken",
    Reason.TOKENS.value: "the token budget of the step was used up",
    Reason.KV.value: "the KV cache had no room",
    Reason.ENCODER_BUDGET.value: "the encoder budget of the step was used up",
    Reason.ENCODER_CACHE.value: "the encoder cache had no room",
    Reason.REMOTE_EMBEDDING.value: "an embedding from another server was not there",
    Reason.REMOTE_KV.value: "KV state from another server was not there",
    Reason.GRAMMAR.value: "the grammar of its guided decoding was being compiled",
    Reason.LORA.value: "the step had as many adapters as the engine allows",
    Reason.PREEMPTING.value: "the step had preempted somebody and took nobody in",
    Reason.PAUSED.value: "the engine was paused",
    Reason.DEFERRED.value: "prefills were put off",
    Reason.UNKNOWN.value: "of a reason nobody recorded",
    "other": "of other reasons",
}

_NS_PER_MS: Final = 1_000_000
_SMALLEST: Final = 0.05
_THREE_FIGURES: Final = 99.95
_TWO_FIGURES: Final = 9.95


def title(report: ClassReport) -> str:
    """Return the name of a class, with its phase and the mark of a class that is decided at the end."""
    phase = "" if report.phase is None else f"[{report.phase}] "
    return phase + report.traffic_class + (" (post)" if report.post else "")


def answer(report: ClassReport) -> str:
    """Say in words where the requests of a class wait, and what else an operator must know of it."""
    return " ".join(_sentences(report))


def _sentences(report: ClassReport) -> Iterator[str]:
    yield from _where_they_wait(report)
    for found in report.answers:
        if found.answer is Answer.YES and found.share is not None:
            yield f"{_YES[found.question]} ({figure(found.share)} of {HORIZONS[found.horizon]})."


def _where_they_wait(report: ClassReport) -> Iterator[str]:
    whole = report.composition(Horizon.TTFT, Region.ALL)
    first = whole.dominant_wait
    if first.stages:
        yield f"Requests mostly wait in {_dominant_in_words(first, Horizon.TTFT)}."
    elif first.reason == NOT_MATERIAL:
        yield f"{capitalized(NOT_MATERIAL)}{_work(whole)}."
    else:
        yield f"Dominant wait {first.reason}."
        yield from _only_seen(whole)
    tail = report.composition(Horizon.TTFT, Region.TAIL).dominant_wait
    if tail.stages and set(tail.stages) != set(first.stages):
        yield f"The slowest 5 % mostly wait in {_dominant_in_words(tail, Horizon.TTFT)}."
    until_end = report.composition(Horizon.COMPLETION, Region.ALL).dominant_wait
    if until_end.stages and set(until_end.stages) != set(first.stages):
        yield f"Until completion they mostly wait in {_dominant_in_words(until_end, Horizon.COMPLETION)}."


def _work(whole: Composition) -> str:
    """Say what takes the time where nobody waits."""
    work = whole.dominant_stage
    if not work.stages or work.share is None:
        return ""
    return f", mostly {listed(work.stages)} ({figure(work.share)} of {HORIZONS[whole.horizon]})"


def _only_seen(whole: Composition) -> Iterator[str]:
    """Say which wait was the longest where none can be named."""
    seen = whole.dominant_wait.seen
    if seen is not None and seen in whole.shares:
        share = f"{100 * whole.shares[seen].value:.0f} % of {HORIZONS[whole.horizon]}"
        yield f"Only seen in these {whole.requests:,.0f}: the longest wait was {seen} ({share})."


def _dominant_in_words(dominant: Dominant, horizon: Horizon) -> str:
    """Say a stage, or several of which one surely is it, with its share and the scheduler's reason."""
    share = "" if dominant.share is None else f"{figure(dominant.share)} of {HORIZONS[horizon]}"
    if len(dominant.stages) > 1:
        return f"{listed(dominant.stages)} (together {share}; it is not sure which more)"
    (stage,) = dominant.stages
    reasons = (dominant.reasons or {}).get(stage)
    if not reasons:
        return f"{stage} ({share})"
    reason, part = next(iter(reasons.items()))
    return f"{stage} ({share}), because {because(reason)} ({100 * part:.0f} %)"


def listed(stages: tuple[str, ...]) -> str:
    """Return names as alternatives."""
    return " or ".join(stages)


def because(reason: str) -> str:
    """Say a reason of the scheduler; one that the model does not know is quoted."""
    return _BECAUSE.get(reason, reason)


def reasons_in_words(reasons: Mapping[str, float]) -> str:
    """Say all reasons of a wait with their parts of it."""
    return ", ".join(f"{because(reason)} {100 * part:.0f} %" for reason, part in reasons.items())


def failed_in_words(report: ClassReport) -> str:
    """Say which part of the requests did not end well, or nothing if all did."""
    failed = report.requests - report.outcomes.get(Outcome.OK.value, 0)
    return f"{percent(failed / report.requests)} % did not end well" if failed else ""


def figure(share: Share) -> str:
    """Return a share as sentences have it: ``60 % [55-66]``, without an interval narrower than a percent."""
    value = f"{100 * share.value:.0f}"
    interval = percent_interval(share)
    return f"{value} %" if interval in {"", f"[{value}-{value}]"} else f"{value} % {interval}"


def percent_with_interval(share: Share) -> str:
    """Return a share as tables have it: ``60.1 [55-66]``, in percent."""
    interval = percent_interval(share)
    return percent(share.value) + (f" {interval}" if interval else "")


def percent_interval(share: Share) -> str:
    """Return the interval of a share in percent, empty without one."""
    if share.low is None or share.high is None:
        return ""
    return f"[{_bound(100 * share.low)}-{_bound(100 * share.high)}]"


def _bound(value: float) -> str:
    return f"{value:.1f}" if 0 < value < _TWO_FIGURES else f"{value:.0f}"


def quantile(found: Quantile) -> str:
    """Return a quantile in ms as tables have it: ``22.0 [20.1, 25.3]``."""
    if found.value_ns is None:
        return NO_VALUE
    if found.low_ns is None and found.high_ns is None and found.reason is None:
        return milliseconds(found.value_ns)
    # A time is bounded by 0 where no request bounds it, and not at all where requests failed.
    low = milliseconds(found.low_ns or 0)
    high = "inf" if found.high_ns is None else milliseconds(found.high_ns)
    return f"{milliseconds(found.value_ns)} [{low}, {high}]"


def milliseconds(time_ns: float) -> str:
    """Return a time in ms."""
    return rounded(time_ns / _NS_PER_MS)


def percent(share: float | None) -> str:
    """Return a share in percent."""
    return NO_VALUE if share is None else rounded(100 * share)


def rounded(value: float) -> str:
    """Return about three figures; a small value stays apart from none."""
    if 0 < value < _SMALLEST:
        return f"<{2 * _SMALLEST:.1f}"
    return f"{value:,.0f}" if value >= _THREE_FIGURES else f"{value:,.1f}"


def counts(found: Mapping[str, int]) -> str:
    """Return counts by name."""
    return ", ".join(f"{count:,} {name}" for name, count in found.items()) or "nothing"


def plain_answer(found: PlainAnswer) -> tuple[str, str, str, str]:
    """Return the cells of a plain question: question, answer, share and mean time."""
    share = NO_VALUE if found.share is None else percent_with_interval(found.share)
    mean = NO_VALUE if found.mean_ns is None else milliseconds(found.mean_ns)
    return QUESTIONS[found.question], found.answer.value, f"{share} of {HORIZONS[found.horizon]}", mean


def capitalized(text: str) -> str:
    """Return the text with its first letter in upper case."""
    return text[:1].upper() + text[1:]


def printable(text: str) -> str:
    """Keep a name from the data from steering a terminal, or from breaking a line."""
    return "".join(character if character.isprintable() else "?" for character in text)
