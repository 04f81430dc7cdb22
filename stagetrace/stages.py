"""The stage model: where a request can be, and why it waits.

A request has two horizons, both partitioned: from receipt to the first useful
byte handed to the transport (time to first token, ``ttft``) and from receipt to
the last byte (``completion``).  At every instant it is in exactly one stage.
"""

from __future__ import annotations

from enum import StrEnum


class Kind(StrEnum):
    """What a request does in a stage."""

    WORK = "work"
    WAIT = "wait"
    TRANSFER = "transfer"
    UNATTRIBUTED = "unattributed"


class Horizon(StrEnum):
    """Which of the two spans of time of a request."""

    TTFT = "ttft"
    COMPLETION = "completion"


class Stage(StrEnum):
    """Where a request is, in the order in which a request usually meets them."""

    RECEIVE = "receive"
    """Request in, until its first job is submitted or its first media item starts."""
    RETRIEVAL = "retrieval"
    """The network fetch of a media item itself, with its retries; no pool queue."""
    MEDIA_DECODE_WAIT = "media_decode.wait"
    """Everything of a media item that is neither fetch nor decoding."""
    MEDIA_DECODE = "media_decode"
    """Base64 and image decoding of a media item."""
    PREPROCESS_WAIT = "preprocess.wait"
    """Queue for the chat template, the tokenizer or the multimodal processor."""
    PREPROCESS = "preprocess"
    """Chat template, tokenization, multimodal processor."""
    HANDOFF = "handoff"
    """Last preprocessing job done, until the engine's input thread holds the request."""
    PREFILL_WAIT = "prefill.wait"
    """Runnable, no token of it in the current step, before its first token."""
    ENCODE_WAIT = "encode.wait"
    """The scheduler tried it, and the encoder budget or the encoder cache refused it."""
    ENCODE = "encode"
    """The encoder part of a step that encodes items of it; shared."""
    EMBEDDING_TRANSFER_WAIT = "embedding_transfer.wait"
    """Waiting for the embedding of a media item from another server."""
    EMBEDDING_TRANSFER = "embedding_transfer"
    """Moving an embedding between servers."""
    PREFILL = "prefill"
    """The rest of a step that holds prompt tokens of it; shared."""
    KV_TRANSFER_WAIT = "kv_transfer.wait"
    """Waiting for KV state from another server."""
    KV_TRANSFER = "kv_transfer"
    """Moving KV state between servers."""
    DECODE_WAIT = "decode.wait"
    """After the first token, not in the current step."""
    DECODE = "decode"
    """A step that holds a decoding token of it; shared."""
    RESPOND = "respond"
    """The step with the token is done, until its bytes are handed to the transport."""
    UNATTRIBUTED = "unattributed"
    """Records are missing or contradict each other."""

    @property
    def kind(self) -> Kind:
        """Work, wait, transfer, or unattributed."""
        return _KINDS[self]


_TRANSFERS = frozenset({Stage.RETRIEVAL, Stage.HANDOFF, Stage.EMBEDDING_TRANSFER, Stage.KV_TRANSFER})


def _kind(stage: Stage) -> Kind:
    if stage is Stage.UNATTRIBUTED:
        return Kind.UNATTRIBUTED
    if stage.value.endswith(".wait"):
        return Kind.WAIT
    return Kind.TRANSFER if stage in _TRANSFERS else Kind.WORK


_KINDS = {stage: _kind(stage) for stage in Stage}


class Reason(StrEnum):
    """Why the engine did not run a request in a step.

    Only ``encoder_budget`` and ``encoder_cache`` of the request itself make a
    wait an ``encode.wait``: an aggregated engine has one queue, and calling all
    of an image request's time in it "encoder wait" would make the encoder
    guilty by definition.
    """

    STEP = "step"
    """A step was running when the request came."""
    SEATS = "seats"
    """As many requests are running as the engine allows."""
    TOKENS = "tokens"
    """The step's token budget was used up."""
    KV = "kv"
    """The KV cache had no room."""
    ENCODER_BUDGET = "encoder_budget"
    """The step's encoder budget was used up."""
    ENCODER_CACHE = "encoder_cache"
    """The encoder cache had no room."""
    REMOTE_EMBEDDING = "remote_embedding"
    """An embedding from another server was not there yet."""
    REMOTE_KV = "remote_kv"
    """KV state from another server was not there yet."""
    GRAMMAR = "grammar"
    """The grammar of its guided decoding was being compiled."""
    LORA = "lora"
    """As many adapters were in the step as the engine allows."""
    PREEMPTING = "preempting"
    """The step took a seat from a running request, and then takes nobody from the queue."""
    PAUSED = "paused"
    """The engine was paused."""
    DEFERRED = "deferred"
    """Prefills were put off to keep data-parallel engines in step."""
    UNKNOWN = "unknown"
    """None of the above was seen."""


class Outcome(StrEnum):
    """How a request ended."""

    OK = "ok"
    ERROR = "error"
    CANCELLED = "cancelled"
    """The client went away before the last byte."""
    LOST = "lost"
    """The server's processes ended before the request did."""
