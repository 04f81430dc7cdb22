"""Write ``docs/attributes.md`` from the tables of attributes.

python tools/write_attributes.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from stagetrace_export import conventions

PAGE: Final = Path(__file__).parents[1] / "docs" / "attributes.md"

_TYPES: Final = {str: "string", bool: "boolean", int: "int", float: "double", tuple: "string[]"}

_INTRODUCTION: Final = (
    "# Attributes of spans\n\n"
    "What [`stagetrace export`](export.md) sends. "
    "This page is made from the code by `python tools/write_attributes.py`.\n\n"
    "An attribute that is not known is absent, never zero or empty. Names that begin with `gen_ai.` are "
    "those of OpenTelemetry's semantic conventions for generative AI 0.1.0, those with `stagetrace.` are "
    "ours, and the others are OpenTelemetry's. "
    "No attribute holds a prompt, an answer, a URL or a client's address.\n"
)
_EVENT: Final = (
    "## Event of a request's span\n\n"
    f"`{conventions.FIRST_USEFUL_EVENT}`: the first useful byte was handed to the transport; the TTFT "
    f"horizon ends there. `{conventions.STAGE}` is the last stage of that horizon.\n"
)
_OPERATIONS: Final = (
    "## Operations\n\n"
    "`gen_ai.operation.name` by path. `chat`, `text_completion` and `embeddings` are the conventions' words, "
    "the others ours, because there is none.\n\n"
    "| path | operation |\n|---|---|\n"
)


def page() -> str:
    """Return the whole page."""
    sections = {
        "Resource: the process": conventions.RESOURCE,
        "Span of a request": conventions.REQUEST_SPAN,
        "Span of a stage": conventions.STAGE_SPAN,
        "Span of a step, with `--steps`": conventions.STEP,
    }
    tables = [_table(title, table) for title, table in sections.items()]
    return "\n".join([_INTRODUCTION, *tables, _EVENT, _OPERATIONS + _operations()])


def _table(title: str, table: dict[str, conventions.Attribute]) -> str:
    rows = "".join(
        f"| `{name}` | {_TYPES[row.type]} | {f'`{row.unit}`' if row.unit else ''} | {row.meaning} "
        f"| `{_example(row.example)}` |\n"
        for name, row in table.items()
    )
    return f"## {title}\n\n| attribute | type | unit | meaning | example |\n|---|---|---|---|---|\n{rows}"


def _example(value: conventions.Value) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(value)}]"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _operations() -> str:
    return "".join(f"| `{path}` | `{name}` |\n" for path, name in conventions.OPERATIONS.items())


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
