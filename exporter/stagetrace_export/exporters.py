"""Which of OpenTelemetry's exporters takes the spans, and whether it did.

The SDK's exporters read their own variables (``OTEL_EXPORTER_OTLP_ENDPOINT``, ``_HEADERS``,
``_COMPRESSION``, ``_TIMEOUT``, ``_CERTIFICATE`` and the ``_TRACES_`` ones) and retry by
themselves, with back-off, until the timeout.
"""

from __future__ import annotations

import base64
import json
import logging
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from importlib.metadata import entry_points
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Final, Self
from urllib.parse import unquote

from google.protobuf.json_format import MessageToDict  # type: ignore[import-untyped]
from opentelemetry.environment_variables import OTEL_TRACES_EXPORTER
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.environment_variables import (
    OTEL_BSP_MAX_EXPORT_BATCH_SIZE,
    OTEL_EXPORTER_OTLP_ENDPOINT,
    OTEL_EXPORTER_OTLP_HEADERS,
    OTEL_EXPORTER_OTLP_PROTOCOL,
    OTEL_EXPORTER_OTLP_TRACES_ENDPOINT,
    OTEL_EXPORTER_OTLP_TRACES_PROTOCOL,
)
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from stagetrace.errors import MissingExtraError, UsageError

BATCH_SPANS: Final = 512
"""Spans in one message to a receiver, where ``OTEL_BSP_MAX_EXPORT_BATCH_SIZE`` says nothing else."""

FILE_PREFIX: Final = "file:"
NONE: Final = "none"
OTLP: Final = "otlp"

_DIGITS: Final = 9
"""Digits of a number in a variable at most."""

_GROUP: Final = "opentelemetry_traces_exporter"
_PROTOCOLS: Final = {
    "grpc": ("otlp_proto_grpc", "http://localhost:4317"),
    "http/protobuf": ("otlp_proto_http", "http://localhost:4318"),
}
_GIVEN_UP: Final = "due to timeout, max retries or shutdown."
"""How the exporter over HTTP ends when the time for retries is over: less than why there were any."""

_CAUSES: Final = (
    re.compile(r"[Ee]rror details: (.+)"),
    re.compile(r"Transient error (.+) encountered while exporting"),
)
"""Where the SDK's exporters have the cause in what they say."""

_IDS: Final = ("traceId", "spanId", "parentSpanId")


class Delivery:
    """Hands spans to an exporter in batches, and says whether it took them; a context manager.

    Args:
        exporter: One of OpenTelemetry's; None takes everything and keeps nothing.
        target: What to call it when it does not answer.
        batch_spans: Spans in a batch at most.

    Attributes:
        spans: Spans that were taken.
    """

    def __init__(
        self,
        exporter: SpanExporter | None,
        target: str,
        batch_spans: int = BATCH_SPANS,
        remarks: _Remarks | None = None,
    ) -> None:
        self.target = target
        self.spans = 0
        self._exporter = exporter
        self._batch_spans = batch_spans
        self._remarks = _Remarks() if remarks is None else remarks

    def __enter__(self) -> Self:
        self._remarks.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # What it has taken is out; how it ends is nobody's concern.
        with suppress(Exception):
            if self._exporter is not None:
                self._exporter.shutdown()
        self._remarks.__exit__()

    def export(self, spans: Iterable[ReadableSpan]) -> bool:
        """Hand over spans; stops at the first batch that is not taken, after the exporter's own retries.

        Returns:
            Whether all were taken.  What is sent again has the same ids.
        """
        remaining = iter(spans)
        while batch := list(islice(remaining, self._batch_spans)):
            if not self._takes(batch):
                return False
            self.spans += len(batch)
        return True

    def _takes(self, batch: Sequence[ReadableSpan]) -> bool:
        if self._exporter is None:
            return True
        try:
            return self._exporter.export(batch) is SpanExportResult.SUCCESS
        except Exception as error:  # noqa: BLE001 - whatever an exporter raises, it did not take the batch
            self._remarks.last = without_secrets(f"{type(error).__name__}: {error}")
            return False

    @property
    def reason(self) -> str:
        """Why the last batch was not taken, in one line, in the words of who knew best.

        The SDK says the same only once in a while, so what it said before still holds.
        """
        text = " ".join(self._remarks.last.split())
        if not text or text.endswith(_GIVEN_UP):
            return "no connection, or no answer in time"
        found = next((found for cause in _CAUSES if (found := cause.search(text))), None)
        return text if found is None else found[1]

    def remark(self) -> str:
        """Return what an exporter, of spans or of metrics, has said since the last call; empty if nothing."""
        is_fresh, self._remarks.is_fresh = self._remarks.is_fresh, False
        return self.reason if is_fresh else ""


