"""A dataset of any size from a recorded one: a smoothed bootstrap of busy periods.

A busy period is a stretch of time with at least one request in the server.
Requests within one share steps and wait for each other, those of different ones
do not, so busy periods are what can be drawn independently (regenerative
simulation; Crane and Lemoine 1977).  Each drawn one is stretched by a factor of
its own (smoothing): points in time are stretched and rounded, and durations are
their differences, so that everything adds up to the nanosecond and requests,
stages, media items and steps still agree.

Nothing new can come out of it: no queue is longer than a recorded one, however
high the rate, because the rate only says how many servers work side by side.
"""

from __future__ import annotations

import importlib.resources
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, cast

import numpy as np
import pyarrow as pa

from stagetrace.errors import DataError, UsageError
from stagetrace_analyzer.dataset import MEDIA, OCCUPANCY, REQUESTS, STAGES, STEPS, open_dataset, write_tables
from stagetrace_analyzer.simulation.columns import chosen, known, numbered, rows_of
from stagetrace_analyzer.simulation.datasets import BEGIN_UNIX_NS, ingest_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    import duckdb
    from numpy.typing import NDArray

    from stagetrace_analyzer.simulation.columns import Column

REQUESTS_DEFAULT: Final = 700_000
"""About 9 million stage rows, made from the recorded demo."""

DAY_S: Final = 86_400

STRETCH_SIGMA: Final = 0.1
"""Standard deviation of the logarithm of the factor, whose mean is 1."""

BUSY: Final = 0.7
"""Largest share of the time that a server is busy; it sets how many servers there are."""

_BATCH_PERIODS: Final = 8192

_QUERIES: Final = {
    "requests": """
        SELECT requests.*, period, place, receipt_ns
        FROM requests JOIN owners USING (request)
        ORDER BY period, place""",
    "media": """
        SELECT media.*, period, place, receipt_ns
        FROM media JOIN owners USING (request)
        ORDER BY period, place, item""",
    "stages": """
        SELECT
            stages.* REPLACE (first_step - step_base AS first_step, last_step - step_base AS last_step),
            period, place, receipt_ns
        FROM stages JOIN owners USING (request) JOIN periods USING (period)
        ORDER BY period, place, horizon = 'completion', begin_ns""",
    "steps": """
        SELECT
            steps.* REPLACE (
                step - step_base AS step,
                scheduled_unix_ns - open_unix_ns AS scheduled_unix_ns,
                begin_unix_ns - open_unix_ns AS begin_unix_ns,
                end_unix_ns - open_unix_ns AS end_unix_ns,
                encoder_begin_unix_ns - open_unix_ns AS encoder_begin_unix_ns,
                encoder_end_unix_ns - open_unix_ns AS encoder_end_unix_ns
            ),
            period
        FROM steps ASOF JOIN periods ON scheduled_unix_ns >= open_unix_ns
        WHERE scheduled_unix_ns <= open_unix_ns + length_ns
        ORDER BY period, engine, step""",
    "occupancy": """
        SELECT
            occupancy.* REPLACE (first_step - step_base AS first_step, last_step - step_base AS last_step),
            period, place
        FROM occupancy JOIN owners USING (request) JOIN periods USING (period)
        ORDER BY period, place, first_step""",
}
"""Rows of a recorded table by busy period; steps are numbered from 0 in each."""


def write_scaled(
    recorded: Path,
    folder: Path,
    *,
    requests: int = REQUESTS_DEFAULT,
    per_s: float | None = None,
    seed: int = 0,
    force: bool = False,
) -> None:
    """Write a dataset of drawn busy periods, in batches.

    Phases, and ids that name recorded requests, are dropped; ``loop_lag``, ``clocks``
    and ``checks`` are left empty.

    Args:
        recorded: Folder of the dataset to draw from.
        folder: Folder of the new one.
        requests: Number of requests; a few more, because the last busy period is not cut.
        per_s: Mean number of requests a second, or None to spread them over a day.
        seed: Where chance begins.
        force: Overwrite an existing dataset.

    Raises:
        DataError: The recorded dataset cannot be read or has no request, or the folder cannot be written.
        UsageError: A number is not positive, or the dataset exists and ``force`` is not set.
    """
    per_s = requests / DAY_S if per_s is None else per_s
    if requests < 1 or not 0 < per_s < math.inf:
        raise UsageError(
            "the number and the rate of requests must be positive", hint="such as 1000 at 5.0 a second"
        )
    recording = _read(recorded)
    drawn = _draw(recording, requests, per_s, np.random.default_rng(seed))
    recorded_requests = recording.tables["requests"].rows.num_rows
    about = (
        f"Simulated: {drawn.requests} requests, drawn in busy periods from {recorded_requests} recorded ones."
    )
    tables = {name: _batches(recording.tables[name], drawn, make) for name, make in _MAKERS.items()}
    tables["ingest"] = iter([ingest_rows([about, *recording.about], drawn.requests)])
    write_tables(folder, tables, force=force)


