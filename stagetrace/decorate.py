"""Functions of every kind, each call of them within a context of its own."""

from __future__ import annotations

import functools
import inspect
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from contextlib import AbstractContextManager
from typing import Any, TypeVar, cast

_Function = TypeVar("_Function", bound=Callable[..., Any])

Make = Callable[[], AbstractContextManager[None]]
"""Makes the context of a call."""


def within(make: Make, function: _Function) -> _Function:
    """Wrap a function, coroutine function, generator or asynchronous generator.

    The context of a generator lasts from its first item until it ends or is
    closed.  What is sent to it and thrown into it reaches it as before.
    """
    if inspect.isasyncgenfunction(function):
        wrapper = _within_async_generator(make, function)
    elif inspect.isgeneratorfunction(function):
        wrapper = _within_generator(make, function)
    elif inspect.iscoroutinefunction(function):
        wrapper = _within_coroutine(make, function)
    else:
        wrapper = _within_call(make, function)
    return cast("_Function", functools.wraps(function)(wrapper))


def _within_call(make: Make, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        with make():
            return function(*args, **kwargs)

    return call


def _within_coroutine(make: Make, function: Callable[..., Any]) -> Callable[..., Any]:
    async def coroutine(*args: Any, **kwargs: Any) -> Any:
        with make():
            return await function(*args, **kwargs)

    return coroutine


def _within_generator(make: Make, function: Callable[..., Any]) -> Callable[..., Any]:
    def generator(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
        with make():
            return (yield from function(*args, **kwargs))

    return generator


def _within_async_generator(make: Make, function: Callable[..., Any]) -> Callable[..., Any]:
    async def generator(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, Any]:
        with make():
            items = function(*args, **kwargs)
            advance: Callable[[], Awaitable[Any]] = items.__anext__
            while True:
                try:
                    item = await advance()
                except StopAsyncIteration:
                    return
                try:
                    sent = yield item
                except GeneratorExit:
                    await items.aclose()
                    raise
                except BaseException as error:  # noqa: BLE001 - it is for the generator
                    advance = functools.partial(items.athrow, error)
                else:
                    advance = functools.partial(items.asend, sent)

    return generator
