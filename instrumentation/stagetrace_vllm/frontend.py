"""The API server between HTTP and the engine: media, thread pools, outputs."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Sequence
from contextvars import ContextVar
from typing import Any, Final

from stagetrace.inbound import scheme_and_host
from stagetrace.recorder import Recorder
from stagetrace.records import NONE, Fact, JobKind, RecordKind
from stagetrace_vllm.http import PATHS, Loaded, TracedRequest, current_request, left_out
from stagetrace_vllm.reading import (
    answer_id,
    job_kind,
    media_format,
    media_modality,
    media_size,
)

_ITEM_BEGIN = int(RecordKind.ITEM_BEGIN)
_ITEM_END = int(RecordKind.ITEM_END)
_ITEM_INLINE = int(RecordKind.ITEM_INLINE)
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
_current_job: ContextVar[_Job | None] = ContextVar("stagetrace_job", default=None)


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

    __slots__ = ("_function", "_item", "_kind", "_recorder", "_request", "loaded", "number")

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
        self.number = next(request.jobs)
        self.loaded: Loaded = defaultdict(deque)
        self._kind = kind
        index = NONE if item is None else item.index
        recorder.record(_JOB_SUBMITTED, request.number, self.number, self._kind, index)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        record, number = self._recorder.record, self._request.number
        record(_JOB_STARTED, number, self.number)
        request, job = current_request.set(self._request), _current_job.set(self)
        failed = 1
        try:
            result = self._function(*args, **kwargs)
            failed = 0
        finally:
            current_request.reset(request)
            _current_job.reset(job)
            record(_JOB_ENDED, number, self.number, failed)
        if self._kind is _DECODE and self._item is not None:
            _note_media(self._item, result, self._recorder)
        return result


def _note_media(item: _Item, result: Any, recorder: Recorder) -> None:
    try:
        content = getattr(result, "original_bytes", None)
        if not isinstance(content, bytes):
            return
        width, height = media_size(getattr(result, "media", None))
        sides = width << 16 | height if max(width, height) <= _SIDE_MAX else 0
        name = media_format(content)
        form = NONE if name is None else recorder.intern(name)
        recorder.record(_MEDIA_DECODED, item.request.number, item.index, len(content), sides, form)
    except Exception:
        recorder.fault()


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
        media_io = args[0] if args else kwargs.get("media_io")
        item = _begin_item(request, url, media_io, request.loaded, recorder)
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


def wrap_load_from_url(original: Callable[..., Any], recorder: Recorder) -> Callable[..., Any]:
    """Record a media item that a job, or the event loop, loads by itself: all but its fetch is decoding."""

    def load_from_url(self: Any, url: str, *args: Any, **kwargs: Any) -> Any:
        request = current_request.get()
        if request is None:
            return original(self, url, *args, **kwargs)
        job = _current_job.get()
        loaded = request.loaded if job is None else job.loaded
        item = _begin_item(request, url, args[0] if args else kwargs.get("media_io"), loaded, recorder)
        recorder.record(_ITEM_INLINE, request.number, item.index, NONE if job is None else job.number)
        token = _current_item.set(item)
        failed = 1
        try:
            result = original(self, url, *args, **kwargs)
            failed = 0
        finally:
            _current_item.reset(token)
            recorder.record(_ITEM_END, request.number, item.index, failed)
        _note_media(item, result, recorder)
        return result

    return load_from_url


def _begin_item(request: TracedRequest, url: str, media_io: Any, loaded: Loaded, recorder: Recorder) -> _Item:
    item = _Item(request, next(request.items))
    try:
        scheme, host = scheme_and_host(url)
        host_number = recorder.intern(host) if host else NONE
        modality = media_modality(media_io)
        loaded[modality].append(item.index)
        modality_number, scheme_number = recorder.intern(modality), recorder.intern(scheme)
        recorder.record(_ITEM_BEGIN, request.number, item.index, scheme_number, host_number, modality_number)
    except Exception:
        recorder.fault()
    return item


def wrap_get_cached_bytes(original: Callable[..., Any], recorder: Recorder) -> Callable[..., Any]:
    """Record that the media cache held an item which is loaded inline; in a pool, the hop there tells."""

    def get_cached_bytes(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        item = _current_item.get()
        if item is not None and isinstance(result, bytes):
            recorder.record(_MEDIA_CACHED, item.request.number, item.index)
        return result

    return get_cached_bytes


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


def wrap_get_bytes(original: Callable[..., Any], recorder: Recorder) -> Callable[..., Any]:
    """Record the network fetch of a media item that is loaded inline, retries included."""

    def get_bytes(self: Any, *args: Any, **kwargs: Any) -> Any:
        item = _current_item.get()
        if item is None:
            return original(self, *args, **kwargs)
        number, index = item.request.number, item.index
        recorder.record(_FETCH_BEGIN, number, index)
        failed = 1
        try:
            result = original(self, *args, **kwargs)
            failed = 0
        finally:
            recorder.record(_FETCH_END, number, index, item.attempts, failed)
        return result

    return get_bytes


def wrap_get_response(original: Callable[..., Any], _recorder: Recorder) -> Callable[..., Any]:
    """Count the attempts of a fetch."""

    def get_response(self: Any, *args: Any, **kwargs: Any) -> Any:
        item = _current_item.get()
        if item is not None:
            item.attempts += 1
        return original(self, *args, **kwargs)

    return get_response


def wrap_get_cache_missing_items(original: Callable[..., Any], recorder: Recorder) -> Callable[..., Any]:
    """Record which media items the processor's cache held."""

    def get_cache_missing_items(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        request = current_request.get()
        if request is not None:
            try:
                job = _current_job.get()
                loaded = request.loaded if job is None or not job.loaded else job.loaded
                for modality, hits in result[0].items():
                    _note_hits(request, loaded[modality], hits, recorder)
            except Exception:
                recorder.fault()
        return result

    return get_cache_missing_items


def _note_hits(request: TracedRequest, loaded: deque[int], hits: Sequence[bool], recorder: Recorder) -> None:
    """Record hits for the first items not processed yet: they are processed in the order of the prompts."""
    if len(hits) > len(loaded):
        return  # some of them were not loaded but named by the client, and it is not known which
    for hit in hits:
        recorder.record(_PROCESSOR_CACHE, request.number, loaded.popleft(), bool(hit))


# --- to the engine and back ------------------------------------------------------------------------

_ADD_REQUEST: Final = ("prompt", "parent_req", "request_index", "queue")
_engine_requests: dict[str, tuple[int, int]] = {}
"""The engine's id of each request in flight -> the request's number, the id's text number."""


def wrap_output_processor_add_request(original: Callable[..., Any], recorder: Recorder) -> Callable[..., Any]:
    """Join a request with the engine's id of it."""

    def add_request(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        traced, unsampled = current_request.get(), left_out.get()
        if traced is None and unsampled is not None:
            try:
                recorder.record(_ENGINE_REQUEST, unsampled, recorder.define(request.request_id))
            except Exception:
                recorder.fault()
        elif traced is not None:
            try:
                named = dict(zip(_ADD_REQUEST, args, strict=False)) | kwargs
                _note_engine_request(traced, request, named, recorder)
            except Exception:
                recorder.fault()
        return original(self, request, *args, **kwargs)

    return add_request


def _note_engine_request(
    traced: TracedRequest, request: Any, named: dict[str, Any], recorder: Recorder
) -> None:
    identifier, number = request.request_id, traced.number
    if identifier in _engine_requests:
        return
    parent, index = named.get("parent_req"), named.get("request_index", 0)
    if not index:
        # All answers to a prompt are added before those to the next one.
        traced.prompt += 1
    prompt = traced.prompt
    first_choice = prompt * (1 if parent is None else parent.n)
    text = recorder.define(identifier)
    _engine_requests[identifier] = (number, text)
    recorder.record(_ENGINE_REQUEST, number, text, first_choice + index, prompt)
    if request.sampling_params is not None:
        traced.delivery.watch(named.get("queue"), first_choice, recorder)
    external = None if prompt or index else answer_id(request.external_req_id, PATHS[traced.path])
    if external is not None:
        recorder.record(_FACT_TEXT, number, _EXTERNAL_ID, recorder.define(external))
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
    """Record an error after HTTP 200 by the name of its class, or else of its type, never by its text."""

    def create_streaming_error_response(self: Any, *args: Any, **kwargs: Any) -> Any:
        request = current_request.get()
        if request is not None:
            try:
                error = args[0] if args else next(iter(kwargs.values()), None)
                known = isinstance(error, BaseException)
                name = type(error).__name__ if known else kwargs.get("err_type", "streaming_error")
                recorder.record(_FACT_TEXT, request.number, _ERROR, recorder.intern(name))
            except Exception:
                recorder.fault()
        return original(self, *args, **kwargs)

    return create_streaming_error_response
