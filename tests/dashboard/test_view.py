from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagetrace.errors import UsageError
from stagetrace.stages import Horizon, Outcome, Stage
from stagetrace_analyzer.queries.requests import SORTABLE
from stagetrace_dashboard.splits import SPLITS
from stagetrace_dashboard.view import PARAMETERS, RequestKey, View, parse_view

NAMES = st.none() | st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=40)
NUMBERS = st.none() | st.integers(0, 10**12)
KEYS = st.builds(RequestKey, st.integers(0, 9), st.integers(0, 10**9))

VIEWS = st.builds(
    View,
    page=st.sampled_from(["overview", "requests"]),
    traffic_class=NAMES,
    phase=NAMES,
    since_unix_ns=NUMBERS,
    until_unix_ns=NUMBERS,
    by_phase=st.sampled_from([None, True, False]),
    horizon=st.sampled_from(Horizon),
    outcome=st.sampled_from([None, *(outcome.value for outcome in Outcome)]),
    longest_wait=st.sampled_from([None, Stage.PREFILL_WAIT.value]),
    media_items=NUMBERS,
    min_ttft_ms=NUMBERS,
    id=NAMES,
    sort=st.sampled_from(SORTABLE),
    descending=st.booleans(),
    engine=NAMES,
    split=st.sampled_from([None, *SPLITS]),
    requests=st.lists(KEYS, max_size=2, unique=True).map(tuple),
)


@given(VIEWS)
def test_an_address_says_everything(view):
    """Whatever was chosen, the address of the view gives the same view again."""
    path, _, search = view.href.partition("?")
    assert parse_view(path.strip("/"), search) == view


def test_every_choice_has_a_parameter():
    """No choice is kept anywhere else than in the address."""
    assert len(PARAMETERS) == len(dataclasses.fields(View)) - 1


def test_nothing_chosen_is_a_bare_address():
    """The first page without choices is at ``/``."""
    assert View().href == "/"
    assert View("engine").href == "/engine"


@pytest.mark.parametrize(
    "search",
    [
        "since=abc",
        "since=-1",
        f"until={2**63}",
        "since=\u0661",
        "requests=1",
        "requests=1-2-3",
        "requests=0-1,0-2,0-3",
        "sort=request_id; DROP TABLE listed",
        "outcome=fine",
        "wait=/etc/passwd",
        "descending=2",
        "split=x",
        "horizon=all",
        f"min_ttft_ms={2**62}",
        f"class={'x' * 201}",
        "class=%ff",
        "&".join(f"a{n}=1" for n in range(60)),
    ],
)
def test_what_cannot_be_is_refused(search):
    """A value that a choice cannot have is a usage error with a hint, not another view."""
    with pytest.raises(UsageError) as caught:
        parse_view("requests", search)
    assert caught.value.hint


def test_parameters_of_others_are_left_alone():
    """A tracking parameter changes nothing."""
    assert parse_view("engine", "?utm_source=mail&engine=0-a") == View("engine", engine="0-a")


def test_choices_go_along():
    """The menu keeps class, phase and time, and drops what belongs to one page."""
    view = View("requests", traffic_class="a", since_unix_ns=5, sort="ttft_ns", requests=(RequestKey(0, 1),))
    assert view.on("class") == View("class", traffic_class="a", since_unix_ns=5)
