"""The requests of an analysis as arrays, and their times in each stage piece by piece.

SQL selects and classifies; what it finds is held in memory, some 50 bytes a
request.  The intervals, of which there are many more, are read in pieces of
`PIECE` requests, so that memory does not grow with them.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np

from stagetrace.errors import DataError
from stagetrace.stages import Horizon, Kind
from stagetrace_analyzer.conditions import shown
from stagetrace_analyzer.intervals import block_numbers
from stagetrace_analyzer.statements import sql

if TYPE_CHECKING:
    from collections.abc import Sequence

    import duckdb
    from numpy.typing import NDArray

PIECE: Final = 50_000
"""Requests whose intervals are in memory at a time, or fewer where there are very many stages."""

Key: TypeAlias = tuple[str, str | None]
"""Traffic class, and phase or None."""

MOST_PLACES: Final = 1000
"""Stages with their reasons; the model has some 130."""

MOST_REASONS: Final = 30
"""Reasons of a stage that are told apart; the model has 14."""

_CELLS: Final = 150 * PIECE
_HORIZONS: Final = 3
_SPARSE: Final = 20


@dataclass(frozen=True, slots=True)
class Places:
    """The columns of time: every stage with every reason that was recorded for it."""

    stages: tuple[str, ...]
    kinds: tuple[Kind, ...]
    reasons: tuple[str | None, ...]

    def of(self, *stages: str) -> list[int]:
        """Return the columns of some stages."""
        return [place for place, stage in enumerate(self.stages) if stage in stages]

    def of_kind(self, kind: Kind) -> list[int]:
        """Return the columns of a kind."""
        return [place for place, found in enumerate(self.kinds) if found is kind]

    @property
    def kind_of(self) -> dict[str, Kind]:
        """The kind of every stage, by stage."""
        return dict(zip(self.stages, self.kinds, strict=True))


@dataclass(frozen=True, slots=True)
class Population:
    """The analysed requests, in the order of dataset and number.

    Attributes:
        keys: Class and phase by group.
        dataset: Number of the dataset.
        request: Number of the request in it.
        group: Index into ``keys``.
        run: Number of its dataset and phase, the same for all that have both in common.
        block: Number of the block within the group, in the order of arrival.
        good: Whether the request ended well.
        received_unix_ns: Time of receipt.
        intended_unix_ns: When the client meant to send, -1 if it did not tell.
        horizon_ns: Both horizons in ns as float64, plus infinity if not reached.
        ended_ns: Time from receipt to the end, plus infinity if it is not known.
    """

    keys: tuple[Key, ...]
    dataset: NDArray[np.int16]
    request: NDArray[np.int64]
    group: NDArray[np.int32]
    run: NDArray[np.int32]
    block: NDArray[np.int64]
    good: NDArray[np.bool_]
    received_unix_ns: NDArray[np.int64]
    intended_unix_ns: NDArray[np.int64]
    horizon_ns: dict[Horizon, NDArray[np.float64]]
    ended_ns: NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.request)

    def latency_ns(self, horizon: Horizon) -> NDArray[np.float64]:
        """Return a horizon by request, plus infinity for every request that did not end well."""
        return np.where(self.good, self.horizon_ns[horizon], np.inf)


@dataclass(frozen=True, slots=True)
class Piece:
    """The times of some requests in every place.

    Attributes:
        rows: Which rows of the population they are.
        intervals: How many intervals are theirs.
        spent_ns: By horizon; shape (requests, places), whole ns as float64.
    """

    rows: slice
    intervals: int
    spent_ns: dict[Horizon, NDArray[np.float64]]


def read_population(connection: duckdb.DuckDBPyConnection, keys: Sequence[Key]) -> Population:
    """Read the requests of the table ``classified``.

    Args:
        connection: An open dataset with that table.
        keys: All its classes and phases, in the order of the groups.
    """
    connection.execute('CREATE TEMP TABLE "groups" (number INTEGER, traffic_class VARCHAR, phase VARCHAR)')
    for number, key in enumerate(keys):
        connection.execute('INSERT INTO "groups" VALUES (?, ?, ?)', [number, *key])
    columns = connection.execute(sql("population")).fetchnumpy()
    group, received = columns["group"], columns["received_unix_ns"]
    return Population(
        keys=tuple(keys),
        dataset=columns["dataset"],
        request=columns["request"],
        group=group,
        run=columns["run"],
        block=_blocks(group, received),
        good=columns["good"],
        received_unix_ns=received,
        intended_unix_ns=columns["intended_unix_ns"],
        horizon_ns={horizon: _times(columns[f"{horizon}_ns"]) for horizon in Horizon},
        ended_ns=_times(columns["ended_ns"]),
    )


def _times(found: NDArray[np.int64]) -> NDArray[np.float64]:
    return np.where(found < 0, np.inf, found)


def _blocks(group: NDArray[np.int32], received: NDArray[np.int64]) -> NDArray[np.int64]:
    order = np.lexsort((received, group))
    sizes = np.bincount(group)
    blocks = np.empty(len(group), np.int64)
    blocks[order] = np.concatenate([np.empty(0, np.int64), *map(block_numbers, sizes.tolist())])
    return blocks


def read_places(connection: duckdb.DuckDBPyConnection) -> Places:
    """Make the table ``places`` and return its places.

    Raises:
        DataError: A stage is of a kind that the model does not know, or there are too many.
    """
    connection.execute(sql("places"))
    crowd = "SELECT max(reasons) FROM (SELECT count(reason) AS reasons FROM places GROUP BY stage, kind)"
    ((most,),) = connection.execute(crowd).fetchall()
    if most is not None and most > MOST_REASONS:
        # Which take the least time takes another look at all of them.
        connection.execute(sql("crowded_places"), {"most": MOST_REASONS})
    query = "SELECT DISTINCT place, stage, kind, named FROM places ORDER BY place"
    found = [row[1:] for row in connection.execute(query).fetchall()]
    for stage, kind, _ in found:
        if kind not in set(Kind):
            raise DataError(
                f"the stage {shown(stage)} is of the unknown kind {shown(kind)}",
                hint="make the dataset again from the spool, or use the stagetrace that wrote it",
            )
    if len(found) > MOST_PLACES:
        raise DataError(
            f"{len(found):,} stages with their reasons are too many; at most {MOST_PLACES:,} are told apart",
            hint="a stage is named by what is done in it, never by whom it is done for",
        )
    return Places(
        tuple(stage for stage, _, _ in found),
        tuple(Kind(kind) for _, kind, _ in found),
        tuple(reason for _, _, reason in found),
    )


def read_pieces(
    connection: duckdb.DuckDBPyConnection, population: Population, places: Places
) -> Iterator[Piece]:
    """Read the time of every request in every place, `PIECE` requests after the other."""
    query = sql("intervals")

    def read(span: tuple[int, int]) -> dict[str, NDArray[Any]]:
        first, stop = span
        parameters = {
            "dataset": int(population.dataset[first]),
            "first": int(population.request[first]),
            "last": int(population.request[stop - 1]),
        }
        return connection.execute(query, parameters).fetchnumpy()

    spans = list(_spans(population.dataset, min(PIECE, _CELLS // max(1, len(places.stages)))))
    # The next piece is read while this one is being counted.
    with ThreadPoolExecutor(max_workers=1) as reader:
        coming = [reader.submit(read, span) for span in spans[:1]]
        for place, (first, stop) in enumerate(spans):
            found = coming.pop().result()
            coming += [reader.submit(read, span) for span in spans[place + 1 : place + 2]]
            yield _piece(slice(first, stop), population.request[first:stop], places, found)


def _piece(rows: slice, numbers: NDArray[np.int64], places: Places, found: dict[str, NDArray[Any]]) -> Piece:
    row = _rows_of(found["request"], numbers)
    theirs = row >= 0
    wanted = theirs & (found["horizon"] < _HORIZONS)
    cell = (found["horizon"].astype(np.int64) * len(numbers) + row) * len(places.stages) + found["place"]
    weights = found["duration_ns"]
    if not wanted.all():
        cell, weights = cell[wanted], weights[wanted]
    shape = (_HORIZONS, len(numbers), len(places.stages))
    spent = np.bincount(cell, weights=weights, minlength=int(np.prod(shape))).astype(np.float64, copy=False)
    # A time below 0 adds up to nothing, whatever else is in its place.
    spent[cell[weights < 0]] = np.nan
    both, *own = spent.reshape(shape)
    spent_ns = {horizon: both + more for horizon, more in zip(Horizon, own, strict=True)}
    return Piece(rows, int(np.count_nonzero(theirs)), spent_ns)


def _rows_of(requests: NDArray[np.int64], numbers: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the place of every request among ascending numbers, -1 if it is not there.

    All lie between the first and the last of the numbers.
    """
    first, span = int(numbers[0]), int(numbers[-1]) - int(numbers[0]) + 1
    if span <= _SPARSE * len(numbers):
        place = np.full(span, -1, np.int64)
        place[numbers - first] = np.arange(len(numbers))
        return place[requests - first]
    row = np.searchsorted(numbers, requests)
    return np.where(numbers[np.minimum(row, len(numbers) - 1)] == requests, row, -1)


def _spans(dataset: NDArray[np.int16], piece: int) -> Iterator[tuple[int, int]]:
    """First row and the one after the last of every piece; a piece is of one dataset."""
    ends = [*(np.flatnonzero(np.diff(dataset)) + 1).tolist(), len(dataset)]
    begin = 0
    for end in ends:
        for first in range(begin, end, piece):
            yield first, min(first + piece, end)
        begin = end
