from __future__ import annotations

import contextlib
import json
import re
import socket
import threading

import pytest
from dashboarding import RECORDED, client_of, opened

from stagetrace.errors import UsageError
from stagetrace_dashboard import serving
from stagetrace_dashboard.app import create_app
from stagetrace_dashboard.security import Door, is_loopback

TOKEN = "a-token-of-a-test"  # noqa: S105 - a secret of nobody
EVERYWHERE = "0.0.0.0"  # noqa: S104 - nothing listens
ROUTES = [
    "/",
    "/requests",
    "/api/status",
    "/api/overview",
    "/api/requests/list.csv",
    "/api/nothing",
    "/_dash-layout",
    "/_dash-dependencies",
    "/_favicon.ico",
    "/no/such/page",
]


@pytest.fixture(scope="module")
def closed(recorded):
    """The application behind a token, asked from elsewhere."""
    server = create_app(recorded, Door(EVERYWHERE, TOKEN)).server
    return server.test_client


@pytest.mark.parametrize(
    ("host", "only_here"),
    [
        ("127.0.0.1", True),
        ("127.8.8.8", True),
        ("::1", True),
        ("localhost", True),
        (EVERYWHERE, False),
        ("::", False),
        ("192.168.1.5", False),
        ("example.org", False),
        ("", False),
    ],
)
def test_what_only_this_machine_reaches(host, only_here):
    """Loopback is what only this machine can reach; a name that may lead anywhere is not."""
    assert is_loopback(host) is only_here


@pytest.mark.parametrize(
    ("host", "token"), [(EVERYWHERE, None), ("::", None), ("127.0.0.1", " "), ("::1", "\xe9")]
)
def test_no_door_without_a_lock(host, token):
    """Elsewhere than on loopback, a token is wanted; and an empty or odd one is none."""
    with pytest.raises(UsageError) as caught:
        Door(host, token)
    assert "openssl rand" in caught.value.hint


@pytest.mark.parametrize("route", ROUTES)
def test_every_route_wants_the_token(closed, route):
    """Without the token, or with another one, no route answers anything but that it wants it."""
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": f"Basic {TOKEN}"}):
        answer = closed().get(route, headers=headers)
        assert answer.status_code == 401
        assert answer.headers["WWW-Authenticate"] == "Bearer"
        assert len(answer.data) < 100
    assert closed().post("/_dash-update-component", json={}).status_code == 401
    assert closed().get(f"{route}?token=wrong").status_code == 401


@pytest.mark.parametrize("route", ROUTES)
def test_the_token_in_a_header_opens(closed, route):
    """The right token as a bearer opens every route."""
    answer = closed().get(route, headers={"Authorization": f"Bearer {TOKEN}"})
    assert answer.status_code != 401


