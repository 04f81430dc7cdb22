"""Arrivals from public traces, served by a stated model.

The Azure LLM inference traces of 2023 (Patel et al., Splitwise, ISCA 2024) are
CSV files with the columns TIMESTAMP, ContextTokens and GeneratedTokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa
import pyarrow.csv as pc

from stagetrace.errors import DataError
from stagetrace.stages import Reason, Stage
from stagetrace_analyzer.simulation.datasets import SimulatedRun, answer_stages, station_stages
from stagetrace_analyzer.simulation.stations import fcfs
from stagetrace_analyzer.simulation.traffic import RequestClass, Traffic

if TYPE_CHECKING:
    from pathlib import Path

_COLUMNS: Final = {
    "TIMESTAMP": pa.timestamp("ns"),
    "ContextTokens": pa.int64(),
    "GeneratedTokens": pa.int64(),
}
_MS: Final = 1_000_000


@dataclass(frozen=True, slots=True)
class TokenCost:
    """What a server needs: a fixed time a step, and a time for each token in it.

    A prompt is one step, for which requests queue, first come first served.  Every
    token of the answer after the first is a step that others may share, so nobody
    waits for it: a model of arrivals and lengths, not of a scheduler.
    """

    step_ns: int = 10 * _MS
    token_ns: int = 10_000
    servers: int = 1
    respond_ns: int = _MS


def read_azure(path: Path) -> Traffic:
    """Read a trace: arrivals from the first one on, with the tokens of prompts and answers.

    Raises:
        DataError: The file cannot be read, or is no such trace.
    """
    options = pc.ConvertOptions(column_types=_COLUMNS, include_columns=list(_COLUMNS))
    try:
        table = pc.read_csv(path, convert_options=options)
    except (OSError, KeyError, pa.ArrowException) as error:
        first_line = str(error).partition("\n")[0]
        raise DataError(
            f"cannot read {path}: {first_line}", hint=f"it takes a CSV file with {', '.join(_COLUMNS)}"
        ) from error
    table = table.sort_by("TIMESTAMP")
    at_ns, prompt, output = (table[name].cast(pa.int64()).to_numpy() for name in _COLUMNS)
    trace = RequestClass(path.stem, max_tokens=None)
    return Traffic(at_ns - at_ns[:1], np.zeros(len(at_ns), np.int64), (trace,), prompt, output)


def serve(traffic: Traffic, cost: TokenCost) -> SimulatedRun:
    """Serve requests with known tokens.

    Raises:
        ValueError: The tokens are not known.
    """
    if traffic.prompt_tokens is None or traffic.output_tokens is None:
        raise ValueError("the tokens of the requests are not known")
    prefill_ns = cost.step_ns + cost.token_ns * traffic.prompt_tokens
    decode_ns = np.maximum(traffic.output_tokens - 1, 0) * (cost.step_ns + cost.token_ns)
    visit = fcfs(traffic.arrival_ns, prefill_ns, cost.servers)
    stages = (
        *station_stages(visit, Stage.PREFILL, Reason.STEP),
        *answer_stages(decode_ns, cost.respond_ns),
    )
    return SimulatedRun(traffic, stages)