@dataclass(frozen=True, slots=True)
class _Table:
    """Rows of a recorded table, sorted by busy period; ``first`` and ``count`` say which rows are of each."""

    rows: pa.RecordBatch
    first: NDArray[np.int64]
    count: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _Recording:
    """A recorded dataset, cut into busy periods; the arrays are by period."""

    tables: dict[str, _Table]
    length_ns: NDArray[np.int64]
    step_count: NDArray[np.int64]
    about: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Drawn:
    """Busy periods that were drawn; the arrays are by draw."""

    period: NDArray[np.int64]
    factor: NDArray[np.float64]
    server: NDArray[np.int64]
    begin_unix_ns: NDArray[np.int64]
    first_request: NDArray[np.int64]
    first_step: NDArray[np.int64]
    servers: int
    requests: int


def _read(folder: Path) -> _Recording:
    sql = (importlib.resources.files(__package__) / "busy_periods.sql").read_text(encoding="utf-8")
    with open_dataset([folder]) as connection:
        connection.execute(sql)
        length_ns, step_count = (
            connection.execute("SELECT length_ns, step_count FROM periods ORDER BY period")
            .fetchnumpy()
            .values()
        )
        if not len(length_ns):
            raise DataError(f"{folder} has no requests", hint="name a dataset with requests")
        tables = {name: _table(connection, query, len(length_ns)) for name, query in _QUERIES.items()}
        remarks = connection.execute("SELECT reason FROM ingest WHERE name = 'about'").fetchall()
    return _Recording(tables, length_ns, step_count, tuple(remark for (remark,) in remarks))


def _table(connection: duckdb.DuckDBPyConnection, query: str, periods: int) -> _Table:
    found = connection.sql(query).to_arrow_table()
    rows = pa.RecordBatch.from_pydict({name: _one(found[name]) for name in found.column_names})
    count = np.bincount(rows["period"].to_numpy(), minlength=periods)
    return _Table(rows, np.cumsum(count) - count, count)


def _one(column: pa.ChunkedArray[Any]) -> pa.Array[Any]:
    """A column in one piece, texts by their number."""
    array = pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)
    return array.dictionary_encode() if pa.types.is_string(array.type) else array


def _draw(recording: _Recording, requests: int, per_s: float, generator: np.random.Generator) -> _Drawn:
    """Draw periods until they hold enough requests, and deal them out to servers in turn.

    The time between two periods of a server is exponential, so long that the rate is ``per_s``.
    """
    in_period = recording.tables["requests"].count
    period = generator.integers(len(in_period), size=requests)
    period = period[: np.searchsorted(np.cumsum(in_period[period]), requests) + 1]
    factor = generator.lognormal(-(STRETCH_SIGMA**2) / 2, STRETCH_SIGMA, len(period))

    period_s = in_period.mean() / per_s
    servers = math.ceil(recording.length_ns.mean() / 1e9 / period_s / BUSY)
    mean_gap_ns = servers * period_s * 1e9 - recording.length_ns.mean()
    gap_ns = generator.exponential(mean_gap_ns, len(period))
    length_ns = np.rint(factor * recording.length_ns[period] + gap_ns).astype(np.int64)
    first_request = np.cumsum(in_period[period]) - in_period[period]
    return _Drawn(
        period=period,
        factor=factor,
        server=np.arange(len(period)) % servers,
        begin_unix_ns=BEGIN_UNIX_NS + _before(length_ns, servers) + gap_ns.astype(np.int64),
        first_request=first_request,
        first_step=1 + _before(recording.step_count[period], servers),
        servers=servers,
        requests=int(in_period[period].sum()),
    )


