"""``stagetrace dashboard``: see where requests wait."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from contextlib import ExitStack, closing
from typing import Final

from stagetrace_analyzer.commands.options import (
    NOT_ENOUGH,
    CommandParser,
    add_data_options,
    nothing_found,
    read_data_options,
)
from stagetrace_dashboard.app import create_app
from stagetrace_dashboard.limits import Limits
from stagetrace_dashboard.scope import Scope
from stagetrace_dashboard.security import Door
from stagetrace_dashboard.serving import listen
from stagetrace_dashboard.source import Follower, Source

SUMMARY: Final = "see in a browser where requests of each traffic class wait"

PORT: Final = 8050

TOKEN_VARIABLE: Final = "STAGETRACE_DASHBOARD_TOKEN"  # noqa: S105 - the name, not the token

_DESCRIPTION: Final = """\
Show datasets and spools in a browser: where the requests of each traffic class
wait, every single request, and the steps of the engine.

Only this machine can look, unless --host says otherwise; then a --token is
wanted, which a browser brings once (http://HOST:PORT/?token=TOKEN) and other
clients with every request (Authorization: Bearer TOKEN).

A selection holds for everything that is shown; pages choose within it.

Exit codes: 0 stopped, 2 wrong usage or unreadable data, 3 nothing selected."""

_EPILOG: Final = """\
examples:
  stagetrace dashboard run-1/dataset
  stagetrace dashboard spool/ --follow
  stagetrace dashboard spool/ --since 30m --where stream=true
  stagetrace dashboard spool/ --host 0.0.0.0 --token "$(openssl rand -hex 16)\""""


def main(argv: list[str]) -> int:
    """Run the command until it is interrupted; return its exit code.

    Raises:
        UsageError: An option or a path is wrong.
        DataError: The data cannot be read.
    """
    options = _parser().parse_args(argv)
    door = Door(options.host, options.token)
    wanted = read_data_options(options)
    with ExitStack() as stack:
        _say(f"reading {', '.join(str(path) for path in wanted.paths)}")
        scope = Scope(wanted.selection, wanted.by_phase)
        source = stack.enter_context(closing(Source(wanted.paths, wanted.rules, Limits(), scope)))
        app = create_app(source, door, follow=options.follow)
        server = listen(app.server, door.host, options.port)
        stack.callback(server.server_close)
        source.data.warm()
        if not options.follow and source.data.is_empty:
            _say(nothing_found(wanted, source.data.folders))
            return NOT_ENOUGH
        if options.follow:
            follower = Follower(source)
            stack.callback(follower.stop)
            follower.start()
        _say(f"open {_address(door, server.port)} (Ctrl-C stops)")
        # Whoever ends it, what was made of spools is removed.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        server.serve_forever()
        _say("stopped")
    return 0


def _address(door: Door, port: int) -> str:
    """The address to open; the token is not in it, because terminals are recorded."""
    host = f"[{door.host}]" if ":" in door.host else door.host
    return f"http://{host}:{port}/{'?token=TOKEN' if door.token else ''}"


def _say(what: str) -> None:
    sys.stderr.write(f"stagetrace: {what}\n")
    sys.stderr.flush()


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="stagetrace dashboard",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_data_options(parser)
    parser.add_argument("--follow", action="store_true", help="keep up with data that grow")
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen on (default: %(default)s, this machine only)"
    )
    parser.add_argument(
        "--port",
        type=int,
        default=PORT,
        help="port to listen on, 0 for any that is free (default: %(default)s)",
    )
    parser.add_argument(
        "--token",
        default=os.environ.get(TOKEN_VARIABLE),
        help=f"what everybody who looks must know (default: {TOKEN_VARIABLE}, which no process list shows)",
    )
    return parser
