"""The API server between HTTP and the engine: media, thread pools, outputs."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import Any, Final

from stagetrace.recorder import Recorder
from stagetrace.records import NONE, Fact, JobKind, RecordKind
from stagetrace_vllm.http import TracedRequest, current_request
from stagetrace_vllm.reading import job_kind, media_format, media_modality, media_size, scheme_and_host

_ITEM_BEGIN = int(RecordKind.ITEM_BEGIN)
_ITEM_END = int(RecordKind.ITEM_END)
_FETCH_BEGIN = int(RecordKind.FETCH_BEGIN)
_FETCH_END = int(RecordKind.FETCH_END)
_JOB_SUBMITTED = int(RecordKind.JOB_SUBMITTED)
_JOB_STARTED = int(RecordKind.JOB_STARTED)
_JOB_ENDED = int(RecordKind.JOB_ENDED)
_MEDIA_CACHED = int(RecordKind.MEDIA_CACHED)
_MEDIA_DECODED = int(RecordKind.MEDIA_DECODED)
_PROCESSOR_CACHE = int(RecordKind.PROCESSOR_CACHE)
_ENGINE_REQUEST = int(RecordKind.ENGINE_REQUEST)
_OUTPUT_FIRST = int(RecordKind.OUTPUT_FIRST)
_OUTPUT_FINISHED = int(RecordKind.OUTPUT_FINISHED)
_ABORTED = int(RecordKind.ABORTED)
_FACT_NUMBER = int(RecordKind.FACT_NUMBER)
_FACT_TEXT = int(RecordKind.FACT_TEXT)
_MAX_TOKENS = int(Fact.MAX_TOKENS)
_EXTERNAL_ID = int(Fact.EXTERNAL_ID)
_ERROR = int(Fact.ERROR)
_DECODE = JobKind.DECODE
_SIDE_MAX: Final = 0xFFFF


class _Item:
    """A media item that is being loaded."""

    __slots__ = ("attempts", "index", "request")

    def __init__(self, request: TracedRequest, index: int) -> None:
        self.request = request
        self.index = index
        self.attempts = 0


_current_item: ContextVar[_Item | None] = ContextVar("stagetrace_item", default=None)


# --- thread pools ----------------------------------------------------------------------------------


def wrap_submit(original: Callable[..., Any], recorder: Recorder) -> Callable[..., Any]:
    """Record when a job is submitted, started and ended; run it in its request's name."""

    def submit(fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        request = current_request.get()
        if request is None:
            return original(fn, *args, **kwargs)
        try:
            kind, item = job_kind(fn), _current_item.get()
            job = _cache_hop(fn, item, recorder) if kind is None else _Job(fn, kind, request, item, recorder)
        except Exception:
            recorder.fault()
            return original(fn, *args, **kwargs)
        return original(job, *args, **kwargs)

    return submit


def _cache_hop(function: Callable[..., Any], item: _Item | None, recorder: Recorder) -> Callable[..., Any]:
    """Record a hit of the media cache: only its look-up gives bytes, and only then."""
    if item is None:
        return function

    def hop(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        if isinstance(result, bytes):
            recorder.record(_MEDIA_CACHED, item.request.number, item.index)
        return result

    return hop


class _Job:
    """A job of a request, as a callable that stands in for the function."""

    __slots__ = ("_function", "_item", "_kind", "_number", "_recorder", "_request")

    def __init__(
        self,
        function: Callable[..., Any],
        kind: JobKind,
        request: TracedRequest,
        item: _Item | None,
        recorder: Recorder,
    ) -> None:
        self._function = function
        self._request = request
        self._item = item
        self._recorder = recorder
        self._number = next(request.jobs)
        self._kind = kind
        index = NONE if item is None else item.index
        recorder.record(_JOB_SUBMITTED, request.number, self._number, self._kind, index)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        record, number = self._recorder.record, self._request.number
        record(_JOB_STARTED, number, self._number)
        token = current_request.set(self._request)
        failed = 1
        try:
            result = self._function(*args, **kwargs)
            failed = 0
        finally:
            current_request.reset(token)
            record(_JOB_ENDED, number, self._number, failed)
        if self._kind is _DECODE:
            self._note_media(result)
        return result

    def _note_media(self, result: Any) -> None:
        try:
            content = getattr(result, "original_bytes", None)
            if self._item is None or not isinstance(content, bytes):
                return
            width, height = media_size(getattr(result, "media", None))
            sides = width << 16 | height if max(width, height) <= _SIDE_MAX else 0
            name = media_format(content)
            form = NONE if name is None else self._recorder.intern(name)
            number, index = self._request.number, self._item.index
            self._recorder.record(_MEDIA_DECODED, number, index, len(content), sides, form)
        except Exception:
            self._recorder.fault()


def wrap_renderer_init(original: Callable[..., Any], recorder: Recorder) -> Callable[..., Any]:
    """Trace the renderer's two pools: template and tokenizer, multimodal processor."""

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        try:
            for executor in (self._executor, self._mm_executor):
                executor.submit = wrap_submit(executor.submit, recorder)
        except Exception:
            recorder.fault()

    return init


# --- media items -----------------------------------------------------------------------------------


def wrap_load_from_url_async(original: Callable[..., Any], recorder: Recorder) -> Callable[..., Any]:
    """Record a media item from the begin of its loading until it is decoded."""

    def load_from_url_async(self: Any, url: str, *args: Any, **kwargs: Any) -> Awaitable[Any]:
        request = current_request.get()
        if request is None:
            return original(self, url, *args, **kwargs)  # type: ignore[no-any-return]
        return load(request, self, url, *args, **kwargs)

    async def load(request: TracedRequest, self: Any, url: str, *args: Any, **kwargs: Any) -> Any:
        item = _Item(request, next(request.items))
        try:
            scheme, host = scheme_and_host(url)
            host_number = recorder.intern(host) if host else NONE
            modality = recorder.intern(media_modality(args[0] if args else kwargs.get("media_io")))
            scheme_number = recorder.intern(scheme)
            recorder.record(_ITEM_BEGIN, request.number, item.index, scheme_number, host_number, modality)
        except Exception:
            recorder.fault()
        token = _current_item.set(item)
        failed = 1
        try:
            result = await original(self, url, *args, **kwargs)
            failed = 0
        finally:
            _current_item.reset(token)
            recorder.record(_ITEM_END, request.number, item.index, failed)
        return result

    return load_from_url_async


def wrap_async_get_bytes(original: Callable[..., Any], recorder: Recorder) -> Callable[..., Any]:
    """Record the network fetch of a media item, retries included."""

    def async_get_bytes(self: Any, *args: Any, **kwargs: Any) -> Awaitable[Any]:
        item = _current_item.get()
        if item is None:
            return original(self, *args, **kwargs)  # type: ignore[no-any-return]
        return fetch(item, self, *args, **kwargs)

    async def fetch(item: _Item, self: Any, *args: Any, **kwargs: Any) -> Any:
        number, index = item.request.number, item.index
        recorder.record(_FETCH_BEGIN, number, index)
        failed = 1
        try:
            result = await original(self, *args, **kwargs)
            failed = 0
        finally:
            recorder.record(_FETCH_END, number, index, item.attempts, failed)
        return result

    return async_get_bytes


def wrap_get_async_response(original: Callable[..., Any], _recorder: Recorder) -> Callable[..., Any]:
    """Count the attempts of a fetch."""

    def get_async_response(self: Any, *args: Any, **kwargs: Any) -> Any:
        item = _current_item.get()
        if item is not None:
            item.attempts += 1
        return original(self, *args, **kwargs)

    return get_async_response


def wrap_get_cache_missing_items(original: Callable[..., Any], recorder: Recorder) -> Callable[..., Any]:
    """Record which media items the processor's cache held."""

    def get_cache_missing_items(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        request = current_request.get()
        if request is not None:
            try:
                for index, hit in enumerate(result[0].get("image", ())):
                    recorder.record(_PROCESSOR_CACHE, request.number, index, bool(hit))
            except Exception:
                recorder.fault()
        return result

    return get_cache_missing_items


# --- to the engine and back ------------------------------------------------------------------------

_ADD_REQUEST: Final = ("prompt", "parent_req", "request_index", "queue")
_engine_requests: dict[str, tuple[int, int]] = {}
"""The engine's id of each request in flight -> the request's number, the id's text number."""


def wrap_output_processor_add_request(original: Callable[..., Any], recorder: Recorder) -> Callable[..., Any]:
    """Join a request with the engine's id of it."""

    def add_request(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        traced = current_request.get()
        if traced is not None:
            try:
                named = dict(zip(_ADD_REQUEST, args, strict=False)) | kwargs
                _note_engine_request(traced.number, request, named.get("request_index", 0), recorder)
                traced.delivery.watch(named.get("queue"), recorder)
            except Exception:
                recorder.fault()
        return original(self, request, *args, **kwargs)

    return add_request


def _note_engine_request(number: int, request: Any, index: int, recorder: Recorder) -> None:
    identifier = request.request_id
    if identifier in _engine_requests:
        return
    text = recorder.define(identifier)
    _engine_requests[identifier] = (number, text)
    recorder.record(_ENGINE_REQUEST, number, text, index)
    recorder.record(_FACT_TEXT, number, _EXTERNAL_ID, recorder.define(request.external_req_id))
    max_tokens = getattr(request.sampling_params, "max_tokens", None)
    if max_tokens is not None:
        recorder.record(_FACT_NUMBER, number, _MAX_TOKENS, max_tokens)


def wrap_process_outputs(original: Callable[..., Any], recorder: Recorder) -> Callable[..., Any]:
    """Record when the API server saw the first and the last output of a request."""

    def process_outputs(self: Any, engine_core_outputs: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            notable = [
                output
                for output in engine_core_outputs
                if output.finish_reason is not None or output.prefill_stats is not None
            ]
            for output in notable:
                _note_output(output, recorder)
        except Exception:
            recorder.fault()
        result = original(self, engine_core_outputs, *args, **kwargs)
        try:
            # A stop string ends a request here while the engine still goes on.
            for identifier in result.reqs_to_abort:
                _note_finished(identifier, "stop", recorder)
        except Exception:
            recorder.fault()
        return result

    return process_outputs


def _note_output(output: Any, recorder: Recorder) -> None:
    known = _engine_requests.get(output.request_id)
    if known is None:
        return
    if output.prefill_stats is not None:
        recorder.record(_OUTPUT_FIRST, *known)
    if output.finish_reason is not None:
        _note_finished(output.request_id, str(output.finish_reason), recorder)


def _note_finished(identifier: str, reason: str, recorder: Recorder) -> None:
    known = _engine_requests.pop(identifier, None)
    if known is not None:
        recorder.record(_OUTPUT_FINISHED, *known, recorder.intern(reason))


def wrap_abort_requests(original: Callable[..., Any], recorder: Recorder) -> Callable[..., Any]:
    """Record that the API server gave requests up."""

    def abort_requests(self: Any, *args: Any, **kwargs: Any) -> Any:
        aborted = original(self, *args, **kwargs)
        try:
            for identifier in aborted:
                known = _engine_requests.pop(identifier, None)
                if known is not None:
                    recorder.record(_ABORTED, *known)
        except Exception:
            recorder.fault()
        return aborted

    return abort_requests


def wrap_propagate_error(original: Callable[..., Any], recorder: Recorder) -> Callable[..., Any]:
    """Record that the engine died under the requests in flight."""

    def propagate_error(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            code = recorder.intern("engine_dead")
            for number, _ in list(_engine_requests.values()):
                recorder.record(_FACT_TEXT, number, _ERROR, code)
            _engine_requests.clear()
        except Exception:
            recorder.fault()
        return original(self, *args, **kwargs)

    return propagate_error


def wrap_streaming_error(original: Callable[..., Any], recorder: Recorder) -> Callable[..., Any]:
    """Record an error after HTTP 200 by the name of its class, never by its text."""

    def create_streaming_error_response(self: Any, *args: Any, **kwargs: Any) -> Any:
        request = current_request.get()
        if request is not None:
            try:
                error = args[0] if args else next(iter(kwargs.values()), None)
                name = type(error).__name__ if isinstance(error, BaseException) else "streaming_error"
                recorder.record(_FACT_TEXT, request.number, _ERROR, recorder.intern(name))
            except Exception:
                recorder.fault()
        return original(self, *args, **kwargs)

    return create_streaming_error_response
