"""Simulated datasets are valid, add up, and say that they are simulated."""

from __future__ import annotations

import numpy as np
import pyarrow.parquet as pq
import pytest

from stagetrace.errors import UsageError
from stagetrace.stages import Outcome, Reason, Stage
from stagetrace_analyzer.dataset import TABLES, open_dataset
from stagetrace_analyzer.simulation.datasets import (
    Ends,
    SimulatedRun,
    StageTimes,
    answer_stages,
    station_stages,
    write_runs,
)
from stagetrace_analyzer.simulation.stations import (
    Stall,
    Station,
    fcfs,
    stalling,
    stalling_closed_loop,
    tandem,
)
from stagetrace_analyzer.simulation.traffic import (
    IMAGE,
    TEXT,
    RequestClass,
    alike,
    exponential_ns,
    poisson_mixture,
    poisson_ns,
)

MS = 1_000_000

SUMS = """
    SELECT
        requests.request, outcome, ttft_ns, completion_ns, ended_ns, ended_stage,
        sum(duration_ns) FILTER (horizon IN ('both', 'ttft'))::BIGINT AS ttft_sum,
        sum(duration_ns) FILTER (horizon IN ('both', 'completion'))::BIGINT AS completion_sum
    FROM requests LEFT JOIN stages USING (request)
    GROUP BY ALL
    ORDER BY ALL
"""
"""Horizons of each request, and the sums of its stages."""


def queried(folder, query):
    """Rows of a query on a dataset."""
    with open_dataset([folder]) as connection:
        return connection.execute(query).fetchall()


def tandem_run(requests=500, seed=0, **facts):
    """Text and image requests through preprocessing, encoding and prefill; text is not encoded."""
    generator = np.random.default_rng(seed)
    traffic = poisson_mixture(generator, [(TEXT, 3.6), (IMAGE, 0.4)], requests)
    encode_ns = np.where(traffic.of("image"), 200 * MS, 0)
    service = [
        exponential_ns(generator, 0.02, requests),
        encode_ns,
        exponential_ns(generator, 0.05, requests),
    ]
    visits = tandem(traffic.arrival_ns, [Station(service_ns) for service_ns in service])
    stages = (Stage.PREPROCESS, Stage.ENCODE, Stage.PREFILL)
    waits = (None, Reason.STEP, Reason.STEP)
    parts = [part for told in zip(visits, stages, waits, strict=True) for part in station_stages(*told)]
    return SimulatedRun(
        traffic, (*parts, *answer_stages(exponential_ns(generator, 0.1, requests), MS)), **facts
    )


def test_every_table_is_there_with_its_schema(tmp_path):
    """A simulated dataset has all tables, with exactly their columns and types."""
    write_runs(tmp_path, [tandem_run()], "a tandem")
    for name, schema in TABLES.items():
        assert pq.read_schema(tmp_path / name / "part-0.parquet").equals(schema, check_metadata=True)


def test_stages_add_up(tmp_path):
    """Both horizons of every request are the sums of its stages, and begin where the one before ends."""
    write_runs(tmp_path, [tandem_run()], "a tandem")
    rows = queried(tmp_path, SUMS)
    assert len(rows) == 500
    for _, outcome, ttft, completion, ended, stage, ttft_sum, completion_sum in rows:
        assert (outcome, stage) == ("ok", None)
        assert (ttft, completion, ended) == (ttft_sum, completion_sum, completion_sum)
    gaps = """
        SELECT count(*) FROM (
            SELECT begin_ns - lag(begin_ns + duration_ns, 1, 0) OVER (PARTITION BY request ORDER BY begin_ns) AS gap
            FROM stages WHERE horizon IN ('both', $horizon)
        ) WHERE gap != 0
    """
    with open_dataset([tmp_path]) as connection:
        for horizon in ("ttft", "completion"):
            assert connection.execute(gaps, {"horizon": horizon}).fetchall() == [(0,)]


