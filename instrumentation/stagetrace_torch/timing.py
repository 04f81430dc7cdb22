"""Work of requests that a device does: recorded when it is known how long the device took.

On a CPU the host's clock says it, and the stage is recorded as any other.  On a
CUDA device the host only launches the work: it begins when the device was done
with what was timed before, but not before the launch, and lasts as long as the
device took.  How long that is becomes known later, without waiting: at the next
timed call, or in :func:`collect`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from itertools import count
from types import TracebackType
from typing import Any, Final, NamedTuple, TypeVar

from stagetrace.api import Ticket, WorkStage, stage
from stagetrace.clock import monotonic_ns
from stagetrace.decorate import within
from stagetrace.recording import Traced, current, process_recorder
from stagetrace.records import RecordKind
from stagetrace_torch.device import Event, Timer, Untimed, timer_of

_Function = TypeVar("_Function", bound=Callable[..., Any])

_STAGE_BEGIN = int(RecordKind.STAGE_BEGIN)
_STAGE_END = int(RecordKind.STAGE_END)


class _Part(NamedTuple):
    """A stage of a request that its device is to do.

    Attributes:
        traced: The request.
        number: The part.
        code: The stage.
        item: The media item.
        waited: The request waits for the work, under the same number.
    """

    traced: Traced
    number: int
    code: int
    item: int
    waited: bool = False

    @classmethod
    def of_ticket(cls, ticket: Ticket) -> _Part:
        """Return the work that a ticket waits for."""
        waited = ticket._part is not None
        return cls(ticket._traced, ticket._take_part(), ticket._work, ticket._item, waited)

    def begin(self, at_ns: int) -> None:
        """Record when it was begun, which ends the wait for it."""
        recorder = self.traced.recorder
        if recorder is not None:
            recorder.record_at(at_ns, _STAGE_BEGIN, self.traced.number, self.number, self.code, self.item)

    def end(self, at_ns: int) -> None:
        """Record when it was done, or when the wait for it was over."""
        recorder = self.traced.recorder
        if recorder is not None:
            recorder.record_at(at_ns, _STAGE_END, self.traced.number, self.number)


class _Launched(NamedTuple):
    """Work that the device was given, and when."""

    at_ns: int
    parts: list[_Part]


class _Device:
    """The timer of one device, and the work that it has not told of yet."""

    def __init__(self, timer: Timer) -> None:
        self.timer = timer
        self._lock = threading.Lock()
        self._launched: dict[int, _Launched] = {}
        self._numbers = count(1)
        # When the device was done with what was timed last.
        self._free_ns = 0

    def begin(self) -> Event | None:
        """Read what is known by now, and note that work begins."""
        with self._lock:
            self._read()
            return self.timer.begin()

    def end(self, began: Event | None, launched: _Launched) -> None:
        """Note that all of the work is launched."""
        with self._lock:
            if began is None:
                _forget(launched)
                return
            number = next(self._numbers)
            self._launched[number] = launched
            self.timer.end(began, 0, number)

    def collect(self) -> None:
        """Read what is known by now, unless another thread is at it."""
        if self._lock.acquire(blocking=False):
            try:
                self._read()
            finally:
                self._lock.release()

    def _read(self) -> None:
        for _, number, took_ns in self.timer.finished():
            # A device does its work in order: what it did not tell of before, it never will.
            for lost in [earlier for earlier in self._launched if earlier < number]:
                _forget(self._launched.pop(lost))
            at_ns, parts = self._launched.pop(number)
            begin_ns = max(at_ns, self._free_ns)
            self._free_ns = begin_ns + took_ns
            for part in parts:
                part.begin(begin_ns)
                part.end(self._free_ns)


def _forget(launched: _Launched) -> None:
    for part in launched.parts:
        if part.waited:
            part.end(launched.at_ns)


_DEVICES: Final[dict[str, _Device]] = {}


def _device_of(work: object) -> _Device:
    """Return the device that a module's first parameter is on; of anything else, the one in use."""
    try:
        parameters = getattr(work, "parameters", None)
        tensor = None if parameters is None else next(iter(parameters()), None)
        name = str(getattr(tensor, "device", None))
        return _DEVICES.get(name) or _DEVICES.setdefault(name, _Device(timer_of(tensor)))
    except Exception:
        _fault()
        return _Device(Untimed())