class _Remarks(logging.Handler):
    """Keeps the last thing that an exporter said, which would go to the terminal otherwise."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.last = ""
        self.is_fresh = False
        self._loggers = [logging.getLogger(name) for name in ("opentelemetry", "urllib3")]

    def __enter__(self) -> Self:
        for logger in self._loggers:
            logger.addHandler(self)
            logger.propagate = False
        return self

    def __exit__(self, *_: object) -> None:
        for logger in self._loggers:
            logger.removeHandler(self)
            logger.propagate = True

    def emit(self, record: logging.LogRecord) -> None:
        text = without_secrets(record.getMessage())
        self.is_fresh = True
        if not (self.last and text.endswith(_GIVEN_UP)):
            self.last = text


_ENDPOINTS: Final = re.compile(r"OTEL_EXPORTER_OTLP_([A-Z]+_)?ENDPOINT")
_HEADERS: Final = re.compile(r"OTEL_EXPORTER_OTLP_([A-Z]+_)?HEADERS")
_USER: Final = re.compile(r"^([a-z+]+://)?[^/?#]*@", re.IGNORECASE)
_SECRET_LENGTH: Final = 4
"""What is shorter is a word of its own too often."""


def without_secrets(text: str) -> str:
    """Take out of a text what the variables say of headers, and of the user and the query of an endpoint."""
    if text.startswith("Header format invalid"):
        # The SDK says it with the whole header.
        return f"{OTEL_EXPORTER_OTLP_HEADERS} cannot be read: name=value, URL encoded, with commas between"
    for secret in sorted(_secrets(), key=len, reverse=True):
        text = text.replace(secret, "***") if len(secret) >= _SECRET_LENGTH else text
    return text


def _secrets() -> Iterator[str]:
    for name, value in os.environ.items():
        for header in value.split(",") if _HEADERS.fullmatch(name) else ():
            told = (header.partition("=")[2] or header).strip()
            yield from (told, unquote(told))
        if _ENDPOINTS.fullmatch(name):
            found = _USER.match(value)
            yield from ("" if found is None else found[0].rpartition("://")[2], value.partition("?")[2])


def _shown(endpoint: str) -> str:
    """Return an endpoint without its user, query and fragment."""
    return re.split(r"[?#]", _USER.sub(r"\1", endpoint))[0]


def exporter_name(to: str | None) -> str:
    """Return the name of the exporter that takes the spans: as asked for, by the variable, or ``otlp``."""
    return to or os.environ.get(OTEL_TRACES_EXPORTER, "").strip() or OTLP


def open_delivery(to: str | None, *, append: bool = False, force: bool = False) -> Delivery:
    """Make what delivers spans.

    Args:
        to: ``otlp``, ``console``, ``none``, ``file:PATH``, or any other exporter that is installed
            under the group ``opentelemetry_traces_exporter``; None takes ``OTEL_TRACES_EXPORTER``.
        append: A file may exist, and is continued.
        force: A file may exist, and is replaced.

    Raises:
        UsageError: There is no such exporter, its settings are wrong, or the file exists.
        MissingExtraError: Its package is not installed.
    """
    name = exporter_name(to)
    batch_spans = _batch_spans()
    if name == NONE:
        return Delivery(None, NONE, batch_spans)
    if name.startswith(FILE_PREFIX):
        path = Path(name.removeprefix(FILE_PREFIX))
        return Delivery(_file_exporter(path, append=append, force=force), str(path), batch_spans)
    target = name
    if name == OTLP:
        protocol = otlp_protocol(OTEL_EXPORTER_OTLP_TRACES_PROTOCOL)
        name, endpoint = _PROTOCOLS[protocol]
        told = os.environ.get(OTEL_EXPORTER_OTLP_TRACES_ENDPOINT) or os.environ.get(
            OTEL_EXPORTER_OTLP_ENDPOINT
        )
        target = _shown(told or endpoint)
    # It reads its variables now, and has its say on them.
    with _Remarks() as remarks:
        exporter = _load(name)
    return Delivery(exporter, target, batch_spans, remarks)


def _batch_spans() -> int:
    text = os.environ.get(OTEL_BSP_MAX_EXPORT_BATCH_SIZE, "").strip() or str(BATCH_SPANS)
    if not text.isdecimal() or len(text) > _DIGITS or not int(text):
        raise UsageError(f"{OTEL_BSP_MAX_EXPORT_BATCH_SIZE}={text}: no number of spans", hint="as in 512")
    return int(text)


def otlp_protocol(own: str) -> str:
    """Return the protocol for a signal: ``grpc`` or ``http/protobuf``.

    Args:
        own: The signal's own variable, which wins over the one for all signals.

    Raises:
        UsageError: Another protocol is asked for.
    """
    for variable in (own, OTEL_EXPORTER_OTLP_PROTOCOL):
        protocol = os.environ.get(variable, "").strip()
        if protocol and protocol not in _PROTOCOLS:
            raise UsageError(f"{variable}={protocol}: unknown protocol", hint=" or ".join(_PROTOCOLS))
        if protocol:
            return protocol
    return "grpc"


def _load(name: str) -> SpanExporter:
    """Load an exporter by the name under which its package registers it.

    Raises:
        UsageError: There is none, or it does not accept its settings.
        MissingExtraError: A package that it needs is not installed.
    """
    found = next(iter(entry_points(group=_GROUP, name=name)), None)
    if found is None and name.startswith("otlp_"):
        raise MissingExtraError(
            f"the exporter {name} is not installed", hint="pip install 'stagetrace[otlp]'"
        )
    if found is None:
        hint = "otlp, console, none or file:PATH"
        raise UsageError(f"no exporter {name!r}", hint=hint)
    try:
        exporter: SpanExporter = found.load()()
    except ImportError as error:
        raise MissingExtraError(f"the exporter {name} cannot be loaded: {error}") from error
    except Exception as error:
        hint = "look at the variables that begin with OTEL_EXPORTER_OTLP"
        told = without_secrets(str(error))
        raise UsageError(f"the exporter {name} cannot be set up: {told}", hint=hint) from error
    return exporter


# --- OTLP as JSON lines in a file ---


class FileExporter(SpanExporter):
    """Writes a line of OTLP JSON for every batch, as the OTLP file exporter specification has it.

    Args:
        file: Where to write.
    """

    def __init__(self, file: IO[str]) -> None:
        self._file = file

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Write a batch as one line."""
        line = MessageToDict(encode_spans(spans), use_integers_for_enums=True)
        for each in _with_ids(line):
            each.update({name: base64.b64decode(each[name]).hex() for name in _IDS if name in each})
        try:
            self._file.write(json.dumps(line, separators=(",", ":"), ensure_ascii=False) + "\n")
            self._file.flush()
        except OSError as error:
            logging.getLogger("opentelemetry").error("%s", error.strerror)  # noqa: TRY400 - one line
            return SpanExportResult.FAILURE
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        """Close the file."""
        self._file.close()


def _with_ids(request: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Find what has ids, which OTLP wants in hexadecimal digits where protobuf's JSON has base64."""
    for resource in request.get("resourceSpans", ()):
        for scope in resource.get("scopeSpans", ()):
            for span in scope.get("spans", ()):
                yield span
                yield from span.get("links", ())


def _file_exporter(path: Path, *, append: bool, force: bool) -> FileExporter:
    mode = "a" if append else ("w" if force else "x")
    try:
        return FileExporter(path.open(mode, encoding="utf-8"))
    except FileExistsError as error:
        raise UsageError(f"{path} exists", hint="name another file, or use --force") from error
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}", hint="name another file") from error