def test_the_token_in_an_address_is_kept_once(closed):
    """It sets a cookie that scripts and other sites cannot use, leaves the address, and then is not wanted."""
    client = closed()
    answer = client.get(f"/requests?class=text%2Fshort&token={TOKEN}")
    assert (answer.status_code, answer.headers["Location"]) == (303, "/requests?class=text%2Fshort")
    cookie = answer.headers["Set-Cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=Strict" in cookie
    assert TOKEN not in cookie
    assert client.get("/api/status").status_code == 200
    assert closed().get("/api/status").status_code == 401


@pytest.mark.parametrize(
    ("path", "own"), [("//evil.example/x", "/evil.example/x"), ("/\\evil.example", "/%5Cevil.example")]
)
def test_the_redirect_stays_here(closed, path, own):
    """A path that browsers take for another host leads to a path of this one; so does the form."""
    environment = {"PATH_INFO": path}
    answer = closed().get("/", query_string={"token": TOKEN}, environ_overrides=environment)
    assert answer.headers["Location"] == own
    form = closed().get("/", headers={"Accept": "text/html"}, environ_overrides=environment)
    assert f'action="{own}"' in form.text
    assert f'href="{own}"' in form.text


def test_who_comes_by_a_browser_can_type_the_token(closed):
    """A page asks for it; what is in the address does not become part of the page."""
    answer = closed().get('/x"><script>y</script>?a="><b>', headers={"Accept": "text/html"})
    assert answer.status_code == 401
    assert "<script>" not in answer.text
    assert '"><b>' not in answer.text
    assert '<input name="token" type="password"' in answer.text


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8050", "127.0.0.1.evil.example", "[", "10.0.0.1"]
)
@pytest.mark.parametrize("route", ["/", "/api/status", "/_dash-layout"])
def test_other_names_are_not_answered_on_loopback(client, host, route):
    """A name that somebody pointed to this machine gets nothing (DNS rebinding)."""
    assert client.get(route, headers={"Host": host}).status_code == 421


@pytest.mark.parametrize("host", ["localhost:8050", "127.0.0.1", "[::1]:80", "LOCALHOST"])
def test_names_of_this_machine_are_answered(client, host):
    """Every name of this machine is answered, on any port: a tunnel may have another one."""
    assert client.get("/api/status", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://localhost:1"},
        {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"},
        {"Sec-Fetch-Site": "same-site", "Sec-Fetch-Mode": "cors"},
    ],
)
def test_other_pages_may_not_ask(client, headers):
    """What a browser asks on behalf of another page is refused."""
    assert client.get("/api/status", headers=headers).status_code == 403


def test_a_link_from_elsewhere_works(client):
    """Who follows a link of another page sees the dashboard."""
    headers = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}
    assert client.get("/", headers=headers).status_code == 200


def test_pages_may_run_their_own_scripts_only(client):
    """The policy names scripts by their hashes and allows no other, and nobody may frame a page."""
    policy = client.get("/").headers["Content-Security-Policy"]
    scripts = next(part for part in policy.split("; ") if part.startswith("script-src"))
    assert "unsafe" not in scripts
    assert "sha256-" in scripts
    assert "frame-ancestors 'none'" in policy
    assert client.get("/api/status").headers["X-Content-Type-Options"] == "nosniff"


def test_a_script_that_is_not_there_is_no_fault(client, capfd):
    """Who asks for scripts of other packages gets nothing, and the terminal stays quiet."""
    assert client.get("/_dash-component-suites/os/os.py").status_code == 404
    assert not capfd.readouterr().err


# --- what no page asks -------------------------------------------------------------------------------

CALLBACKS = "/_dash-update-component"


def question(**values):
    """What a browser sends to be shown a page; other values than its own by the property that has them."""
    inputs = {"pathname": "/quality", "search": "", "theme": "light", "generation": 1} | values
    of = {"pathname": ("url", "pathname"), "search": ("url", "search")}
    return {
        "output": "..page.children...menu.children...shown.data..",
        "outputs": [
            {"id": name, "property": of_it}
            for name, of_it in (("page", "children"), ("menu", "children"), ("shown", "data"))
        ],
        "inputs": [
            dict(zip(("id", "property"), of.get(name, (name, "data")), strict=True), value=value)
            for name, value in inputs.items()
        ],
        "changedPropIds": ["url.pathname"],
        "state": [{"id": "shown", "property": "data", "value": None}],
    }


def test_a_question_of_a_page_is_answered(client):
    """What the tests below change is right before."""
    answer = client.post(CALLBACKS, json=question())
    assert answer.status_code == 200
    assert "What was read" in answer.text


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"\xff\x00",
        b"[" * 100_000,
        *(json.dumps(body).encode() for body in (None, [], 1, "x", {}, {"output": 1})),
        json.dumps(question() | {"output": "nothing.children"}).encode(),
        json.dumps(question() | {"output": {"page": "children"}}).encode(),
        json.dumps(question() | {"inputs": None}).encode(),
        json.dumps(question() | {"inputs": []}).encode(),
        json.dumps(question() | {"inputs": ["x", 1, None]}).encode(),
        json.dumps(question() | {"state": {"a": 1}}).encode(),
        json.dumps(question() | {"changedPropIds": 5}).encode(),
        json.dumps(question(pathname=5)).encode(),
        json.dumps(question(search=["?"])).encode(),
    ],
)
def test_what_no_page_sends_is_the_fault_of_who_sent_it(client, capfd, caplog, body):
    """It is refused in one line that tells nothing of the machine, and the terminal has no traceback."""
    answer = client.post(CALLBACKS, data=body, content_type="application/json")
    assert 400 <= answer.status_code < 500
    assert re.fullmatch(r"stagetrace: [a-z ]+\n", answer.text)
    assert len(capfd.readouterr().err.splitlines()) <= 1
    assert not caplog.records


