"""Datasets and applications for tests of the dashboard."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pyarrow as pa

import stagetrace_analyzer.demo
from stagetrace_analyzer.classes import load_rules
from stagetrace_analyzer.dataset import TABLES, write_tables
from stagetrace_dashboard.app import create_app
from stagetrace_dashboard.limits import Limits
from stagetrace_dashboard.security import Door
from stagetrace_dashboard.source import Source

RECORDED = Path(stagetrace_analyzer.demo.__file__).parent / "recorded" / "dataset"
MS = 1_000_000
BEGIN_UNIX_NS = 1_796_022_000 * 10**9
HOSTILE = '<a href="javascript:alert(1)">x</a><img src=x onerror=alert(1)>%{y}$x$\'; DROP TABLE listed; --'


def request_row(number, **facts):
    """A request that took 20 ms to its first token, and 50 ms to its last one."""
    return {
        "request": number,
        "request_id": f"r-{number}",
        "instance": "server",
        "received_unix_ns": BEGIN_UNIX_NS + number * 100 * MS,
        "outcome": "ok",
        "joined": "api+engine+worker",
        "media_items": 0,
        "max_tokens": 16,
        "ttft_ns": 20 * MS,
        "completion_ns": 50 * MS,
        "ended_ns": 50 * MS,
    } | facts


def stage_row(number, stage, kind, begin_ms, ms, **facts):
    """An interval on both horizons."""
    return {
        "request": number,
        "horizon": "both",
        "stage": stage,
        "kind": kind,
        "occurrence": 1,
        "begin_ns": begin_ms * MS,
        "duration_ns": ms * MS,
        "recompute": False,
        "role": "api",
    } | facts


def write(folder, **rows):
    """Write rows by table as a dataset; return its folder."""
    write_tables(
        folder,
        {name: pa.Table.from_pylist(of, TABLES[name]) for name, of in rows.items()},
        force=True,
    )
    return folder


@contextlib.contextmanager
def opened(*paths, **limits):
    """A source of some paths."""
    with contextlib.closing(Source(list(paths), load_rules(), Limits(**limits))) as source:
        yield source


def client_of(source, door=None):
    """What asks an application without a network."""
    return create_app(source, door or Door()).server.test_client()
