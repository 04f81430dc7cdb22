"""Who may ask, and what: hosts, tokens, headers, and questions that no page asks.

On loopback, any page that a browser shows could ask this server by a name that
its owner points to 127.0.0.1 (DNS rebinding); so only names of this machine are
answered there.  Elsewhere a token is wanted on every route.
"""

from __future__ import annotations

import hashlib
import hmac
import html
import ipaddress
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

from flask import Flask, Response, make_response, redirect, request
from werkzeug.exceptions import HTTPException

from stagetrace.errors import DataError, UsageError

if TYPE_CHECKING:
    from werkzeug.wrappers import Response as BaseResponse

TOKEN_PARAMETER: Final = "token"  # noqa: S105 - its name
"""Parameter of the address that brings the token in once."""

_LOOPBACK_NAMES: Final = ("localhost",)
_BEARER: Final = "Bearer "
_PURPOSE: Final = b"stagetrace dashboard"
_COOKIE: Final = "stagetrace_dashboard_"
_MONTH_S: Final = 30 * 86_400
_CALLBACKS: Final = "/_dash-update-component"
"""Where pages ask for what changes in them."""

_REFUSED: Final = """\
<!doctype html><html lang="en"><meta charset="utf-8"><title>stagetrace: token wanted</title>
<style>body{{font:16px system-ui,sans-serif;max-width:34rem;margin:15vh auto;padding:0 1rem}}
:root{{color-scheme:light dark}}input,button{{font:inherit;padding:.4rem .6rem}}</style>
<h1>A token is wanted</h1>
<p>This dashboard was started with <code>--token</code>. A browser that has brought it once keeps it.</p>
<form method="get" action="{path}"><label>Token <input name="token" type="password" autofocus
autocomplete="current-password" required></label> <button>Open</button></form>
<p>Just came here by a link, and opened it before? <a href="{href}">Try again</a>.</p></html>
"""


@dataclass(frozen=True, slots=True)
class Door:
    """Where the dashboard listens, and the token that it wants; None on loopback only."""

    host: str = "127.0.0.1"
    token: str | None = None

    def __post_init__(self) -> None:
        """Check that nobody else can look without a token.

        Raises:
            UsageError: Other machines could, or the token is none.
        """
        if self.token is not None and not self.token.isascii():
            raise UsageError("the token has other letters than ASCII", hint="openssl rand -hex 16 makes one")
        if self.token is not None and not self.token.strip():
            raise UsageError("the token is empty", hint="openssl rand -hex 16 makes one")
        if self.token is None and not is_loopback(self.host):
            raise UsageError(
                f"--host {self.host} lets other machines look, and there is no --token",
                hint='add --token "$(openssl rand -hex 16)", or leave --host out and use an SSH tunnel',
            )


def is_loopback(host: str) -> bool:
    """Tell whether only this machine can reach a host's address."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() in _LOOPBACK_NAMES


def guard(server: Flask, door: Door, scripts: Sequence[str]) -> None:
    """Let only those in who may, and tell browsers what pages may do.

    Args:
        server: Every route of it is guarded.
        door: Who may.
        scripts: Hashes of the scripts in pages, as the Content-Security-Policy has them.
    """

    @server.before_request
    def check() -> BaseResponse | None:
        if is_loopback(door.host) and not is_loopback(_host_name(request.host)):
            return _refuse(421, "this dashboard is asked under a name that is not this machine's")
        if not _is_same_origin():
            return _refuse(403, "another page may not ask this dashboard")
        return None if door.token is None else _check_token(door.token)

    @server.after_request
    def add_headers(response: Response) -> Response:
        response.headers["Content-Security-Policy"] = _policy(scripts)
        response.headers["X-Content-Type-Options"] = "nosniff"
        response.headers["Referrer-Policy"] = "no-referrer"
        response.headers["Cross-Origin-Resource-Policy"] = "same-origin"
        if request.path.startswith("/api/") or response.mimetype == "text/html":
            response.headers["Cache-Control"] = "no-store"
        return response


def refuse_nonsense(server: Flask, body_bytes: int) -> None:
    """Answer what no page sends in one line, as the fault of who asked, which for Dash is one of ours.

    Args:
        server: The application.
        body_bytes: Larger bodies are not read.
    """
    server.config["MAX_CONTENT_LENGTH"] = body_bytes

    @server.errorhandler(Exception)
    def explain(error: Exception) -> BaseResponse | HTTPException:
        if request.path != _CALLBACKS:
            if isinstance(error, HTTPException):
                return error
            raise error
        if isinstance(error, HTTPException):
            return _refuse(error.code or 400, error.name.lower())
        if isinstance(error, DataError):
            return _refuse(503, "the data cannot be read, or not in time")
        sys.stderr.write(f"stagetrace: a question was not understood: {_place(error)}\n")
        return _refuse(400, "this is no question of one of its pages")


def _place(error: Exception) -> str:
    """Name the kind of an error and where it was raised; its text may be of who asked."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__} in {Path(frame.filename).name}, line {frame.lineno}"