def _before(values: NDArray[np.int64], servers: int) -> NDArray[np.int64]:
    """Return the sum of the values of the same server before each."""
    padded = np.zeros(-(-len(values) // servers) * servers, np.int64)
    padded[: len(values)] = values
    by_server = padded.reshape(-1, servers)
    return (np.cumsum(by_server, axis=0) - by_server).ravel()[: len(values)]


class _Batch:
    """Rows taken from a recorded table for some of the draws; all arrays are by row."""

    def __init__(self, table: _Table, drawn: _Drawn, draws: slice) -> None:
        count = table.count[drawn.period[draws]]
        draw = np.repeat(np.arange(len(drawn.period))[draws], count)
        within = np.arange(len(draw)) - np.repeat(np.cumsum(count) - count, count)
        self.rows = table.rows.take(pa.array(table.first[drawn.period[draw]] + within, pa.int64()))
        self._drawn, self._draw = drawn, draw
        self._factor = drawn.factor[draw]

    def numbers(self, name: str) -> NDArray[np.int64]:
        """A column of integers; 0 where it is unknown."""
        column = self.rows[name]
        return np.asarray(column.fill_null(0) if column.null_count else column)

    def where_known(self, name: str, values: NDArray[np.int64]) -> pa.Array[Any]:
        """New values of a column; unknown where the recorded ones are."""
        return known(values, np.asarray(self.rows[name].is_valid()))

    def stretched(self, name: str) -> NDArray[np.int64]:
        """Points in time, ns from the begin of the period."""
        return self._stretch(self.numbers(name))

    def from_receipt(self, name: str) -> NDArray[np.int64]:
        """Points in time, ns from the receipt of the request."""
        receipt_ns = self.numbers("receipt_ns")
        return self._stretch(receipt_ns + self.numbers(name)) - self._stretch(receipt_ns)

    def between(self, begin: str, duration: str) -> NDArray[np.int64]:
        """Durations from a point in time on that is told from the receipt of the request."""
        begin_ns = self.numbers("receipt_ns") + self.numbers(begin)
        return self._stretch(begin_ns + self.numbers(duration)) - self._stretch(begin_ns)

    def _stretch(self, at_ns: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.rint(self._factor * at_ns).astype(np.int64)

    @property
    def begin_unix_ns(self) -> NDArray[np.int64]:
        """When the period begins."""
        return self._drawn.begin_unix_ns[self._draw]

    @property
    def request(self) -> NDArray[np.int64]:
        """Number of the request."""
        return self._drawn.first_request[self._draw] + self.numbers("place")

    def step(self, name: str) -> NDArray[np.int64]:
        """Number of a step."""
        return self._drawn.first_step[self._draw] + self.numbers(name)

    def of_server(self, name: str) -> pa.Array[Any]:
        """Names of processes, of each server its own."""
        column = cast("pa.DictionaryArray[Any, Any]", self.rows[name])
        servers = range(self._drawn.servers)
        names = [f"{recorded}-{server}" for recorded in column.dictionary.to_pylist() for server in servers]
        place = np.asarray(column.indices).astype(np.int64)
        return chosen(names, place * len(servers) + self._drawn.server[self._draw])

    def made(self, schema: pa.Schema, columns: dict[str, Column]) -> pa.RecordBatch:
        """Rows of a dataset: these columns, and for the others what was recorded."""
        recorded = {name: self.rows[name] for name in schema.names}
        return rows_of(schema, self.rows.num_rows, recorded | columns)


def _batches(
    table: _Table, drawn: _Drawn, make: Callable[[_Batch], pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    for first in range(0, len(drawn.period), _BATCH_PERIODS):
        yield make(_Batch(table, drawn, slice(first, first + _BATCH_PERIODS)))


def _request_rows(batch: _Batch) -> pa.RecordBatch:
    request = batch.request
    received = batch.begin_unix_ns + batch.stretched("receipt_ns")
    early = batch.numbers("received_unix_ns") - batch.numbers("intended_unix_ns")
    since = ("upload_ns", "ttft_ns", "completion_ns", "ended_ns")
    nothing = pa.nulls(len(request), pa.string())
    columns: dict[str, Column] = {
        "request": request,
        "request_id": numbered("scaled-", request),
        "instance": batch.of_server("instance"),
        "received_unix_ns": received,
        "intended_unix_ns": batch.where_known("intended_unix_ns", received - early),
    }
    columns |= {name: batch.where_known(name, batch.from_receipt(name)) for name in since}
    columns |= dict.fromkeys(("external_id", "trace_id", "parent_span_id", "phase"), nothing)
    return batch.made(REQUESTS, columns)


def _media_rows(batch: _Batch) -> pa.RecordBatch:
    columns: dict[str, Column] = {
        name: batch.where_known(name, batch.from_receipt(name)) for name in ("begin_ns", "ready_ns")
    }
    columns["slack_ns"] = batch.where_known("slack_ns", batch.between("ready_ns", "slack_ns"))
    return batch.made(MEDIA, columns | {"request": batch.request})


def _stage_rows(batch: _Batch) -> pa.RecordBatch:
    columns: dict[str, Column] = {
        "request": batch.request,
        "holder": pa.nulls(batch.rows.num_rows, pa.string()),
        "begin_ns": batch.from_receipt("begin_ns"),
        "duration_ns": batch.between("begin_ns", "duration_ns"),
    }
    columns |= {name: batch.where_known(name, batch.step(name)) for name in ("first_step", "last_step")}
    return batch.made(STAGES, columns)


def _step_rows(batch: _Batch) -> pa.RecordBatch:
    columns: dict[str, Column] = {
        name: batch.where_known(name, batch.begin_unix_ns + batch.stretched(name))
        for name in STEPS.names
        if name.endswith("_unix_ns")
    }
    columns |= {
        "engine": batch.of_server("engine"),
        "step": batch.step("step"),
        "holder": pa.nulls(batch.rows.num_rows, pa.string()),
    }
    return batch.made(STEPS, columns)


def _occupancy_rows(batch: _Batch) -> pa.RecordBatch:
    columns: dict[str, Column] = {name: batch.step(name) for name in ("first_step", "last_step")}
    columns |= {"request": batch.request, "engine": batch.of_server("engine")}
    return batch.made(OCCUPANCY, columns)


_MAKERS: Final = {
    "requests": _request_rows,
    "media": _media_rows,
    "stages": _stage_rows,
    "steps": _step_rows,
    "occupancy": _occupancy_rows,
}
