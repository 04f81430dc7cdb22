"""Every attribute name that leaves through OpenTelemetry, in one place, with what it means.

Names of others follow the semantic conventions: ``gen_ai.*`` those of generative AI 0.1.0,
``http.*``, ``error.*``, ``service.*`` and the rest those of OpenTelemetry 1.44.  They are
written out, because the package that holds them calls them private and moves them.

``docs/attributes.md`` is made from the tables (``tools/write_attributes.py``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

Value = str | bool | int | float | tuple[str, ...]
"""What an attribute can hold."""


@dataclass(frozen=True, slots=True)
class Attribute:
    """What an attribute is.

    Attributes:
        type: Its Python type; ``tuple`` is an array of texts.
        meaning: What it says, and when it is absent.
        example: A value.
        unit: In UCUM, or empty.
    """

    type: type[Value]
    meaning: str
    example: Value
    unit: str = ""


PROVIDER: Final = "vllm"
"""``gen_ai.provider.name``, and the service's name where nobody gave another."""

DISTRO: Final = "stagetrace"
"""Name of the instrumentation scope and of the distribution."""

FIRST_USEFUL_EVENT: Final = "stagetrace.first_useful_byte"
"""Event of a request's span: the end of the TTFT horizon."""

STEP_SPAN: Final = "step"
ENCODER_SPAN: Final = "step.encoder"
"""Names of the spans of an engine's steps."""

OTHER_ERROR: Final = "_OTHER"
"""``error.type`` of what has no name, or one too many."""

OPERATIONS: Final = {
    "/v1/chat/completions": "chat",
    "/v1/chat/completions/batch": "chat",
    "/v1/messages": "chat",
    "/v1/responses": "chat",
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
    "/v2/embed": "embeddings",
    "/pooling": "pooling",
    "/classify": "classify",
    "/score": "score",
    "/v1/score": "score",
    "/rerank": "rerank",
    "/v1/rerank": "rerank",
    "/v2/rerank": "rerank",
}
"""``gen_ai.operation.name`` by path; the first three values are the conventions', the rest ours."""

FINISH_REASONS: Final = {
    "length_capped": "length",
    "stopped": "stop",
    "abort": "error",
    "aborted": "error",
}
"""``gen_ai.response.finish_reasons`` by the engine's own words; others are passed on."""

# --- resource ---

SERVICE_NAME: Final = "service.name"
SERVICE_INSTANCE_ID: Final = "service.instance.id"
SERVICE_VERSION: Final = "service.version"
HOST_NAME: Final = "host.name"
PROCESS_PID: Final = "process.pid"
DISTRO_NAME: Final = "telemetry.distro.name"
DISTRO_VERSION: Final = "telemetry.distro.version"
ROLE: Final = "stagetrace.role"

RESOURCE: Final = {
    SERVICE_NAME: Attribute(str, "`OTEL_SERVICE_NAME` wins", PROVIDER),
    SERVICE_INSTANCE_ID: Attribute(str, "the process, by the random name in its segments", "5f0c2e91d4a7"),
    SERVICE_VERSION: Attribute(str, "version of vLLM, where it has told", "0.32.0"),
    HOST_NAME: Attribute(str, "host the process ran on", "gpu-17"),
    PROCESS_PID: Attribute(int, "its id, in its own namespace", 4711),
    DISTRO_NAME: Attribute(str, "always the same", DISTRO),
    DISTRO_VERSION: Attribute(str, "version of stagetrace that recorded", "0.1.0"),
    ROLE: Attribute(str, "what the process does: `api`, `engine`", "engine"),
}

# --- span of a request ---

