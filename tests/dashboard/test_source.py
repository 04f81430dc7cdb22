from __future__ import annotations

import json
import shutil
import time

import pytest
from busy_spool import write_spool
from dashboarding import MS, client_of, opened, request_row, write

from stagetrace.errors import DataError, UsageError
from stagetrace_dashboard.app import create_app
from stagetrace_dashboard.data import Data
from stagetrace_dashboard.pages import PAGES
from stagetrace_dashboard.pages.requests import FOUND, GRID
from stagetrace_dashboard.security import Door
from stagetrace_dashboard.shell import about, data_age
from stagetrace_dashboard.source import Follower

TICK = {"tick.n_intervals": 1}


def requests(number):
    """Rows of some requests."""
    return [request_row(n) for n in range(number)]


def test_a_grown_dataset_is_read_again_once_it_is_still(tmp_path):
    """Changed files are taken when they stay the same from one look to the next; what was asked before stays."""
    write(tmp_path, requests=requests(3))
    with opened(tmp_path) as source:
        before = source.data
        assert not source.refresh()
        write(tmp_path, requests=requests(5))
        assert not source.refresh()
        assert source.data is before
        assert source.refresh()
        assert (source.data.number, source.data.span.requests) == (2, 5)
        assert before.span.requests == 3
        assert not source.refresh()