def test_stages_are_what_was_simulated(tmp_path):
    """Receipts, waits and work of every stage are those of the queue, to the nanosecond."""
    generator = np.random.default_rng(6)
    visit = fcfs(poisson_ns(generator, 8, 300), exponential_ns(generator, 0.1, 300))
    run = SimulatedRun(alike(visit.arrival_ns), station_stages(visit, Stage.PREFILL, Reason.STEP))
    write_runs(tmp_path, [run], "M/M/1")
    found = queried(
        tmp_path,
        """
        SELECT
            received_unix_ns - min(received_unix_ns) OVER (),
            coalesce(sum(duration_ns) FILTER (stage = 'prefill.wait' AND kind = 'wait' AND reason = 'step'), 0)::BIGINT,
            sum(duration_ns) FILTER (stage = 'prefill' AND kind = 'work' AND reason IS NULL)::BIGINT
        FROM requests JOIN stages USING (request)
        GROUP BY request, received_unix_ns
        ORDER BY request
        """,
    )
    expected = np.column_stack([visit.arrival_ns - visit.arrival_ns[0], visit.wait_ns, visit.service_ns])
    assert found == [tuple(row) for row in expected.tolist()]


def test_a_stage_without_time_has_no_row(tmp_path):
    """Text is not encoded, so it has no row of it, as in the dataset of a real server."""
    write_runs(tmp_path, [tandem_run()], "a tandem")
    assert queried(tmp_path, "SELECT count(*) FROM stages WHERE duration_ns <= 0") == [(0,)]
    encoded = "SELECT label, count(DISTINCT request) FROM requests JOIN stages USING (request) WHERE stage = 'encode' GROUP BY 1"
    ((label, images),) = queried(tmp_path, encoded)
    assert label == "image"
    assert queried(tmp_path, "SELECT count(*) FROM requests WHERE label = 'image'") == [(images,)]


def test_facts_of_the_classes(tmp_path):
    """Images have media rows and pixels, text has none; what is not simulated is unknown."""
    pair = RequestClass("pair", images=2, max_tokens=300, image_size=(20, 10))
    unknown = RequestClass("unknown", max_tokens=None)
    traffic = poisson_mixture(np.random.default_rng(7), [(pair, 1.0), (unknown, 1.0)], 40)
    visit = fcfs(traffic.arrival_ns, np.full(40, MS))
    write_runs(tmp_path, [SimulatedRun(traffic, station_stages(visit, Stage.PREFILL))], "facts")
    facts = "SELECT DISTINCT label, media_items, pixels, max_tokens, prompt_tokens FROM requests ORDER BY 1"
    assert queried(tmp_path, facts) == [("pair", 2, 400, 300, None), ("unknown", 0, None, None, None)]
    media = """
        SELECT label, list(item ORDER BY item), any_value((width, height)), count(bytes)
        FROM media JOIN requests USING (request) GROUP BY request, label
    """
    pairs = int(np.count_nonzero(traffic.of("pair")))
    assert queried(tmp_path, media) == [("pair", [0, 1], (20, 10), 0)] * pairs


def test_requests_that_do_not_end_well(tmp_path):
    """What was not reached is null, and the stages end where the request did; nobody knows a lost one's end."""
    stages = (
        StageTimes("both", Stage.PREFILL_WAIT, np.full(6, 10), Reason.STEP),
        StageTimes("both", Stage.PREFILL, np.full(6, 20)),
        *answer_stages(np.full(6, 100), 5),
    )
    outcome = np.array(["ok", "lost", "cancelled", "error", "cancelled", "cancelled"])
    ends = Ends(outcome, np.array([0, 0, 4, 30, 60, 0]))
    write_runs(tmp_path, [SimulatedRun(alike(np.arange(6)), stages, ends=ends)], "ends")
    assert [row[1:] for row in queried(tmp_path, SUMS)] == [
        ("ok", 35, 135, 135, None, 35, 135),
        ("lost", None, None, None, None, None, None),
        ("cancelled", None, None, 4, "prefill.wait", None, 4),
        ("error", None, None, 30, "prefill", None, 30),
        ("cancelled", 35, None, 60, "decode", 35, 60),
        ("cancelled", None, None, 0, None, None, None),
    ]
    told = "SELECT outcome, status, error_code, finish_reason FROM requests ORDER BY request LIMIT 4"
    assert queried(tmp_path, told) == [
        ("ok", 200, None, "length"),
        ("lost", None, None, None),
        ("cancelled", None, None, None),
        ("error", 500, "http_500", None),
    ]
    assert set(ends.outcome) == {known.value for known in Outcome}


