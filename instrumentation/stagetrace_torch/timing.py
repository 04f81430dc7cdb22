"""Work of requests that a device does: recorded when it is known how long the device took.

On a CPU the host's clock says it, and the stage is recorded as any other.  On a
CUDA device the host only launches the work: it begins when the device was done
with what was timed before, but not before the launch, and lasts as long as the
device took.  How long that is becomes known later, without waiting: at the next
timed call, or in :func:`collect`.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from itertools import count
from types import TracebackType
from typing import Any, Final, NamedTuple, TypeVar, cast

from stagetrace.api import Ticket, WorkStage, stage
from stagetrace.clock import monotonic_ns
from stagetrace.recording import Traced, current, process_recorder
from stagetrace.records import NONE, RecordKind, StageCode
from stagetrace_torch.device import Event, Timer, Untimed, timer_of

_Work = TypeVar("_Work", bound=Callable[..., Any])

_STAGE_BEGIN = int(RecordKind.STAGE_BEGIN)
_STAGE_END = int(RecordKind.STAGE_END)


class _Part(NamedTuple):
    """A stage of a request that its device is to do.

    Attributes:
        traced: The request.
        number: The part, None when nothing waited for the work.
        code: The stage.
        item: The media item.
    """

    traced: Traced
    number: int | None
    code: int
    item: int

    @classmethod
    def of_ticket(cls, ticket: Ticket) -> _Part:
        """Return the work that a ticket waits for."""
        number, ticket._part = ticket._part, None
        return cls(ticket._traced, number, ticket._work, ticket._item)

    def known(self, begin_ns: int, end_ns: int) -> None:
        """Record when it was done."""
        recorder, request = self.traced.recorder, self.traced.number
        if recorder is not None:
            number = next(self.traced.parts) if self.number is None else self.number
            recorder.record_at(begin_ns, _STAGE_BEGIN, request, number, self.code, self.item)
            recorder.record_at(end_ns, _STAGE_END, request, number)

    def unknown(self, launched_ns: int) -> None:
        """Record that nothing waits for it any more."""
        recorder = self.traced.recorder
        if recorder is not None and self.number is not None:
            recorder.record_at(launched_ns, _STAGE_END, self.traced.number, self.number)


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
                part.known(begin_ns, self._free_ns)


def _forget(launched: _Launched) -> None:
    for part in launched.parts:
        part.unknown(launched.at_ns)


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


class timed_batch:  # noqa: N801 - used as a function
    """Do the work that tickets wait for, all at once: ``with timed_batch(module, tickets): ...``.

    Every request has been in the stage for all of the time that the device took: the work is shared.

    Args:
        module: The module, or function, that does the work; its device does the timing.
        tickets: What :func:`stagetrace.wait` returned, of any requests.
    """

    def __init__(self, module: object, tickets: Iterable[Ticket]) -> None:
        self._module = module
        self._tickets = list(tickets)
        self._works = ExitStack()

    def __enter__(self) -> None:
        self._device: _Device | None = None
        if process_recorder() is None:
            return
        device = _device_of(self._module)
        if not device.timer.deferred:
            for ticket in self._tickets:
                self._works.enter_context(ticket.work())
            return
        self._device = device
        self._launched = _Launched(monotonic_ns(), [_Part.of_ticket(ticket) for ticket in self._tickets])
        self._began = _begin(device)

    def __exit__(
        self, error: type[BaseException] | None, value: BaseException | None, where: TracebackType | None
    ) -> None:
        if self._device is None:
            self._works.close()
        else:
            _end(self._device, self._began, self._launched)


class _Call:
    """One call of timed work, for the request that it is made for."""

    __slots__ = ("_began", "_device", "_launched", "_stage")

    def __init__(self, work: object, name: WorkStage, item: int | None) -> None:
        self._device: _Device | None = None
        self._stage: stage | None = None
        traced = current.get()
        device = None if traced is None else _device_of(work)
        if traced is None or device is None or not device.timer.deferred:
            self._stage = stage(name, item)
            self._stage.__enter__()
            return
        self._device = device
        part = _Part(traced, None, int(StageCode[name.name]), NONE if item is None else item)
        self._launched = _Launched(monotonic_ns(), [part])
        self._began = _begin(device)

    def end(self) -> None:
        """End it."""
        if self._stage is not None:
            self._stage.__exit__(None, None, None)
        elif self._device is not None:
            _end(self._device, self._began, self._launched)


def timed(work: _Work, name: WorkStage, item: int | None = None) -> _Work:
    """Record every call of a module, or function, as a stage of the request that it is made for.

    Args:
        work: A ``torch.nn.Module``, which gets forward hooks, or any function, which is wrapped.
        name: The stage.
        item: The media item it is for, by its place in the request.

    Returns:
        The module itself, or the wrapped function.
    """
    module: Any = work
    if not hasattr(module, "register_forward_pre_hook"):
        return cast("_Work", _wrapped(work, name, item))
    calls = threading.local()

    def before(_module: Any, _args: Any) -> None:
        # A module may call itself: calls of a thread are nested.
        calls.__dict__.setdefault("open", []).append(_Call(module, name, item))

    def after(_module: Any, _args: Any, _output: Any) -> None:
        if calls.open:
            calls.open.pop().end()

    module.register_forward_pre_hook(before)
    # Also after an exception, so that no call stays open.
    module.register_forward_hook(after, always_call=True)
    return work


def _wrapped(work: Callable[..., Any], name: WorkStage, item: int | None) -> Callable[..., Any]:
    @functools.wraps(work)
    def call(*args: Any, **kwargs: Any) -> Any:
        one = _Call(work, name, item)
        try:
            return work(*args, **kwargs)
        finally:
            one.end()

    return call


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
