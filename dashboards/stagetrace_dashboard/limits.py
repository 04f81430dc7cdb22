"""What a question to the data may cost."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """Settings of a dashboard, by name.

    Attributes:
        query_s: A query that takes longer is ended.
        rows: Rows of a list that one request returns.
        csv_rows: Rows of a file.
        steps: Steps, or stretches of time with steps, in a figure.
        waterfall_steps: Steps drawn beside one request.
        mates: Requests that shared steps with one request.
        longest_steps: Steps in the list of the longest ones.
        analyses: Analyses that are kept.
        answers: Answers of other kinds that are kept.
        orders: Sorted lists that are kept; each takes 8 bytes a request.
        poll_s: How often followed data is looked at.
        spool_share: Largest share of the time that goes into reading a followed spool again.
        body_bytes: Size of what may be sent with a request; pages send less than a tenth of it.
    """

    query_s: float = 10.0
    rows: int = 200
    csv_rows: int = 1_000_000
    steps: int = 1000
    waterfall_steps: int = 500
    mates: int = 50
    longest_steps: int = 20
    analyses: int = 32
    answers: int = 64
    orders: int = 8
    poll_s: float = 2.0
    spool_share: float = 0.2
    body_bytes: int = 1_000_000
