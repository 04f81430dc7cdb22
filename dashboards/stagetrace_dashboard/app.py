"""The application: the shell, the pages and the API behind one door."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import plotly
from dash import Dash
from dash.exceptions import DependencyException
from dash.fingerprint import build_fingerprint
from flask import Flask, Response

from stagetrace_dashboard import api, shell
from stagetrace_dashboard.security import Door, guard, refuse_nonsense
from stagetrace_dashboard.theme import CSS

if TYPE_CHECKING:
    from stagetrace_dashboard.source import Source

_NOT_FOUND: Final = 404
_PLOTLY_FILE: Final = Path(plotly.__file__).parent / "package_data" / "plotly.min.js"
_PLOTLY: Final = "/_dash-component-suites/plotly/" + build_fingerprint(  # type: ignore[no-untyped-call]
    "package_data/plotly.min.js", plotly.__version__, int(_PLOTLY_FILE.stat().st_mtime)
)
_GRID: Final = re.compile(r'<script src="([^"]*/dash_ag_grid/[^"]*)"></script>')
# Nothing here is a Dash table, and the polyfill is for browsers that cannot show Mantine; in others it makes
# trimming a text, which plotly does for every colour, several times slower.
_UNUSED: Final = re.compile(r'<script src="[^"]*/(?:dash_table/|dash/deps/polyfill@)[^"]*"></script>')
_LATER: Final = '<link rel="prefetch" as="script" data-script="{}" href="{}">'
_INDEX: Final = f"""\
<!DOCTYPE html>
<html lang="en">
<head>
{{%metas%}}
<meta name="color-scheme" content="light dark">
<title>{{%title%}}</title>
{{%favicon%}}
{{%css%}}
{{%later%}}
<style>{CSS}</style>
</head>
<body>
{{%app_entry%}}
<footer>{{%config%}}{{%scripts%}}{{%renderer%}}</footer>
</body>
</html>
"""


class _App(Dash):
    """Loads scripts that not every page needs when they are needed; ``elements.js`` does it."""

    def interpolate_index(self, *, scripts: str = "", **parts: Any) -> str:  # type: ignore[override]
        """Return the page that everything is in."""
        scripts = _UNUSED.sub("", scripts)
        later = [("grid", source) for source in _GRID.findall(scripts)]
        links = [_LATER.format(name, source) for name, source in [*later, ("plotly", _PLOTLY)]]
        page: str = super().interpolate_index(scripts=_GRID.sub("", scripts), **parts)  # type: ignore[no-untyped-call]
        return page.replace("{%later%}", "\n".join(links))


def create_app(source: Source, door: Door, *, follow: bool = False) -> Dash:
    """Make the application.

    Args:
        source: What it shows.
        door: Who may look.
        follow: Whether the source is kept up to date, so that pages look for news often.
    """
    server: Any = Flask(__name__, static_folder=None)
    api.register(server, source)
    app = _App(
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
    refuse_nonsense(server, source.limits.body_bytes)
    # Dash has a fault of the server for a script that there is not.
    server.register_error_handler(DependencyException, lambda _error: Response(status=_NOT_FOUND))
    return app
