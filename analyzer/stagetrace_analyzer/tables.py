"""What an analysis keeps of the intervals of all requests: tables by class, and figures by request."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import numpy as np

from stagetrace.stages import Horizon, Kind
from stagetrace_analyzer.buckets import Histogram
from stagetrace_analyzer.composition import stage_order
from stagetrace_analyzer.resampling import BlockTable

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from stagetrace_analyzer.population import Piece, Places, Population

WINDOWS: Final = 48
"""Stretches of time into which a phase is cut to show how it went."""


@dataclass(slots=True)
class Tables:
    """What is kept of the intervals of all requests.

    Times are ns.  A group is the number of a class in a phase, as in the population.

    Attributes:
        population: The requests.
        places: What an interval may be: a stage with its reason.
        windows: Edges of the windows of a phase, ns since the epoch, shape (`WINDOWS` + 1,).
        with_media: Phases in which a request had media.
        by_block: Times by block of arrivals and place, of the requests that are sound.
        by_stage: Distribution of the time in each of `stages`.
        by_window: Requests that are sound, then their times by stage, shape (`WINDOWS`, 1 + stages).
        sound: Requests that ended well and whose intervals add up to the horizon.
        mismatches: Requests whose intervals do not.
        intervals: Intervals of all requests.
        waiting_ns: Time waited before the first token by request: plus infinity if it
            failed, NaN if it is not known.
        stages: Names of the stages, in the order of a request's way.
    """

    population: Population
    places: Places
    windows: dict[str | None, NDArray[np.int64]]
    with_media: frozenset[str | None] = frozenset()
    by_block: dict[tuple[int, Horizon], BlockTable] = field(default_factory=dict)
    by_stage: dict[tuple[int, Horizon], Histogram] = field(default_factory=dict)
    by_window: dict[int, NDArray[np.float64]] = field(default_factory=dict)
    sound: Counter[tuple[int, Horizon]] = field(default_factory=Counter)
    mismatches: dict[Horizon, int] = field(default_factory=lambda: dict.fromkeys(Horizon, 0))
    intervals: int = 0
    waiting_ns: NDArray[np.float64] = field(init=False)
    stages: tuple[str, ...] = field(init=False)
    _to_stages: NDArray[np.float64] = field(init=False)

    def __post_init__(self) -> None:
        self.waiting_ns = np.full(len(self.population), np.inf)
        self.stages = tuple(sorted(set(self.places.stages), key=stage_order))
        names = np.array(self.places.stages, dtype=object)
        self._to_stages = np.array([names == stage for stage in self.stages], np.float64).T

    def add(self, piece: Piece) -> None:
        """Take in the times of some requests."""
        self.intervals += piece.intervals
        for horizon, spent_ns in piece.spent_ns.items():
            self._add(horizon, piece.rows, spent_ns)

    def _add(self, horizon: Horizon, span: slice, spent_ns: NDArray[np.float64]) -> None:
        people = self.population
        horizon_ns = people.horizon_ns[horizon][span]
        adds_up = spent_ns.sum(axis=1) == horizon_ns
        self.mismatches[horizon] += int(np.count_nonzero(np.isfinite(horizon_ns) & ~adds_up))
        sound = adds_up & people.good[span]
        if horizon is Horizon.TTFT:
            waited = np.where(adds_up, spent_ns[:, self.places.of_kind(Kind.WAIT)].sum(axis=1), np.nan)
            reached = np.isfinite(people.latency_ns(horizon)[span])
            self.waiting_ns[span] = np.where(reached, waited, np.inf)
        by_stage = spent_ns @ self._to_stages
        group, block = people.group[span], people.block[span]
        for number in np.unique(group[sound]).tolist():
            of = np.flatnonzero(sound & (group == number))
            self.sound[number, horizon] += len(of)
            table = self.by_block.setdefault((number, horizon), BlockTable(len(self.places.stages)))
            table.add(block[of], horizon_ns[of], spent_ns[of])
            self.by_stage.setdefault((number, horizon), Histogram()).add(by_stage[of])
            if horizon is Horizon.COMPLETION:
                self._add_windows(number, people.received_unix_ns[span][of], by_stage[of])

    def _add_windows(
        self, group: int, received_unix_ns: NDArray[np.int64], by_stage: NDArray[np.float64]
    ) -> None:
        edges = self.windows[self.population.keys[group][1]]
        window = np.clip(np.searchsorted(edges, received_unix_ns, side="right") - 1, 0, len(edges) - 2)
        sums = self.by_window.setdefault(group, np.zeros((len(edges) - 1, 1 + len(self.stages))))
        np.add.at(sums, window, np.column_stack([np.ones(len(window)), by_stage]))


def windows_of(population: Population) -> dict[str | None, NDArray[np.int64]]:
    """Edges of the windows of every phase, ns since the epoch."""
    found: dict[str | None, NDArray[np.int64]] = {}
    for phase, members in phases_of(population):
        received = population.received_unix_ns[members]
        first, width = received.min(), -(-(received.max() + 1 - received.min()) // WINDOWS)
        found[phase] = first + width * np.arange(WINDOWS + 1)
    return found


def phases_of(population: Population) -> Iterator[tuple[str | None, NDArray[np.bool_]]]:
    """Every phase, and which requests are in it."""
    for phase in dict.fromkeys(phase for _, phase in population.keys):
        groups = [group for group, key in enumerate(population.keys) if key[1] == phase]
        yield phase, np.isin(population.group, groups)
