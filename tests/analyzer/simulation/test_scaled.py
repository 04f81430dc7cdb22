"""A dataset made from a recorded one is like it, only larger, and everything in it still agrees."""

from __future__ import annotations

import importlib.resources
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from stagetrace.errors import DataError, UsageError
from stagetrace_analyzer.dataset import TABLES, open_dataset, write_tables
from stagetrace_analyzer.simulation.scaled import STRETCH_SIGMA, write_scaled

RECORDED = Path(str(importlib.resources.files("stagetrace_analyzer.demo") / "recorded" / "dataset"))
REQUESTS = 5_000
PER_S = 12.0


@pytest.fixture(scope="module")
def scaled(tmp_path_factory):
    """A dataset of 5,000 requests at 12 a second from the recorded demo."""
    folder = tmp_path_factory.mktemp("scaled")
    write_scaled(RECORDED, folder, requests=REQUESTS, per_s=PER_S, seed=3)
    return folder


def queried(folder, query):
    """Rows of a query on a dataset."""
    with open_dataset([folder]) as connection:
        return connection.execute(query).fetchall()


def test_every_table_is_there_with_its_schema(scaled):
    """A scaled dataset has all tables, with exactly their columns and types."""
    for name, schema in TABLES.items():
        assert pq.read_schema(scaled / name / "part-0.parquet").equals(schema, check_metadata=True)


def test_as_many_as_asked_for(scaled):
    """There are as many requests as asked for and the rest of a busy period, each with its own id."""
    ((requests, ids, lowest, highest),) = queried(
        scaled, "SELECT count(*), count(DISTINCT request_id), min(request), max(request) FROM requests"
    )
    assert REQUESTS <= requests < REQUESTS + 20
    assert (ids, lowest, highest) == (requests, 0, requests - 1)


def test_at_the_rate_asked_for(scaled):
    """Requests come at the given rate; no server has two busy periods at once, so there are several."""
    ((per_s, servers),) = queried(
        scaled,
        """
        SELECT (count(*) - 1) * 1e9 / (max(received_unix_ns) - min(received_unix_ns)), count(DISTINCT instance)
        FROM requests
        """,
    )
    assert per_s == pytest.approx(PER_S, rel=0.1)
    assert servers > 1


def test_stages_add_up(scaled):
    """Both horizons of every request are the sums of its stages."""
    wrong = """
        SELECT count(*) FROM (
            SELECT
                request,
                sum(duration_ns) FILTER (horizon IN ('both', 'ttft')) AS ttft_sum,
                sum(duration_ns) FILTER (horizon IN ('both', 'completion')) AS completion_sum
            FROM stages GROUP BY request
        ) RIGHT JOIN requests USING (request)
        WHERE ttft_ns IS DISTINCT FROM ttft_sum OR completion_ns IS DISTINCT FROM completion_sum
    """
    assert queried(scaled, wrong) == [(0,)]


def test_stages_follow_each_other(scaled):
    """On each horizon a stage begins where the one before it ends."""
    gaps = """
        SELECT count(*) FROM (
            SELECT begin_ns - lag(begin_ns + duration_ns, 1, 0) OVER (PARTITION BY request ORDER BY begin_ns) AS gap
            FROM stages WHERE horizon IN ('both', $horizon)
        ) WHERE gap != 0
    """
    with open_dataset([scaled]) as connection:
        for horizon in ("ttft", "completion"):
            assert connection.execute(gaps, {"horizon": horizon}).fetchall() == [(0,)]


def test_steps_hold_the_requests_that_occupy_them(scaled):
    """Every step of every engine exists once and holds as many requests and tokens as occupancy says."""
    steps = """
        WITH members AS (
            SELECT engine, tokens, unnest(range(first_step, last_step + 1)) AS step FROM occupancy
        ),
        counted AS (
            SELECT engine, step, count(*) AS members, sum(tokens)::BIGINT AS held FROM members GROUP BY engine, step
        )
        SELECT
            (SELECT count(*) FROM steps),
            (SELECT count(DISTINCT (engine, step)) FROM steps),
            count(*) FILTER (members = requests AND held = tokens)
        FROM steps FULL JOIN counted USING (engine, step)
    """
    ((rows, distinct, agree),) = queried(scaled, steps)
    assert rows == distinct == agree > REQUESTS