def asked(source, output, inputs, states):
    """What a dashboard answers a browser that asks for one property, and others with it."""
    app = create_app(source, Door())
    outputs = next(names for names in app.callback_map if output in names)

    def named(names):
        return [dict(zip(("id", "property"), name.split("."), strict=True)) for name in names]

    body = {
        "output": outputs,
        "outputs": named(outputs.strip(".").split("...")),
        "inputs": [{**of, "value": value} for of, value in zip(named(inputs), inputs.values(), strict=True)],
        "state": [{**of, "value": value} for of, value in zip(named(states), states.values(), strict=True)],
        "changedPropIds": list(inputs)[:1],
    }
    answer = app.server.test_client().post("/_dash-update-component", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json


def page_of(source, address, before, generation=None):
    """The page that a browser gets, None if it is the one that it has, and what tells which one it has."""
    path, _, search = address.partition("?")
    values = {
        "url.pathname": path,
        "url.search": search,
        "theme.data": "light",
        "generation.data": generation or source.data.generation,
    }
    found = asked(source, "page.children", values, {"shown.data": before})["response"]
    if "page" not in found:
        return None, before
    return json.dumps(found["page"]), found["shown"]["data"]


@pytest.mark.parametrize(("address", "texts"), [("/requests", 0), ("/requests?class=image%2Fshort", 3)])
def test_a_list_that_was_empty_is_shown_when_there_is_one(tmp_path, address, texts):
    """A page says that there is nothing as long as there is; the list that comes then says how long it is."""
    rows = [*requests(texts), *(request_row(n, media_items=1, pixels=100) for n in range(texts, texts + 5))]
    path, _, search = address.partition("?")
    write(tmp_path, requests=rows[:texts])
    with opened(tmp_path) as source:
        page, has = page_of(source, address, None)
        assert GRID not in page
        for found in (2, 5):
            write(tmp_path, requests=rows[: texts + found])
            source.refresh()
            assert source.refresh()
            page, has = page_of(source, address, has)
            # A second one would take the place of the first, with what was selected in it.
            assert page is None if found > 2 else GRID in page
            wanted = {"wanted.data": {"startRow": 0, "endRow": 100, "sortModel": []}}
            states = {"url.pathname": path, "url.search": search}
            answer = asked(source, f"{GRID}.getRowsResponse", wanted, states)["response"]
            assert len(answer[GRID]["getRowsResponse"]["rowData"]) == found
            assert answer[FOUND]["children"] == f"{found} requests"


def test_a_dashboard_started_anew_is_seen(tmp_path):
    """A page that is still open from another dashboard at the same address is shown anew."""
    write(tmp_path / "before", requests=requests(3))
    write(tmp_path / "after", requests=requests(4))
    with opened(tmp_path / "before") as source:
        page, has = page_of(source, "/", None)
        generation = source.data.generation
        assert "sideUpdate" not in asked(source, "about.children", TICK, {"generation.data": generation})
    assert "3 requests" in page
    with opened(tmp_path / "after") as source:
        new = asked(source, "about.children", TICK, {"generation.data": generation})["sideUpdate"][
            "generation"
        ]
        page, _ = page_of(source, "/", has, new["data"])
    assert "4 requests" in page


def test_a_broken_dataset_leaves_what_was_read(tmp_path):
    """What cannot be read again is said, and the data are still there; once it is whole, it is read."""
    write(tmp_path, requests=requests(3))
    with opened(tmp_path) as source:
        (tmp_path / "steps" / "part-0.parquet").write_bytes(b"torn")
        source.refresh()
        assert not source.refresh()
        assert "steps" in source.problem
        assert source.data.span.requests == 3
        write(tmp_path, requests=requests(4))
        source.refresh()
        assert source.refresh()
        assert source.problem is None
        assert source.data.span.requests == 4


def test_data_that_vanish_are_said_and_come_back(tmp_path, monkeypatch):
    """Files that go while they are made ready leave what was read; the same look later finds them again."""
    write(tmp_path, requests=requests(3))
    with opened(tmp_path) as source:
        write(tmp_path, requests=requests(4))
        source.refresh()
        with monkeypatch.context() as gone:
            gone.setattr(
                Data,
                "warm",
                lambda data: [path.unlink() for path in tmp_path.glob("*/*.parquet")] and data.choices(),
            )
            assert not source.refresh()
        assert "cannot be read" in source.problem
        assert source.data.number == 1
        write(tmp_path, requests=requests(5))
        source.refresh()
        assert source.refresh()
        assert (source.problem, source.data.span.requests) == (None, 5)


def test_a_folder_that_is_gone_is_no_fault(tmp_path):
    """Pages and their twins say that the data cannot be read any more."""
    write(tmp_path / "data", requests=requests(3))
    with opened(tmp_path / "data") as source:
        shutil.rmtree(tmp_path / "data")
        client = client_of(source)
        assert [client.get(f"/api/{page}").status_code for page in PAGES] == [503] * len(PAGES)


def test_a_growing_spool_is_followed(tmp_path):
    """Requests that a server records while the dashboard runs are shown, a state later."""
    busy = write_spool(tmp_path, 10)
    with opened(tmp_path, poll_s=0.01, spool_share=1.0) as source:
        first = source.data.span.requests
        assert first > 0
        more = write_spool(tmp_path, 10, seed=2)
        deadline = time.monotonic() + 30
        follower = Follower(source)
        follower.start()
        while source.data.number == 1 and time.monotonic() < deadline:
            time.sleep(0.01)
        follower.stop()
        assert source.data.span.requests > first
        assert client_of(source, None).get("/api/status").json["state"] == source.data.number
    assert len(busy.recorders) == len(more.recorders)


def test_a_spool_that_is_gone_is_told(tmp_path):
    """What was read is still shown, with the reason why there is no news; a new spool in its place is read."""
    spool = tmp_path / "spool"
    busy = write_spool(spool, 10)
    with opened(spool, poll_s=0.0, spool_share=1e6) as source:
        shutil.rmtree(spool)
        assert not source.refresh()
        assert "does not exist" in source.problem
        assert source.data.span.requests > 0
        new = write_spool(spool, 5, seed=2)
        assert source.refresh()
        assert source.problem is None
    assert busy.recorders
    assert new.recorders


def test_a_spool_without_news_stays_as_it_is(tmp_path):
    """Reading a spool again that has not grown shows nothing anew."""
    busy = write_spool(tmp_path, 10)
    with opened(tmp_path, poll_s=0.0, spool_share=1.0) as source:
        time.sleep(source.limits.poll_s)
        state = source.data
        while not source._is_spool_due():
            time.sleep(0.01)
        assert not source.refresh()
        assert source.data is state
    assert busy.recorders


def test_nothing_is_left_behind(tmp_path, monkeypatch):
    """When it is closed, what was made of spools is gone."""
    import tempfile

    spool, scratch = tmp_path / "spool", tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    busy = write_spool(spool, 5)
    with opened(spool, poll_s=0.0, spool_share=1.0):
        assert list(scratch.iterdir())
    assert not list(scratch.iterdir())
    assert busy.recorders


@pytest.mark.parametrize(
    ("name", "error"), [("nowhere", UsageError), ("file", UsageError), ("empty", DataError)]
)
def test_what_is_no_data_is_one_line(tmp_path, name, error):
    """A wrong path is told with a hint."""
    (tmp_path / "file").write_text("x")
    (tmp_path / "empty").mkdir()
    with pytest.raises(error) as caught, opened(tmp_path / name):
        pass
    assert caught.value.hint


def test_the_header_says_how_old_the_data_are(data):
    """The age is from the newest request's end; following says when it was read, and trouble is said."""
    newest = data.span.newest_unix_ns
    assert "2 min ago" in str(data_age(data, None, newest + 150_000 * MS, follow=False))
    followed = str(data_age(data, "it is gone", data.read_unix_ns + 4000 * MS, follow=True))
    assert "following, read 4 s ago" in followed
    assert "it is gone" in followed
    assert "tiny random model" in str(about(data))