def collect() -> None:
    """Record what devices have done by now; call it where the host has waited for its device anyway.

    It never waits.  Without it, work becomes known at the next timed call.
    """
    for device in list(_DEVICES.values()):
        try:
            device.collect()
        except Exception:
            _fault()


class _Work:
    """A block that does, or launches, work of requests on a device."""

    __slots__ = ("_began", "_device", "_launched", "_parts")

    def __init__(self, device: _Device, parts: Iterable[_Part]) -> None:
        self._device = device
        self._parts = parts

    def __enter__(self) -> None:
        self._launched = _Launched(monotonic_ns(), list(self._parts))
        if not self._device.timer.deferred:
            for part in self._launched.parts:
                part.begin(self._launched.at_ns)
        self._began = _begin(self._device)

    def __exit__(
        self, error: type[BaseException] | None, value: BaseException | None, where: TracebackType | None
    ) -> None:
        if self._device.timer.deferred:
            _end(self._device, self._began, self._launched)
            return
        now = monotonic_ns()
        for part in self._launched.parts:
            part.end(now)


def timed_batch(module: object, tickets: Iterable[Ticket]) -> AbstractContextManager[None]:
    """Return a block that does the work which tickets wait for, all at once.

    Every request has been in the stage for all of the time that the device took: the work is shared.
    It is nobody's alone: within the block the current request is the one that it was before.

    Args:
        module: The module, or function, that does the work; its device does the timing.
        tickets: What :func:`stagetrace.wait` returned, of any requests.
    """
    if process_recorder() is None:
        return nullcontext()
    return _Work(_device_of(module), map(_Part.of_ticket, tickets))


def timed(work: _Function, name: WorkStage, item: int | None = None) -> _Function:
    """Record every call of a module, or function, as a stage of the request that it is made for.

    Args:
        work: A ``torch.nn.Module``, which gets forward hooks, or any function, coroutine function or
            generator, which is wrapped.
        name: The stage.
        item: The media item it is for, by its place in the request.

    Returns:
        The module itself, or the wrapped function.
    """
    told = stage(name, item)

    def call() -> AbstractContextManager[None]:
        return _call(work, told)

    module: Any = work
    if not hasattr(module, "register_forward_pre_hook"):
        return within(call, work)
    calls = threading.local()

    def before(_module: Any, _args: Any) -> None:
        # A module may call itself: calls of a thread are nested.
        one = call()
        one.__enter__()
        calls.__dict__.setdefault("open", []).append(one)

    def after(_module: Any, _args: Any, _output: Any) -> None:
        if calls.open:
            calls.open.pop().__exit__(None, None, None)

    module.register_forward_pre_hook(before)
    # Also after an exception, so that no call stays open.
    module.register_forward_hook(after, always_call=True)
    return work


def _call(work: object, told: stage) -> AbstractContextManager[None]:
    """Return the block of one call, for the request that it is made for."""
    traced = current.get()
    if traced is None or traced.over or not told._code:
        return told._again()  # which counts it
    device = _device_of(work)
    if not device.timer.deferred:
        return told._again()
    return _Work(device, [_Part(traced, next(traced.parts), told._code, told._item)])


def _begin(device: _Device) -> Event | None:
    try:
        return device.begin()
    except Exception:
        _fault()
        return None


def _end(device: _Device, began: Event | None, launched: _Launched) -> None:
    try:
        device.end(began, launched)
    except Exception:
        _fault()


def _fault() -> None:
    recorder = process_recorder()
    if recorder is not None:
        recorder.fault()
