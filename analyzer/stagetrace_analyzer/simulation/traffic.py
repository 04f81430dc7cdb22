"""Traffic: which requests come when, drawn from seeded generators."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

_S: Final = 1e9


@dataclass(frozen=True, slots=True)
class RequestClass:
    """What is known of the requests of a class when they arrive.

    Attributes:
        label: What a client would send along as ``stagetrace.label``.
        images: Number of images; class rules tell ``text`` and ``image`` by it.
        max_tokens: Most tokens of the answer, None if unknown.
        image_size: Width and height of an image in pixels.
    """

    label: str
    images: int = 0
    max_tokens: int | None = 16
    image_size: tuple[int, int] = (640, 480)


TEXT: Final = RequestClass("text")
IMAGE: Final = RequestClass("image", images=1)


@dataclass(frozen=True, slots=True)
class Traffic:
    """Requests to come, in the order of their arrival; arrays of shape (requests,).

    Attributes:
        arrival_ns: When each is sent and received, ns from the begin of its run.
        number: Which of ``classes`` each belongs to.
        classes: The classes.
        prompt_tokens: Tokens of each prompt, None if they are unknown.
        output_tokens: Tokens of each answer, None if they are unknown.
    """

    arrival_ns: NDArray[np.int64]
    number: NDArray[np.int64]
    classes: tuple[RequestClass, ...]
    prompt_tokens: NDArray[np.int64] | None = None
    output_tokens: NDArray[np.int64] | None = None

    def of(self, label: str) -> NDArray[np.bool_]:
        """Return which requests are of the class with this label."""
        return np.equal(self.number, [one.label for one in self.classes].index(label))


def alike(arrival_ns: NDArray[np.int64], request_class: RequestClass = TEXT) -> Traffic:
    """Return traffic of one class."""
    return Traffic(arrival_ns, np.zeros(len(arrival_ns), np.int64), (request_class,))


def poisson_ns(generator: np.random.Generator, per_s: float, requests: int) -> NDArray[np.int64]:
    """Draw the instants of a Poisson process in ns, in order."""
    return np.cumsum(generator.exponential(_S / per_s, requests)).astype(np.int64)


def exponential_ns(generator: np.random.Generator, mean_s: float, requests: int) -> NDArray[np.int64]:
    """Draw exponential service times in ns."""
    return np.rint(generator.exponential(_S * mean_s, requests)).astype(np.int64)


def poisson_mixture(
    generator: np.random.Generator, streams: Sequence[tuple[RequestClass, float]], requests: int
) -> Traffic:
    """Draw Poisson arrivals of independent streams.

    Args:
        generator: Where chance comes from.
        streams: Classes, each with its mean number of requests a second.
        requests: How many to draw, of all classes together.
    """
    rates = np.array([per_s for _, per_s in streams])
    number = generator.choice(len(rates), size=requests, p=rates / rates.sum()).astype(np.int64)
    return Traffic(
        poisson_ns(generator, float(rates.sum()), requests), number, tuple(one for one, _ in streams)
    )