OPERATION_NAME: Final = "gen_ai.operation.name"
PROVIDER_NAME: Final = "gen_ai.provider.name"
REQUEST_MODEL: Final = "gen_ai.request.model"
REQUEST_MAX_TOKENS: Final = "gen_ai.request.max_tokens"
REQUEST_STREAM: Final = "gen_ai.request.stream"
RESPONSE_ID: Final = "gen_ai.response.id"
RESPONSE_FINISH_REASONS: Final = "gen_ai.response.finish_reasons"
INPUT_TOKENS: Final = "gen_ai.usage.input_tokens"
IMAGE_INPUT_TOKENS: Final = "gen_ai.usage.image.input_tokens"
CACHED_INPUT_TOKENS: Final = "gen_ai.usage.cache_read.input_tokens"
OUTPUT_TOKENS: Final = "gen_ai.usage.output_tokens"
HTTP_METHOD: Final = "http.request.method"
HTTP_ROUTE: Final = "http.route"
URL_PATH: Final = "url.path"
HTTP_STATUS: Final = "http.response.status_code"
ERROR_TYPE: Final = "error.type"
REQUEST_ID: Final = "stagetrace.request.id"
PHASE: Final = "stagetrace.phase"
LABEL: Final = "stagetrace.label"
ARM: Final = "stagetrace.arm"
INTENDED: Final = "stagetrace.intended_unix_ns"
CLASS: Final = "stagetrace.class"
OUTCOME: Final = "stagetrace.outcome"
ENDED_STAGE: Final = "stagetrace.ended_stage"
TTFT_DURATION: Final = "stagetrace.ttft.duration"
TTFT_WAITING: Final = "stagetrace.ttft.waiting"
COMPLETION_DURATION: Final = "stagetrace.completion.duration"
COMPLETION_WAITING: Final = "stagetrace.completion.waiting"
MEDIA_ITEMS: Final = "stagetrace.media.items"
MEDIA_BYTES: Final = "stagetrace.media.bytes"
MEDIA_PIXELS: Final = "stagetrace.media.pixels"

REQUEST_SPAN: Final = {
    OPERATION_NAME: Attribute(str, "what was asked for, by path", "chat"),
    PROVIDER_NAME: Attribute(str, "`vllm`, or the service that records through the API", PROVIDER),
    REQUEST_MODEL: Attribute(str, "served model, once the engine has the request", "qwen"),
    REQUEST_MAX_TOKENS: Attribute(int, "how many tokens the answer may have", 128, "{token}"),
    REQUEST_STREAM: Attribute(bool, "only where the answer was streamed", example=True),
    RESPONSE_ID: Attribute(str, "the id in the answer", "chatcmpl-8d1f"),
    RESPONSE_FINISH_REASONS: Attribute(
        tuple, "an entry an answer; `error` for one that broke off", ("stop",)
    ),
    INPUT_TOKENS: Attribute(int, "tokens of all prompts, cached ones included", 230, "{token}"),
    IMAGE_INPUT_TOKENS: Attribute(int, "those of them that stand for images", 208, "{token}"),
    CACHED_INPUT_TOKENS: Attribute(int, "those of them that the prefix cache held", 16, "{token}"),
    OUTPUT_TOKENS: Attribute(int, "tokens of all answers", 16, "{token}"),
    HTTP_METHOD: Attribute(str, "always `POST`; with a route only", "POST"),
    HTTP_ROUTE: Attribute(str, "path, when it is one of vLLM's", "/v1/chat/completions"),
    URL_PATH: Attribute(str, "path, when it is another service's", "/caption"),
    HTTP_STATUS: Attribute(int, "status of the answer, where there was one", 200),
    ERROR_TYPE: Attribute(
        str, "why it did not end well: a status from 400, `cancelled`, `lost`, or a name", "engine_dead"
    ),
    REQUEST_ID: Attribute(str, "as in the dataset: process and number", "5f0c2e91d4a7-12"),
    PHASE: Attribute(str, "phase of an experiment, from the client", "mixture"),
    LABEL: Attribute(str, "the client's own class of the request", "image/short"),
    ARM: Attribute(str, "arm of an experiment, from the client", "split"),
    INTENDED: Attribute(int, "when the client meant to send it, since the epoch", 1767225600000000000, "ns"),
    CLASS: Attribute(str, "traffic class, by the rules in force when it was exported", "image/short"),
    OUTCOME: Attribute(str, "`ok`, `error`, `cancelled`, `lost`", "ok"),
    ENDED_STAGE: Attribute(str, "stage in which it failed or broke off", "prefill.wait"),
    TTFT_DURATION: Attribute(float, "from receipt to the first useful byte", 0.4149, "s"),
    TTFT_WAITING: Attribute(float, "time in waits before the first useful byte", 0.2468, "s"),
    COMPLETION_DURATION: Attribute(float, "from receipt to the last byte", 0.8913, "s"),
    COMPLETION_WAITING: Attribute(float, "time in waits before the last byte", 0.251, "s"),
    MEDIA_ITEMS: Attribute(int, "media items", 1, "{item}"),
    MEDIA_BYTES: Attribute(int, "their bytes, where all are known", 24310, "By"),
    MEDIA_PIXELS: Attribute(int, "their pixels, where all are known", 76800, "{pixel}"),
}

