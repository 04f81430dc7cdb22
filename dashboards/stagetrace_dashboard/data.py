"""Open datasets and what was already asked of them: one state of the data."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
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
from stagetrace_analyzer.statements import rows
from stagetrace_dashboard.cache import Cache
from stagetrace_dashboard.scope import Scope

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from stagetrace_analyzer.classes import ClassRules
    from stagetrace_analyzer.results import Analysis
    from stagetrace_dashboard.limits import Limits
    from stagetrace_dashboard.view import View

Answer = TypeVar("Answer")

_ONE: Final = "only"
_WHOLE: Final = Scope()
_PAGES: Final = 32
"""Pages that are kept as they were sent, each of up to a megabyte."""


class Data:
    """The datasets as they were when they were opened.

    Attributes:
        number: Which state it is: 1, and one more each time the data were opened again.
        folders: The datasets.
        read_unix_ns: When they were opened.
        span: The time that their requests cover.
        ingested: What was read into them, and what was set aside.
        limits: What a question may cost.
        scope: Which requests all answers are about.
        ahead: What is made before anybody asks, when the first page's needs are made.
    """

    def __init__(
        self,
        number: int,
        folders: Sequence[Path],
        read_unix_ns: int,
        rules: ClassRules,
        limits: Limits,
        *,
        scope: Scope = _WHOLE,
    ) -> None:
        self.number = number
        self.folders = tuple(folders)
        self.read_unix_ns = read_unix_ns
        self.limits = limits
        self.rules = rules
        self.scope = scope
        self.ahead: Sequence[Callable[[], object]] = ()
        self._connection = open_dataset(folders)
        self._analyses: Cache[tuple[ClassRules, Selection, bool], Analysis] = Cache(limits.analyses)
        self._analysing = threading.Lock()
        self._orders: Cache[tuple[RequestFilter, str, bool], NDArray[np.int64]] = Cache(limits.orders)
        self._found: Cache[Hashable, Any] = Cache(limits.answers)
        self._pages: Cache[Hashable, Any] = Cache(_PAGES)
        self._lists: Cache[str, None] = Cache(1)
        self._choices: Cache[str, list[Choice]] = Cache(1)
        self._engines: Cache[str, list[Engine]] = Cache(1)
        self.span: Span = self.ask(span)
        self.ingested: list[Ingested] = self.ask(ingested)
        self._newest_unix_ns: int | None = self.ask(lambda cursor: rows(cursor, "span"))[0].newest_unix_ns

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
        self._lists.get(
            _ONE,
            lambda: self._ask(
                lambda cursor: list_requests(cursor, self.rules, self.scope.selection, self._newest_unix_ns)
            ),
        )
        return self.ask(question)

    def analysis(
        self,
        selection: Selection,
        *,
        by_phase: bool,
        rules: ClassRules | None = None,
        classes: tuple[str, ...] = (),
    ) -> Analysis:
        """Return what ``stagetrace analyze`` finds in the selected requests of the scope.

        Args:
            selection: What a view has chosen of them.
            by_phase: Whether to keep phases apart.
            rules: Other rules than the usual ones.
            classes: Names that the scope's classes have by those.
        """
        narrowed = self.scope.narrowed(selection, self._newest_unix_ns)
        if rules is not None:
            narrowed = replace(narrowed, classes=classes)
        key = (rules or self.rules, narrowed, by_phase)
        return self._analyses.get(key, lambda: self._analyse(*key))

    def by_phase(self, view: View) -> bool:
        """Whether a view keeps phases apart."""
        return self._are_apart if view.by_phase is None else view.by_phase

    @property
    def _are_apart(self) -> bool:
        return self.scope.by_phase or self.has_phases

    @property
    def is_empty(self) -> bool:
        """Whether there is a selection, and it has no request."""
        whole = self.analysis(Selection(), by_phase=self._are_apart)
        return self.scope.selection != Selection() and not whole.requests

    def times(self, view: View) -> tuple[int | None, int | None]:
        """Return begin and end of the time that a view is limited to, in ns since the epoch."""
        narrowed = self.scope.narrowed(view.selection(with_phase=False), self._newest_unix_ns)
        begin, end = (
            moment and moment.unix_ns(self._newest_unix_ns or 0)
            for moment in (narrowed.since, narrowed.until)
        )
        return begin, end

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

    def page(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """Return a page, or a part of one, as it was made before under a key, or make it."""
        return self._pages.get(key, make)

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

    @property
    def generation(self) -> str:
        """What no other state of data has, also of a dashboard that was started anew at the same address."""
        return str(self.read_unix_ns)

    def has_same_requests(self, other: Data) -> bool:
        """Whether nothing has come since another state."""
        return (self.span, self.ingested) == (other.span, other.ingested)

    def warm(self) -> None:
        """Make what the first page needs, and what is to be made ahead."""
        self.analysis(Selection(), by_phase=self._are_apart)
        self.choices()
        for make in self.ahead:
            # A page with a fault says so when somebody opens it.
            with contextlib.suppress(Exception):
                make()

    def close(self) -> None:
        """Close the datasets."""
        self._connection.close()
