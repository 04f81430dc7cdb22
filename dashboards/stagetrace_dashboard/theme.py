"""The one theme of the dashboard: of Mantine, the grid and the pages; colours are the palette's."""

from __future__ import annotations

from typing import Any, Final

from stagetrace_analyzer.figures.palette import FONT, GROUNDS, Ground, Theme

MANTINE: Final[dict[str, Any]] = {
    "fontFamily": FONT,
    "headings": {"fontFamily": FONT, "fontWeight": "600"},
    "primaryColor": "blue",
    "defaultRadius": "sm",
    "cursorType": "pointer",
    "respectReducedMotion": True,
}

GRAPH_CONFIG: Final[Any] = {
    "displaylogo": False,
    # It would upload the figure to a service of plotly's.
    "showSendToCloud": False,
    # Pictures have buttons of their own, in two formats.
    "modeBarButtonsToRemove": ["toImage", "select2d", "lasso2d", "autoScale2d"],
}

GRID_OPTIONS: Final[dict[str, Any]] = {
    "theme": {
        "function": "themeQuartz.withParams({fontFamily: 'inherit', fontSize: 13, spacing: 5, "
        "backgroundColor: 'var(--mantine-color-body)', foregroundColor: 'var(--mantine-color-text)', "
        "headerBackgroundColor: 'var(--st-page)', borderColor: 'var(--st-line)', accentColor: '#228be6'})"
    },
    "animateRows": False,
    "suppressCellFocus": False,
}

NAVBAR_PX: Final = 190
HEADER_PX: Final = 52
LARGE_SCREEN_PX: Final = 2400


def _variables(ground: Ground) -> str:
    return (
        f"--st-page:{ground.page};--mantine-color-body:{ground.surface};--mantine-color-text:{ground.ink};"
        f"--mantine-color-dimmed:{ground.muted};--st-line:{ground.grid};--st-alarm:{ground.alarm};"
        f"--mantine-color-default-border:{ground.grid}"
    )


CSS: Final = f"""
:root[data-mantine-color-scheme="light"]{{{_variables(GROUNDS[Theme.LIGHT])};color-scheme:light}}
:root[data-mantine-color-scheme="dark"]{{{_variables(GROUNDS[Theme.DARK])};color-scheme:dark}}
body{{background:var(--st-page)}}
.st-main{{background:var(--st-page);min-height:100vh}}
.st-table{{border-collapse:collapse;width:100%;font-size:.8125rem;line-height:1.5}}
.st-table th,.st-table td{{padding:.25rem .4rem;text-align:left;vertical-align:top;overflow-wrap:break-word}}
.st-table tr+tr,.st-table tbody tr{{border-top:1px solid var(--st-line)}}
.st-facts{{table-layout:fixed}}
.st-facts tbody tr{{border:0}}
.st-facts.st-table th{{width:9.5rem;font-weight:500;color:var(--mantine-color-dimmed)}}
.st-graph{{contain:strict}}
.st-scroll{{overflow-x:auto}}
.st-table .st-figure{{font-variant-numeric:tabular-nums;text-align:right;white-space:nowrap}}
.st-link{{color:var(--mantine-color-anchor);text-decoration:none}}
.st-link:hover{{text-decoration:underline}}
.st-button{{font-family:inherit;font-size:.75rem;font-weight:600;line-height:1.375rem;
cursor:pointer;padding:0 .4rem;display:inline-block;
border:1px solid var(--mantine-color-default-border);border-radius:4px;
background:var(--mantine-color-default);color:var(--mantine-color-default-color);text-decoration:none}}
.st-button:hover{{background:var(--mantine-color-default-hover)}}
.st-button.st-chosen{{background:var(--mantine-primary-color-filled);color:#fff}}
.st-alarm{{color:var(--st-alarm)}}
.st-dimmed{{color:var(--mantine-color-dimmed)}}
.st-wrap{{overflow-wrap:anywhere}}
.st-whole{{white-space:nowrap}}
:focus-visible{{outline:2px solid #228be6;outline-offset:2px}}
.st-skip{{position:absolute;left:-999px}}
.st-skip:focus{{left:8px;top:8px;z-index:1000;background:var(--mantine-color-body);padding:8px}}
@media (min-width:{LARGE_SCREEN_PX}px){{html{{font-size:125%}}}}
@media print{{
.mantine-AppShell-header,.mantine-AppShell-navbar,[role=search]{{display:none}}
.st-main{{padding:0!important;transition:none!important}}
section{{break-inside:avoid}}
}}
"""
"""Styles that Mantine's own parameters do not reach."""


def theme_of(scheme: str | None) -> Theme:
    """Return the theme of Mantine's colour scheme; light until the browser has told it."""
    return Theme.DARK if scheme == Theme.DARK else Theme.LIGHT
