"""Open datasets and what was already asked of them: one state of the data."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import duckdb

from stagetrace.errors import DataError
from stagetrace_analyzer.analysis import analyze
from stagetrace_analyzer.dataset import open_dataset
from stagetrace_analyzer.queries.quality import Ingested, ingested
from stagetrace_analyzer.queries.requests import (
    Choice,
    RequestFilter,
    Span,
    choices,
    list_requests,
    request_order,
    span,
)
from stagetrace_analyzer.queries.steps import Engine, engines
from stagetrace_analyzer.selection import Selection
from stagetrace_dashboard.cache import Cache

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from stagetrace_analyzer.classes import ClassRules
    from stagetrace_analyzer.results import Analysis
    from stagetrace_dashboard.limits import Limits
    from stagetrace_dashboard.view import View

Answer = TypeVar("Answer")

_ONE: Final = "only"


class Data:
    """The datasets as they were when they were opened.

    Attributes:
        number: Which state it is: 1, and one more each time the data were opened again.
        folders: The datasets.
        read_unix_ns: When they were opened.
        span: The time that their requests cover.
        ingested: What was read into them, and what was set aside.
        limits: What a question may cost.
    """

    def __init__(
        self, number: int, folders: Sequence[Path], read_unix_ns: int, rules: ClassRules, limits: Limits
    ) -> None:
        self.number = number
        self.folders = tuple(folders)
        self.read_unix_ns = read_unix_ns
        self.limits = limits
        self.rules = rules
        self._connection = open_dataset(folders)
        self._analyses: Cache[tuple[ClassRules, Selection, bool], Analysis] = Cache(limits.analyses)
        self._analysing = threading.Lock()
        self._orders: Cache[tuple[RequestFilter, str, bool], NDArray[np.int64]] = Cache(limits.orders)
        self._found: Cache[Hashable, Any] = Cache(limits.answers)
        self._lists: Cache[str, None] = Cache(1)
        self._choices: Cache[str, list[Choice]] = Cache(1)
        self._engines: Cache[str, list[Engine]] = Cache(1)
        self.span: Span = self.ask(span)
        self.ingested: list[Ingested] = self.ask(ingested)

    def ask(self, question: Callable[[duckdb.DuckDBPyConnection], Answer]) -> Answer:
        """Ask the datasets something, within `Limits.query_s`.

        Raises:
            DataError: It took too long, or the files are no longer what they were.
        """

        def ask_in_time(cursor: duckdb.DuckDBPyConnection) -> Answer:
            stop = threading.Timer(self.limits.query_s, cursor.interrupt)
            stop.daemon = True
            stop.start()
            try:
                return question(cursor)
            finally:
                stop.cancel()

        return self._ask(ask_in_time)

    def _ask(self, question: Callable[[duckdb.DuckDBPyConnection], Answer]) -> Answer:
        cursor = self._connection.cursor()
        try:
            return question(cursor)
        except duckdb.InterruptException as error:
            raise DataError(
                f"this question took longer than {self.limits.query_s:g} s",
                hint="choose less time or one class",
            ) from error
        except duckdb.Error as error:
            raise DataError(
                "the data cannot be read any more", hint="they have changed; open the dashboard again"
            ) from error
        finally:
            cursor.close()

    def ask_lists(self, question: Callable[[duckdb.DuckDBPyConnection], Answer]) -> Answer:
        """Ask something that needs the list of requests, which is made first."""
        self._lists.get(_ONE, lambda: self._ask(lambda cursor: list_requests(cursor, self.rules)))
        return self.ask(question)

    def analysis(self, selection: Selection, *, by_phase: bool, rules: ClassRules | None = None) -> Analysis:
        """Return what ``stagetrace analyze`` finds in the selected requests, by these or the usual rules."""
        key = (rules or self.rules, selection, by_phase)
        return self._analyses.get(key, lambda: self._analyse(*key))

    def by_phase(self, view: View) -> bool:
        """Whether a view keeps phases apart."""
        return self.has_phases if view.by_phase is None else view.by_phase

    def analysis_of(self, view: View) -> Analysis:
        """Return the analysis that a view is of, of all its classes and phases."""
        return self.analysis(view.selection(with_phase=not self.by_phase(view)), by_phase=self.by_phase(view))

    def _analyse(self, rules: ClassRules, selection: Selection, by_phase: bool) -> Analysis:
        # One at a time: each may take as much memory as a connection may.
        with self._analysing:
            return analyze(self.folders, rules, by_phase=by_phase, selection=selection)

    def remember(self, key: Hashable, find: Callable[[], Answer]) -> Answer:
        """Return what was found before under a key, or find it."""
        found: Answer = self._found.get(key, find)
        return found

    def order(self, wanted: RequestFilter, sort: str, *, descending: bool) -> NDArray[np.int64]:
        """Return the numbers of the listed requests that meet the conditions, in order."""
        return self._orders.get(
            (wanted, sort, descending),
            lambda: self.ask_lists(
                lambda connection: request_order(connection, wanted, sort=sort, descending=descending)
            ),
        )

    def choices(self) -> list[Choice]:
        """Return what one can filter requests by."""
        return self._choices.get(_ONE, lambda: self.ask_lists(choices))

    def engines(self) -> list[Engine]:
        """Return the engines whose steps were recorded."""
        return self._engines.get(_ONE, lambda: self.ask(engines))

    @property
    def has_phases(self) -> bool:
        """Whether it is an experiment of several phases, which are kept apart unless told otherwise."""
        return self.span.phases > 1

    def has_same_requests(self, other: Data) -> bool:
        """Whether nothing has come since another state."""
        return (self.span, self.ingested) == (other.span, other.ingested)

    def warm(self) -> None:
        """Make what the first page needs."""
        self.analysis(Selection(), by_phase=self.has_phases)
        self.choices()

    def close(self) -> None:
        """Close the datasets."""
        self._connection.close()