# --- span of a stage ---

STAGE: Final = "stagetrace.stage"
KIND: Final = "stagetrace.kind"
REASON: Final = "stagetrace.reason"
HOLDER: Final = "stagetrace.holder"
HORIZON: Final = "stagetrace.horizon"
OCCURRENCE: Final = "stagetrace.occurrence"
ITEM: Final = "stagetrace.item"
FIRST_STEP: Final = "stagetrace.step.first"
LAST_STEP: Final = "stagetrace.step.last"
RECOMPUTE: Final = "stagetrace.recompute"

STAGE_SPAN: Final = {
    STAGE: Attribute(str, "where the request was; also the span's name", "prefill.wait"),
    KIND: Attribute(str, "`work`, `wait`, `transfer`, `unattributed`", "wait"),
    REASON: Attribute(str, "why it waited in the engine", "step"),
    HOLDER: Attribute(str, "the engine's id of another request at the head of the queue", "chatcmpl-8d1f"),
    HORIZON: Attribute(str, "`both`, or `completion` behind what both have in common", "both"),
    OCCURRENCE: Attribute(int, "the first, second ... stay in this stage, from 1", 1),
    ITEM: Attribute(int, "place of the media item in the request, from 0", 0),
    FIRST_STEP: Attribute(int, "first step of the engine that it covers", 901),
    LAST_STEP: Attribute(int, "last step of the engine that it covers", 904),
    RECOMPUTE: Attribute(bool, "only where work was done again after a preemption", example=True),
}

# --- spans of an engine's step, with --steps ---

STEP_NUMBER: Final = "stagetrace.step.number"
STEP_TOKENS: Final = "stagetrace.step.tokens"
STEP_REQUESTS: Final = "stagetrace.step.requests"
STEP_DECODES: Final = "stagetrace.step.decodes"
STEP_ENCODER_ITEMS: Final = "stagetrace.step.encoder_items"
STEP_RUNNING: Final = "stagetrace.step.running"
STEP_WAITING: Final = "stagetrace.step.waiting"
STEP_SCHEDULED: Final = "stagetrace.step.scheduled_unix_ns"

STEP: Final = {
    STEP_NUMBER: Attribute(int, "steps of an engine are numbered from 1 without gaps", 901),
    STEP_TOKENS: Attribute(int, "tokens in it", 230, "{token}"),
    STEP_REQUESTS: Attribute(int, "requests with tokens in it", 4, "{request}"),
    STEP_DECODES: Attribute(int, "those of them with exactly one", 3, "{request}"),
    STEP_ENCODER_ITEMS: Attribute(int, "media items encoded in it", 1, "{item}"),
    STEP_RUNNING: Attribute(int, "requests that held a seat", 4, "{request}"),
    STEP_WAITING: Attribute(int, "requests in the queue after scheduling", 2, "{request}"),
    REASON: Attribute(str, "why those stayed out", "seats"),
    STEP_SCHEDULED: Attribute(int, "when the scheduler began to compose it", 1767225600000000000, "ns"),
}
