"""The recorded run and a hostile dataset, opened as the dashboard opens them."""

from __future__ import annotations

import pytest

pytest.importorskip("dash", reason="needs the extra 'dashboard'")

from dashboarding import (
    BEGIN_UNIX_NS,
    HOSTILE,
    MS,
    RECORDED,
    client_of,
    opened,
    request_row,
    stage_row,
    write,
)


@pytest.fixture(scope="session")
def recorded():
    """The recorded run as a source."""
    with opened(RECORDED) as source:
        yield source


@pytest.fixture(scope="session")
def data(recorded):
    """The recorded run's data."""
    return recorded.data


@pytest.fixture(scope="session")
def client(recorded):
    """Asks the dashboard of the recorded run."""
    return client_of(recorded)


@pytest.fixture(scope="session")
def hostile(tmp_path_factory):
    """A source in which every text tries to be something else."""
    names = dict.fromkeys(
        ("external_id", "trace_id", "model", "phase", "label", "arm", "error_code", "finish_reason"), HOSTILE
    )
    folder = write(
        tmp_path_factory.mktemp("hostile"),
        requests=[
            request_row(number, **names, request_id=f"=r-{number}{HOSTILE}", instance=HOSTILE, media_items=1)
            for number in range(3)
        ],
        stages=[
            row
            for number in range(3)
            for row in (
                stage_row(number, "receive", "work", 0, 5),
                stage_row(
                    number,
                    "prefill.wait",
                    "wait",
                    5,
                    15,
                    reason=HOSTILE,
                    holder=HOSTILE,
                    role="engine",
                    first_step=1,
                ),
                stage_row(
                    number, "decode", "work", 20, 30, horizon="completion", role="engine", first_step=1
                ),
            )
        ],
        media=[
            {
                "request": number,
                "item": 0,
                "format": HOSTILE,
                "encoder_cache": HOSTILE,
                "begin_ns": 0,
                "ready_ns": MS,
            }
            for number in range(3)
        ],
        steps=[
            {
                "engine": HOSTILE,
                "step": step,
                "scheduled_unix_ns": BEGIN_UNIX_NS + step * 40 * MS,
                "begin_unix_ns": BEGIN_UNIX_NS + step * 40 * MS,
                "end_unix_ns": BEGIN_UNIX_NS + step * 40 * MS + 30 * MS,
                "requests": 3,
                "tokens": 7,
                "decodes": 2,
                "encoder_items": 0,
                "running": 3,
                "waiting": 1,
                "reason": HOSTILE,
            }
            for step in range(1, 6)
        ],
        occupancy=[
            {"request": number, "engine": HOSTILE, "first_step": 1, "last_step": 5, "tokens": 1}
            for number in range(3)
        ],
        ingest=[
            {"name": "about", "reason": HOSTILE, "count": 1},
            {"name": "set_aside", "reason": HOSTILE, "count": 1},
        ],
        checks=[{"name": HOSTILE, "expected": 1.0, "found": 2.0, "tolerance": 0.0, "holds": False}],
    )
    with opened(folder) as source:
        yield source