def test_stages_lie_in_their_steps(scaled):
    """An interval of encoding ends within the step that it names, up to rounding."""
    outside = """
        SELECT count(*), count(*) FILTER (
            received_unix_ns + stages.begin_ns + duration_ns NOT BETWEEN steps.begin_unix_ns AND steps.end_unix_ns + 2
        )
        FROM stages
        JOIN requests USING (request)
        JOIN (SELECT DISTINCT request, engine FROM occupancy) AS occupancy USING (request)
        JOIN steps ON steps.engine = occupancy.engine AND step = last_step
        WHERE stage = 'encode'
    """
    ((encoded, wrong),) = queried(scaled, outside)
    assert encoded > 1000
    assert wrong == 0


def test_steps_of_an_engine_follow_each_other(scaled):
    """Steps are numbered from 1, and begin in the order of their numbers."""
    backwards = """
        SELECT count(*) FROM (
            SELECT scheduled_unix_ns - lag(scheduled_unix_ns) OVER (PARTITION BY engine ORDER BY step) AS gap FROM steps
        ) WHERE gap <= 0
    """
    assert queried(scaled, backwards) == [(0,)]
    numbers = "SELECT DISTINCT min(step), max(step) - count(*) FROM steps GROUP BY engine"
    assert queried(scaled, numbers) == [(1, 0)]


def test_media_belong_to_their_requests(scaled):
    """Every media item is one of its request's, and is ready before the first byte."""
    counts = """
        SELECT
            (SELECT sum(media_items) FROM requests),
            count(*),
            count(*) FILTER (0 <= begin_ns AND begin_ns < ready_ns AND ready_ns < ttft_ns)
        FROM media JOIN requests USING (request)
    """
    ((items, rows, sound),) = queried(scaled, counts)
    assert items == rows == sound


def test_it_is_like_what_was_recorded(scaled):
    """Classes and reasons come in their recorded proportions, and times have their recorded spread."""
    facts = """
        SELECT
            avg(media_items), median(ln(ttft_ns)), stddev_pop(ln(ttft_ns)), median(ln(completion_ns))
        FROM requests WHERE phase IS DISTINCT FROM 'warm-up'
    """
    ((images, ttft, spread, completion),) = queried(RECORDED, facts)
    found = queried(scaled, facts)[0]
    assert found[0] == pytest.approx(images, rel=0.1)
    assert found[1:] == pytest.approx((ttft, spread, completion), abs=0.1)
    waits = "SELECT DISTINCT stage, reason FROM stages WHERE kind = 'wait' ORDER BY ALL"
    assert queried(scaled, waits) == queried(RECORDED, waits)


def test_times_are_smooth(scaled):
    """Requests drawn from one recorded request differ, by about the spread of the factor."""
    drawn = """
        SELECT count(DISTINCT completion_ns), count(*), stddev_samp(ln(completion_ns))
        FROM requests JOIN media USING (request) WHERE media.hash IS NOT NULL
        GROUP BY hash HAVING count(*) > 3
    """
    rows = queried(scaled, drawn)
    assert len(rows) > 20
    assert all(distinct == requests for distinct, requests, _ in rows)
    assert np.median([spread for _, _, spread in rows]) == pytest.approx(STRETCH_SIGMA, rel=0.3)


def test_phases_and_ids_are_dropped(scaled):
    """No recorded request is named, the warm-up is not drawn from, and phases do not lie over each other."""
    named = "SELECT count(phase), count(external_id), count(trace_id) FROM requests"
    assert queried(scaled, named) == [(0, 0, 0)]
    warm = "SELECT hash FROM media JOIN requests USING (request) WHERE phase = 'warm-up'"
    of_warm_up = set(queried(RECORDED, warm))
    assert of_warm_up
    assert not of_warm_up & set(queried(scaled, "SELECT hash FROM media"))


