"""What a record is: 32 bytes, written once, never moved.

A record is ``(time_ns, key, a, b, c, d, kind, magic)``.  ``magic`` is the last
field in memory, so a record that was cut off while being written is seen as
such.  ``key`` says whom the record is about, ``a`` to ``d`` depend on the kind;
the comment behind each kind gives their meaning.  What is recorded *by change*
holds until it is recorded again, and a STEP that would say the same as the one
before it is left out.  Strings are defined once, in
``DEFINE`` records of 20 bytes each, and referred to by number.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import Final

RECORD: Final = struct.Struct("<qIIIIIHH")
DEFINE: Final = struct.Struct("<IHH20sHH")
RECORD_BYTES: Final = RECORD.size
MAGIC: Final = 0x5354
NONE: Final = 0xFFFFFFFF
"""An unsigned field that holds nothing."""

TEXT_PART_BYTES: Final = 20
TEXT_MAX_BYTES: Final = 512
"""Longer strings are cut: names and ids are short, and headers are hostile input."""


class RecordKind(IntEnum):
    """Kinds of records; the tens tell the process role that writes them."""

    DEFINE = 1  # a string: number, part, length of the part, bytes
    PROCESS_FACT = 2  # a fact, b text
    HOOK_OFF = 3  # b text: a hook point that is not as known
    MISUSED = 4  # a: Misuse: what a server asked the recording API for in vain
    OWN_COST = 10  # a: steps, b, c: nanoseconds of them for recording (low, high), d: microseconds in all

    # The API server's; the key is the request's number in its process
    RECEIVED = 20
    BODY_COMPLETE = 21  # a, b: bytes (low, high)
    RESPONSE_STARTED = 22  # a: status, b: 1 when it streams
    FIRST_USEFUL = 23  # a: tokens before it that made none, NONE when all comes at once, b: choice
    LAST_BYTE = 24
    DISCONNECTED = 25
    ENDED = 26  # a: 1 when cancelled, 2 when the application raised
    FACT_NUMBER = 27  # a: fact, b, c: value (low, high)
    FACT_TEXT = 28  # a: fact, b: text
    ITEM_BEGIN = 29  # a: item, b: text: scheme, c: text: host, d: text: modality
    ITEM_END = 30  # a: item, b: 1 when failed
    FETCH_BEGIN = 31  # a: item
    FETCH_END = 32  # a: item, b: attempts, c: 1 when failed
    JOB_SUBMITTED = 33  # a: job, b: JobKind, c: item
    JOB_STARTED = 34  # a: job
    JOB_ENDED = 35  # a: job, b: 1 when failed
    MEDIA_DECODED = 36  # a: item, b: bytes, c: width << 16 | height, d: text: format
    PROCESSOR_CACHE = 37  # a: item, b: 1 when hit
    ENGINE_REQUEST = 38  # a: text: the engine's id of the request, b: choice, c: prompt
    OUTPUT_FIRST = 39  # a: text: the engine's id
    OUTPUT_FINISHED = 40  # a: text: the engine's id, b: text: finish reason
    ABORTED = 41  # a: text: the engine's id
    MEDIA_CACHED = 42  # a: item that vLLM's media cache held
    LOOP_LAG = 43  # key: 0; time: when the event loop was due, a, b: nanoseconds it was late (low, high)
    ITEM_INLINE = 44  # a: item, b: job that loads it by itself, NONE: the event loop does
    STAGE_BEGIN = (
        45  # a: part, b: StageCode, c: item; of a part that has begun: it is in this stage from now on
    )
    STAGE_END = 46  # a: part
    ITEM_FACT = 47  # a: item, b: ItemFact, c: value or text, d: value (high)
    RESUMED = 48  # a: text: the id of a request; what follows of this number belongs to that one
    NOT_SAMPLED = 50  # instead of RECEIVED; no other record than ENGINE_REQUEST follows

    # The engine's; the key is the text number of the request's id, or the step where it says so
    HELD = 60  # a: prompt tokens, b: maximum output tokens, c: media items
    ENGINE_ITEM = 61  # a: item, b: text: identifier, c: embeddings, d: position of its last prompt token
    ADDED = 62
    STEP = 63  # key: step, a: tokens, b: requests | reasons << 16, c: running | decodes << 16, d: waiting
    HEAD = 64  # key: step, a: request at the head of the queue; by change
    MEMBER = 65  # a: step, b: tokens (0: not in it), c: tokens computed before; by change
    STEP_ITEM = 66  # key: step, a: request, b: item that is encoded in it
    BLOCKED = 67  # a: step, b: reason of its own (0: no longer); by change
    PREEMPTED = 68  # a: step, b: tokens that are to be computed again
    STEP_DONE = 69  # key: step, a, b: nanoseconds since it was scheduled (low, high)
    FIRST_TOKEN = 70  # a: step, also of the only output of a pooling request
    FREED = 71  # a: text: status, b: output tokens
    PAUSE = 72  # a: 1 when the engine is paused, 0 when it goes on
    FRAME = 80  # key: step; from here on all that is recorded by change is recorded again
    ALIVE = 81  # a: 1 when it has a seat; a request that the scheduler holds, behind FRAME

    # The worker's; the key is the step
    STEP_BEGIN = 90  # a: number of the engine's process
    ENCODE_BEGIN = 91  # a: number of the engine's process, b: 1 when the host only launches it
    ENCODE_END = 92  # a: number of the engine's process
    ENCODE_DEVICE = 93  # a: number of the engine's process, b, c: nanoseconds its device took (low, high)

    @property
    def role(self) -> str:
        """The process role that writes this kind of record."""
        if self < RecordKind.RECEIVED:
            return "process"
        if self < RecordKind.HELD:
            return "api"
        return "engine" if self < RecordKind.STEP_BEGIN else "worker"


class StopReason(IntEnum):
    """Why a process did not record for a time."""

    NONE = 0
    LOST = 1
    """There was no room, or no folder; these records are counted as dropped."""
    OFF = 2
    """The file OFF lay in the spool folder."""
    FAULTS = 3
    """Too many internal faults within a short time."""
    COST = 4
    """Recording took too much of the busy thread's time."""


