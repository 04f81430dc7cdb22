"""The application: the shell, the pages and the API behind one door."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from dash import Dash
from dash.exceptions import DependencyException
from flask import Flask, Response

from stagetrace_dashboard import api, shell
from stagetrace_dashboard.security import Door, guard
from stagetrace_dashboard.theme import CSS

if TYPE_CHECKING:
    from stagetrace_dashboard.source import Source

_NOT_FOUND: Final = 404
_INDEX: Final = f"""\
<!DOCTYPE html>
<html lang="en">
<head>
{{%metas%}}
<meta name="color-scheme" content="light dark">
<title>{{%title%}}</title>
{{%favicon%}}
{{%css%}}
<style>{CSS}</style>
</head>
<body>
{{%app_entry%}}
<footer>{{%config%}}{{%scripts%}}{{%renderer%}}</footer>
</body>
</html>
"""


def create_app(source: Source, door: Door, *, follow: bool = False) -> Dash:
    """Make the application.

    Args:
        source: What it shows.
        door: Who may look.
        follow: Whether the source is kept up to date, so that pages look for news often.
    """
    server: Any = Flask(__name__, static_folder=None)
    api.register(server, source)
    app = Dash(
        __name__,
        server=server,
        title="stagetrace",
        update_title="",
        assets_folder="",
        include_assets_files=False,
        serve_locally=True,
        suppress_callback_exceptions=True,
        index_string=_INDEX,
        add_log_handler=False,
        enable_mcp=False,
    )
    app.layout = shell.frame(source, follow=follow)
    shell.register(app, source, follow=follow)
    guard(server, door, app.csp_hashes())
    # Dash has a fault of the server for a script that there is not.
    server.register_error_handler(DependencyException, lambda _error: Response(status=_NOT_FOUND))
    return app
