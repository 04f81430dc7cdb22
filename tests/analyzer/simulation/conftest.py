"""Figures of a simulation with their own Monte-Carlo error."""

from __future__ import annotations

import math

import numpy as np
import pytest

BATCHES = 25
T_999 = 3.745
"""Two-sided 99.9 % point of Student's t with 24 degrees of freedom."""


class Estimate:
    """A mean of values in the order of arrival, and its standard error by batch means.

    The batches are long against the time in which a queue forgets, so their means
    are as good as independent.
    """

    def __init__(self, values):
        batches = (
            np.asarray(values, float)[: len(values) // BATCHES * BATCHES].reshape(BATCHES, -1).mean(axis=1)
        )
        self.mean = batches.mean()
        self.error = batches.std(ddof=1) / math.sqrt(BATCHES)

    def __repr__(self):
        return f"{self.mean:.6g} +- {T_999 * self.error:.2g}"

    def agrees(self, truth, within):
        """Whether the truth lies inside the error, and the error is small enough to tell."""
        return abs(self.mean - truth) <= T_999 * self.error and T_999 * self.error <= within * truth


@pytest.fixture(scope="session")
def estimate():
    return Estimate