class JobKind(IntEnum):
    """What a job in one of the API server's thread pools does."""

    OTHER = 0
    TEMPLATE = 1
    TOKENIZE = 2
    PROCESS = 3
    DECODE = 4
    RENDER = 5
    """A prompt from beginning to end: its media, template, tokens, multimodal processor."""


class Fact(IntEnum):
    """Facts of a request or a process that have no record kind of their own."""

    TRACEPARENT = 1
    EXTERNAL_ID = 2
    PHASE = 3
    LABEL = 4
    ARM = 5
    INTENDED_UNIX_NS = 6
    MAX_TOKENS = 7
    ERROR = 8
    MODEL = 9
    PATH = 10
    VERSION = 11
    PROMPT_TOKENS = 20
    CACHED_TOKENS = 21
    OUTPUT_TOKENS = 22
    MEDIA_ITEMS = 23
    STATUS = 24
    STREAM = 25
    FINISH_REASON = 26
    SERVICE = 27


class ReasonCode(IntEnum):
    """Codes of :class:`stagetrace.stages.Reason` in records; 0 is none."""

    NONE = 0
    STEP = 1
    SEATS = 2
    TOKENS = 3
    KV = 4
    ENCODER_BUDGET = 5
    ENCODER_CACHE = 6
    REMOTE_EMBEDDING = 7
    REMOTE_KV = 8
    GRAMMAR = 9
    LORA = 10
    PREEMPTING = 11
    PAUSED = 12
    DEFERRED = 13
    UNKNOWN = 14


class StageCode(IntEnum):
    """Codes of :class:`stagetrace.stages.Stage` in records."""

    RECEIVE = 1
    RETRIEVAL = 2
    MEDIA_DECODE_WAIT = 3
    MEDIA_DECODE = 4
    PREPROCESS_WAIT = 5
    PREPROCESS = 6
    HANDOFF = 7
    PREFILL_WAIT = 8
    PREFILL = 9
    ENCODE_WAIT = 10
    ENCODE = 11
    EMBEDDING_TRANSFER_WAIT = 12
    EMBEDDING_TRANSFER = 13
    KV_TRANSFER_WAIT = 14
    KV_TRANSFER = 15
    DECODE_WAIT = 16
    DECODE = 17
    RESPOND = 18


class ItemFact(IntEnum):
    """Facts of a media item that a server tells through the recording API; names are columns."""

    MODALITY = 1
    FORMAT = 2
    BYTES = 3
    WIDTH = 4
    HEIGHT = 5
    TOKENS = 6
    SCHEME = 7
    HOST = 8
    HASH = 9
    FETCH_ATTEMPTS = 10
    MEDIA_CACHE = 11
    PROCESSOR_CACHE = 12
    ENCODER_CACHE = 13


ITEM_NUMBER_ENDS: Final = {
    ItemFact.BYTES: 1 << 40,
    ItemFact.WIDTH: 1 << 24,
    ItemFact.HEIGHT: 1 << 24,
    ItemFact.TOKENS: 1 << 32,
    ItemFact.FETCH_ATTEMPTS: 1 << 16,
}
"""Facts of items that are numbers, and what none of them reaches, so that sums and products stay numbers."""


class Misuse(IntEnum):
    """What a server asked the recording API for in vain; the name is the reason it is counted under."""

    UNKNOWN_FACT = 1
    """No such fact, or a value of another type."""
    UNKNOWN_STAGE = 2
    """No stage that can be recorded so."""
    UNKNOWN_ITEM = 3
    """No place of a media item."""
    UNKNOWN_OUTCOME = 4
    """No outcome that a server can tell, or not where the request was received."""
    UNKNOWN_CARRIER = 5
    """What came from another process names no request."""
    UNKNOWN_HEADERS = 6
    """What was given for headers holds none."""
    FAILED_CALLBACK = 8
    """A function that the server gave to judge its output has raised."""
    CALL_OUTSIDE_A_REQUEST = 7
    """No request was known where something of it was to be recorded."""