def test_it_says_what_it_is(scaled):
    """That it is simulated, from what, and what belonged beside the recorded figures."""
    remarks = [reason for (reason,) in queried(scaled, "SELECT reason FROM ingest WHERE name = 'about'")]
    assert remarks[0].startswith("Simulated: 500")
    warm = "SELECT count(*) FROM requests WHERE phase <> 'warm-up'"
    ((recorded,),) = queried(RECORDED, warm)
    assert f"from {recorded} recorded ones" in remarks[0]
    assert remarks[1].startswith("A tiny random model")


def test_the_same_seed_gives_the_same_dataset(tmp_path):
    """A seed decides everything; another one gives something else."""
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        write_scaled(RECORDED, tmp_path / name, requests=200, seed=seed)
    tables = {name: [pq.read_table(tmp_path / name / table) for table in TABLES] for name in "abc"}
    assert tables["a"] == tables["b"] != tables["c"]


def test_over_a_day(tmp_path):
    """Without a rate the requests are spread over a day."""
    write_scaled(RECORDED, tmp_path, requests=3000)
    ((hours,),) = queried(
        tmp_path, "SELECT (max(received_unix_ns) - min(received_unix_ns)) / 3.6e12 FROM requests"
    )
    assert hours == pytest.approx(24, rel=0.1)


def test_requests_that_failed_are_drawn_too(rows, tmp_path):
    """Unknown horizons stay unknown, and a lost request without an end has a busy period of its own."""
    rows.request(("both", "receive", 2.0), ("both", "prefill", 3.0), ended_ns=5_000_000)
    rows.request(outcome="lost", received_unix_ns=10**18 + 10**9)
    recorded = rows.write(tmp_path / "recorded")
    write_scaled(recorded, tmp_path / "scaled", requests=400)
    counts = "SELECT outcome, count(*), count(ttft_ns), count(ended_ns) FROM requests GROUP BY outcome ORDER BY outcome"
    (lost, well) = queried(tmp_path / "scaled", counts)
    assert lost == ("lost", lost[1], 0, 0)
    assert well == ("ok", well[1], well[1], well[1])
    assert well[1] == pytest.approx(200, abs=60)


def test_recorded_rows_are_in_any_order(rows, tmp_path):
    """Media items and stages are told apart by their request, not by their place in the file."""
    for images in (2, 0, 1):
        request = rows.request(
            ("both", "receive", 2.0 + images),
            received_unix_ns=10**18 + (3 - images) * 10**9,
            media_items=images,
            ended_ns=5_000_000,
        )
        rows.media += [{"request": request, "item": item} for item in range(images)]
    rows.media.reverse()
    rows.stages.reverse()
    write_scaled(rows.write(tmp_path / "recorded"), tmp_path / "scaled", requests=100)
    wrong = """
        SELECT count(*) FROM requests
        LEFT JOIN (SELECT request, count(*) AS items FROM media GROUP BY request) USING (request)
        JOIN stages USING (request)
        WHERE media_items != coalesce(items, 0) OR round(duration_ns / ttft_ns) != 1
    """
    assert queried(tmp_path / "scaled", wrong) == [(0,)]
    assert queried(tmp_path / "scaled", "SELECT count(*) FROM stages") == [(100,)]
    items = "SELECT DISTINCT list(item ORDER BY item) FROM media GROUP BY request ORDER BY ALL"
    assert queried(tmp_path / "scaled", items) == [([0],), ([0, 1],)]


@pytest.mark.parametrize("wrong", [{"requests": 0}, {"per_s": 0.0}, {"per_s": float("inf")}, {"per_s": -1.0}])
def test_numbers_must_be_positive(wrong, tmp_path):
    """No requests, no rate or an endless one is a UsageError."""
    with pytest.raises(UsageError, match="must be positive"):
        write_scaled(RECORDED, tmp_path, **wrong)


def test_nothing_to_draw_from(tmp_path):
    """A dataset without requests is a DataError that names it."""
    write_tables(tmp_path / "empty", {})
    with pytest.raises(DataError, match="empty has no requests"):
        write_scaled(tmp_path / "empty", tmp_path / "scaled")