def test_nothing_but_json_is_taken(client):
    """A form, which any page can send without asking before, is refused."""
    for kind in ("text/plain", "application/x-www-form-urlencoded"):
        answer = client.post(CALLBACKS, data=json.dumps(question()), content_type=kind)
        assert (answer.status_code, answer.text) == (415, "stagetrace: unsupported media type\n")


def test_a_large_body_is_not_read():
    """What is larger than the setting is refused, whether its size is told before or not."""
    body = json.dumps(question()).encode()
    with opened(RECORDED, body_bytes=len(body)) as source:
        client = client_of(source)
        assert client.post(CALLBACKS, data=body, content_type="application/json").status_code == 200
        answer = client.post(CALLBACKS, data=body + b" ", content_type="application/json")
        assert (answer.status_code, answer.text) == (413, "stagetrace: request entity too large\n")


def test_a_fault_of_ours_is_still_told(recorded, caplog):
    """Elsewhere than in a page's question, what fails is a fault of the server, and the terminal has it all."""
    server = create_app(recorded, Door()).server
    server.add_url_rule("/fails", "fails", lambda: 1 / 0)
    answer = server.test_client().get("/fails")
    assert answer.status_code == 500
    assert "ZeroDivisionError" not in answer.text
    assert "ZeroDivisionError" in caplog.text
    assert server.test_client().post("/api/status").status_code == 405


@contextlib.contextmanager
def listening(source):
    """A dashboard on a port; gives what sends bytes to it and returns the answer."""
    server = serving.listen(create_app(source, Door()).server, "127.0.0.1", 0)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()

    def ask(sent):
        with socket.create_connection(server.server_address, timeout=20) as connection:
            connection.sendall(sent)
            return b"".join(iter(lambda: connection.recv(65536), b""))

    try:
        yield ask
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_whatever_comes_has_an_answer(recorded):
    """Requests that no browser sends are answered, and none is a fault; a client that says no more is let go."""
    with pytest.MonkeyPatch.context() as patch, listening(recorded) as ask:
        patch.setattr(serving._Handler, "timeout", 0.3)
        close = b"Host: localhost\r\nConnection: close\r\n\r\n"
        for sent, status in (
            (b"GET /api/status HTTP/1.0\r\n\r\n", b"200"),
            (b"GET /api/status HTTP/1.1\r\nHost: evil.example\r\nConnection: close\r\n\r\n", b"421"),
            (b"GET /api/status HTTP/1.1\r\nHost: [\r\nConnection: close\r\n\r\n", b"421"),
            (b"GET http://evil.example/api/status HTTP/1.1\r\nConnection: close\r\n\r\n", b"421"),
            (b"GET /api/%00 HTTP/1.1\r\n" + close, b"400"),
            (b"GET /_dash-component-suites/dash/%00 HTTP/1.1\r\n" + close, b"404"),
            (b"GET /_dash-component-suites/dash/../../etc/passwd HTTP/1.1\r\n" + close, b"404"),
            (b"GET /api/status?since=%ff%00 HTTP/1.1\r\n" + close, b"200"),
            (b"GET /api/overview?class=%00 HTTP/1.1\r\n" + close, b"200"),
            (b"FOO /api/status HTTP/1.1\r\n" + close, b"405"),
            (b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\n" + close, b"414"),
            (b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 200 + close, b"431"),
            (
                b"POST /_dash-update-component HTTP/1.1\r\nContent-Type: application/json\r\n"
                b"Content-Length: 9\r\n" + close + b"{",
                b"400",
            ),
        ):
            assert ask(sent).split(b" ", 2)[1] == status, sent[:80]
        assert ask(b"GET / HT") == b""
