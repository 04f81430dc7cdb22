"""Every hook: harmless whatever the host passes, and where it should be."""

from __future__ import annotations

import asyncio
import inspect

import pytest

from stagetrace import Recorder
from stagetrace_vllm.hooks import HOOKS
from stagetrace_vllm.http import TracedRequest, current_request

ANSWER = object()


class Hostile:
    """An object that has nothing a hook looks for, and fails when looked at."""

    def __getattribute__(self, name):
        if name.startswith("__"):
            return object.__getattribute__(self, name)
        raise RuntimeError(name)


def original(*_args, **_kwargs):
    """A host's function."""
    return ANSWER


async def original_async(*_args, **_kwargs):
    """A host's coroutine function."""
    return ANSWER


def raising(*_args, **_kwargs):
    """A host's function that fails."""
    raise KeyError("the host's own")


ASYNC = {
    "MediaConnector.load_from_url_async",
    "HTTPConnection.async_get_bytes",
    "HTTPConnection.get_async_response",
}


def call(hook, function, recorder):
    """Call a wrapper with hostile arguments, for as many parameters as it is known to have, in a request's name."""
    token = current_request.set(TracedRequest(1, "/v1/completions"))
    try:
        arguments = [original if name == "fn" else Hostile() for name in hook.parameters]
        result = hook.make(function, recorder)(*arguments)
        return asyncio.run(wait_for(result)) if inspect.isawaitable(result) else result
    finally:
        current_request.reset(token)


async def wait_for(awaitable):
    """Await anything."""
    return await awaitable


@pytest.mark.parametrize("hook", HOOKS, ids=lambda hook: hook.target)
def test_fault_of_ours_never_reaches_the_host(hook, tmp_path):
    """Whatever a hook finds, the host gets its own function's answer."""
    function = original_async if hook.target in ASYNC else original
    answer = call(hook, function, Recorder(tmp_path))
    nothing_returned = hook.target.endswith("__init__")
    assert answer is (None if nothing_returned else ANSWER)


@pytest.mark.parametrize("hook", HOOKS, ids=lambda hook: hook.target)
def test_exception_of_the_host_passes_untouched(hook, tmp_path):
    """The host's own exception is the one its caller sees."""
    with pytest.raises(KeyError, match="the host's own"):
        call(hook, raising, Recorder(tmp_path))
