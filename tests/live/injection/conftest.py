"""One server for all delays that are put into the front end, and the table of what was found."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest

from stagetrace import Horizon, Kind, partition
from stagetrace.testing import check_partition

ROWS = pytest.StashKey[list]()
MIDDLEWARE = Path(__file__).parent / "middleware"


class Row:
    """A delay of known size in one place, and where it was found."""

    def __init__(self, name, injected_ms, found_ms, elsewhere_ms, elsewhere):
        self.name = name
        self.injected_ms, self.found_ms = injected_ms, found_ms
        self.elsewhere_ms, self.elsewhere = elsewhere_ms, elsewhere

    def __str__(self):
        return (
            f"{self.name:<60}{self.injected_ms:>9.0f}{self.found_ms:>9.0f}"
            f"{self.found_ms / self.injected_ms:>7.1%}{self.elsewhere_ms / self.injected_ms:>7.1%} {self.elsewhere}"
        )


def spent_ms(request, horizon):
    """Milliseconds in each stage, for each reason, of a request that is partitioned whole."""
    parts = partition(request)
    check_partition(request, parts)
    spent = defaultdict(float)
    for interval in parts.of(horizon):
        spent[interval.stage, interval.reason] += interval.duration / 1e6
    return spent


def described(stage, reason):
    """A stage with its reason, if it has one."""
    return f"{stage}({reason})" if reason else str(stage)


@pytest.fixture
def find(request):
    """Compares a delayed request with an undelayed one, and demands that the delay is where it belongs."""

    def find(name, stage, injected_ms, delayed, undelayed, *, reason=None, horizon=Horizon.TTFT):
        after, before = spent_ms(delayed, horizon), spent_ms(undelayed, horizon)
        place = (stage, reason)
        added = {each: after[each] - before[each] for each in {*after, *before, place}}
        waits = {each: ms for each, ms in added.items() if each[0].kind is Kind.WAIT and each != place}
        worst = max(waits, key=waits.get, default=None)
        elsewhere = described(*worst) if worst else "-"
        row = Row(f"{name} -> {described(*place)}", injected_ms, added[place], waits.get(worst, 0), elsewhere)
        request.config.stash.setdefault(ROWS, []).append(row)
        assert injected_ms >= 500, (str(row), added)
        assert 0.9 * injected_ms <= row.found_ms <= 1.25 * injected_ms, (str(row), added)
        assert row.elsewhere_ms <= 0.05 * injected_ms, (str(row), added)

    return find


def pytest_terminal_summary(terminalreporter, config):
    """Say what was injected and what was found."""
    rows = config.stash.get(ROWS, [])
    if rows:
        terminalreporter.section("injected delays")
        head = f"{'delay -> stage':<60}{'injected':>9}{'found':>9}{'':>7}  most in another wait"
        terminalreporter.write_line(head)
        for row in sorted(rows, key=lambda row: row.name):
            terminalreporter.write_line(str(row))


@pytest.fixture(scope="session")
def media_folder(tmp_path_factory):
    """The folder from which the server may load files."""
    return tmp_path_factory.mktemp("media")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    """A model that costs next to nothing."""
    pytest.importorskip("vllm", reason="needs vLLM: make test installs it")
    from stagetrace_analyzer.demo.model import TINY, make_model

    return make_model(tmp_path_factory.mktemp("model") / "tiny", TINY)


@pytest.fixture(scope="session")
def front_end(tiny_model, media_folder, start_server, tmp_path_factory):
    """A server with one thread for media, long texts, large answers, and a loop that can be blocked."""
    environment = {
        "PYTHONPATH": str(MIDDLEWARE),
        "VLLM_MEDIA_LOADING_THREAD_COUNT": "1",
        "VLLM_MEDIA_CACHE": str(tmp_path_factory.mktemp("cache")),
        "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",
    }
    arguments = (
        "--max-model-len=32768",
        "--max-logprobs=-1",
        f"--allowed-local-media-path={media_folder}",
        "--middleware=blocking_middleware.BlockTheLoop",
    )
    with start_server(tiny_model, *arguments, environment=environment) as server:
        yield server