def _policy(scripts: Sequence[str]) -> str:
    return "; ".join(
        (
            "default-src 'self'",
            f"script-src 'self' {' '.join(scripts)}",
            # Plotly, the grid and Mantine write styles; images are made in the page for downloads.
            "style-src 'self' 'unsafe-inline'",
            "img-src 'self' data: blob:",
            "font-src 'self' data:",
            "object-src 'none'",
            "base-uri 'none'",
            "form-action 'self'",
            "frame-ancestors 'none'",
        )
    )


def _host_name(host: str) -> str:
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def _is_same_origin() -> bool:
    """Whether a browser says that one of our own pages asks, or says nothing, as other clients do."""
    origin = request.headers.get("Origin")
    if origin is not None and origin.partition("://")[2] != request.host:
        return False
    site = request.headers.get("Sec-Fetch-Site", "none")
    is_navigation = request.headers.get("Sec-Fetch-Mode") == "navigate" and request.method == "GET"
    return site in {"none", "same-origin"} or is_navigation


def _check_token(token: str) -> BaseResponse | None:
    given = request.headers.get("Authorization", "")
    if given.startswith(_BEARER) and _are_equal(given.removeprefix(_BEARER), token):
        return None
    if _are_equal(request.cookies.get(_cookie_name(token), ""), _cookie_value(token)):
        return None
    if _are_equal(request.args.get(TOKEN_PARAMETER, ""), token):
        return _let_in(token)
    return _ask_for_token()


def _let_in(token: str) -> BaseResponse:
    """Keep the token in a cookie, and take it out of the address."""
    response = redirect(_without_token(), code=303)
    response.set_cookie(
        _cookie_name(token),
        _cookie_value(token),
        max_age=_MONTH_S,
        httponly=True,
        samesite="Strict",
        secure=request.is_secure,
    )
    return response


def _ask_for_token() -> BaseResponse:
    if "text/html" in request.headers.get("Accept", ""):
        page = _REFUSED.format(path=html.escape(_own_path()), href=html.escape(_without_token()))
        response = make_response(page, 401)
    else:
        response = _refuse(401, "a token is wanted: Authorization: Bearer TOKEN")
    response.headers["WWW-Authenticate"] = "Bearer"
    return response


def _own_path() -> str:
    """The path as one that cannot lead to another host."""
    return f"/{quote(request.path.lstrip('/'))}"


def _without_token() -> str:
    pairs = parse_qsl(request.query_string.decode("ascii", "replace"), keep_blank_values=True)
    rest = urlencode([pair for pair in pairs if pair[0] != TOKEN_PARAMETER])
    return f"{_own_path()}?{rest}" if rest else _own_path()


def _refuse(status: int, why: str) -> Response:
    return Response(f"stagetrace: {why}\n", status=status, mimetype="text/plain")


def _are_equal(given: str, wanted: str) -> bool:
    """Compare without telling by the time it takes how much of it is right."""
    return hmac.compare_digest(given.encode(), wanted.encode())


def _cookie_name(token: str) -> str:
    # Cookies are shared by all ports of a host, and so by all dashboards there.
    return _COOKIE + _cookie_value(token)[:8]


def _cookie_value(token: str) -> str:
    return hmac.new(token.encode(), _PURPOSE, hashlib.sha256).hexdigest()