def test_runs_follow_each_other(tmp_path):
    """Runs keep their phases and numbers, and the next begins when nobody of the last is left."""
    write_runs(tmp_path, [tandem_run(100, phase="first"), tandem_run(50, seed=1, phase="second")], "two runs")
    bounds = """
        SELECT phase, count(DISTINCT request), min(received_unix_ns), max(received_unix_ns + completion_ns)
        FROM requests GROUP BY phase ORDER BY phase
    """
    (first, requests, _, end), (second, others, begin, _) = queried(tmp_path, bounds)
    assert (first, requests, second, others) == ("first", 100, "second", 50)
    assert end < begin
    assert queried(tmp_path, "SELECT max(request) FROM stages") == [(149,)]
    items = "SELECT DISTINCT label, phase FROM media JOIN requests USING (request) ORDER BY ALL"
    assert queried(tmp_path, items) == [("image", "first"), ("image", "second")]


def test_it_says_that_it_is_simulated(tmp_path):
    """What was simulated stands beside every figure; nothing was recorded or dropped."""
    write_runs(tmp_path, [tandem_run(10)], "a tandem of three stations")
    assert queried(tmp_path, "SELECT name, reason, count FROM ingest") == [
        ("about", "Simulated: a tandem of three stations", 1),
        ("records", "", 0),
        ("requests", "", 10),
        ("dropped", "", 0),
        ("faults", "", 0),
    ]


def test_a_dataset_is_not_overwritten(tmp_path):
    """A dataset that is there stays, unless one says otherwise."""
    write_runs(tmp_path, [tandem_run(10)], "one")
    with pytest.raises(UsageError, match="already holds a dataset"):
        write_runs(tmp_path, [tandem_run(20)], "two")
    write_runs(tmp_path, [tandem_run(20)], "two", force=True)
    assert queried(tmp_path, "SELECT count(*) FROM requests") == [(20,)]


@pytest.mark.parametrize(
    ("stages", "ends", "message"),
    [
        ([("both", Stage.PREFILL), ("ttft", Stage.PREFILL)], None, "ttft horizon passes a stage twice"),
        ([("whole", Stage.PREFILL)], None, "unknown horizons: whole"),
        ([("ttft", Stage.RESPOND)], None, "last byte comes before the first"),
        ([("both", Stage.PREFILL)], ("cancelled", MS + 1), "breaks off outside of its time"),
        ([("both", Stage.PREFILL)], ("error", -1), "breaks off outside of its time"),
    ],
    ids=["a stage twice", "unknown horizon", "no answer", "too late", "too early"],
)
def test_what_cannot_be_is_refused(stages, ends, message, tmp_path):
    """A run that contradicts the stage model is a ValueError, and nothing is written."""
    parts = tuple(StageTimes(horizon, stage, np.array([MS])) for horizon, stage in stages)
    told = None if ends is None else Ends(np.array([ends[0]]), np.array([ends[1]]))
    with pytest.raises(ValueError, match=message):
        write_runs(tmp_path, [SimulatedRun(alike(np.array([0])), parts, ends=told)], "nothing")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("open_loop", "requests", "p99_ms"), [(True, 500, 460.0), (False, 450, 10.0)])
def test_coordinated_omission_in_a_dataset(open_loop, requests, p99_ms, tmp_path):
    """The p99 of a stalled server is 460.0 ms by open-loop clients and 10.0 ms by a closed-loop one."""
    stall = Stall(1000 * MS, 500 * MS)
    if open_loop:
        visit = stalling(np.arange(500) * 10 * MS, 10 * MS, stall)
    else:
        visit = stalling_closed_loop(10 * MS, stall, 5000 * MS)
    run = SimulatedRun(alike(visit.arrival_ns), station_stages(visit, Stage.PREFILL), open_loop=open_loop)
    write_runs(tmp_path, [run], "a stall")
    found = "SELECT count(*), count(intended_unix_ns), list_sort(list(completion_ns))[ceil(0.99 * count(*))::INT] / 1e6 FROM requests"
    assert queried(tmp_path, found) == [(requests, requests * open_loop, p99_ms)]
