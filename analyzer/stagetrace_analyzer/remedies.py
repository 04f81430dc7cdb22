"""What is cheaper than another topology and worth trying first, for each wait.

Nothing here is measured: it is advice, with the figure that would show that it
worked and with where it is from.  Options are those of vLLM 0.32.  A source is
a file of the installed vLLM with a name in it, a test of this project, or an
address; where two are given, ``; `` stands between them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from types import MappingProxyType
from typing import Final

from stagetrace.stages import Reason, Stage
from stagetrace_analyzer.results import Remedy

MATERIAL: Final = 0.2
"""A reason with less than this share of a wait brings no remedies of its own."""

MOST: Final = 5
"""Remedies for one stage."""

_TUNING: Final = "https://docs.vllm.ai/en/stable/configuration/optimization/"
_SHOWN: Final = "tests/live/engine/test_remedies.py"
_REASONS: Final = "tests/live/engine/test_reasons.py"
_TRANSFERS: Final = "tests/live/engine/test_transfers.py"
_FRONT_END: Final = "tests/live/injection/test_front_end.py"

REMEDIES: Final = (
    # --- front end ---------------------------------------------------------------------------------
    Remedy(
        key="api_servers",
        advice="Run more API servers: each has its own event loop, thread pools and interpreter lock.",
        option="--api-server-count",
        check="Waits before handoff and respond fall; processor cache hits may fall too (a cache each).",
        source=f"{_TUNING}; vllm/multimodal/cache/factories.py: processor_only",
    ),
    Remedy(
        key="smaller_uploads",
        advice="Send less: media as URLs or shrunk. The upload of a data URL is inside this stage.",
        option=None,
        check="receive falls, and upload_ns in the dataset; with URLs, retrieval rises.",
        source=f"{_FRONT_END}: test_slow_upload",
    ),
    Remedy(
        key="media_near",
        advice="Bring media near: same region, or a caching proxy between the server and the store.",
        option=None,
        check="retrieval falls in p50 and p95; nothing else changes.",
        source=f"https://github.com/llm-d/llm-d/issues/1182; {_FRONT_END}: test_slow_media_server",
    ),
    Remedy(
        key="media_cache",
        advice="If the same URLs come again, keep their bytes on a disk of the server.",
        option="VLLM_MEDIA_CACHE",
        check="media_cache in the dataset says hit; retrieval falls for repeats only.",
        source="https://github.com/vllm-project/vllm/pull/37123; "
        "tests/live/test_pooling.py: test_media_cache_is_known_inline",
    ),
    Remedy(
        key="fetch_retries",
        advice="Give up on dead media hosts sooner: each retry waits four times as long as the last.",
        option="VLLM_MEDIA_FETCH_MAX_RETRIES",
        check="p99 of retrieval and fetch_attempts fall; errors may rise, and they count as failed.",
        source=f"vllm/connections.py: _RETRY_BACKOFF_FACTOR; {_FRONT_END}: test_refused_connection",
    ),
    Remedy(
        key="fetch_timeout",
        advice="Lower the timeout of a fetch (5 s for an image), if a healthy store answers far sooner.",
        option="VLLM_IMAGE_FETCH_TIMEOUT",
        check="p99 of retrieval falls; fetch_attempts and errors may rise.",
        source="vllm/envs.py: VLLM_IMAGE_FETCH_TIMEOUT",
    ),
    Remedy(
        key="media_threads",
        advice="If cores are idle, load media with more threads (8 in an API server by default).",
        option="VLLM_MEDIA_LOADING_THREAD_COUNT",
        check="media_decode.wait falls; if media_decode or preprocess rises, cores have run out.",
        source=f"vllm/multimodal/media/connector.py: global_thread_pool; {_FRONT_END}: test_busy_media_pool",
    ),
    Remedy(
        key="smaller_files",
        advice="Shrink images at the client to what the model uses: here they are decoded at full size.",
        option=None,
        check="Mean pixels fall, and with them media_decode, preprocess and their waits.",
        source="vllm/multimodal/media/image.py: load_bytes; https://github.com/vllm-project/vllm/issues/44688",
    ),
    Remedy(
        key="other_formats",
        advice="Try other image files: at equal pixels, content and coding decide how long decoding takes.",
        option=None,
        check="media_decode falls at the same mean pixels.",
        source=f"{_FRONT_END}: test_slow_decoding",
    ),
    Remedy(
        key="fewer_frames",
        advice="Read fewer frames of a video (num_frames).",
        option="--media-io-kwargs",
        check="media_decode, preprocess and encode of videos fall; look at the quality of answers.",
        source="vllm/config/multimodal.py: media_io_kwargs",
    ),
    Remedy(
        key="processor_cache",
        advice="If media repeat, enlarge the processor's cache (4 GiB a process by default).",
        option="--mm-processor-cache-gb",
        check="Processor cache hits rise; preprocess, its wait and handoff fall. Costs host memory.",
        source=f"vllm/config/multimodal.py: mm_processor_cache_gb; {_TUNING}",
    ),
    Remedy(
        key="max_pixels",
        advice="Cap an image's pixels in the processor (max_pixels or size; it depends on the model).",
        option="--mm-processor-kwargs",
        check="Prompt tokens, preprocess, encode and prefill fall; look at the quality of answers.",
        source="https://github.com/vllm-project/vllm/pull/41723; "
        "vllm/config/multimodal.py: mm_processor_kwargs",
    ),
    Remedy(
        key="renderer_threads",
        advice="More threads for chat template and tokenizer. The multimodal processor keeps its one.",
        option="--renderer-num-workers",
        check="preprocess.wait of text falls, that of images stays; preprocess may rise (one lock).",
        source="vllm/renderers/base.py: _mm_executor; https://github.com/vllm-project/vllm/issues/58266",
    ),
    Remedy(
        key="processor_device",
        advice="Run the image processor on the accelerator, if that has time to spare.",
        option="--mm-processor-device",
        check="preprocess falls; encode, prefill and decode may rise: they share the device.",
        source="vllm/engine/arg_utils.py: --mm-processor-device",
    ),
    Remedy(
        key="shared_media_cache",
        advice="With one API server, pass processed media on through shared memory.",
        option="--mm-processor-cache-type shm",
        check="handoff of images falls; that of text does not change.",
        source="vllm/config/multimodal.py: mm_processor_cache_type; "
        "vllm/multimodal/cache/factories.py: is_ipc_supported",
    ),
    Remedy(
        key="tensor_ipc",
        advice="On one device, pass tensors by reference (VLLM_WORKER_MULTIPROC_METHOD must be spawn).",
        option="--mm-tensor-ipc torch_shm",
        check="handoff of images falls; vLLM does not start where it cannot do this.",
        source="https://github.com/vllm-project/vllm/pull/32104; vllm/config/model.py: torch_shm",
    ),
    # --- steps, tokens, seats ----------------------------------------------------------------------
    Remedy(
        key="shorter_steps",
        advice="Lower the token budget: it bounds a step's prompts and its images, down to one image.",
        option="--max-num-batched-tokens",
        check="prefill.wait(step) falls, tokens come more evenly; waits for tokens, encoder_budget may rise.",
        source=f"vllm/v1/core/encoder_cache_manager.py: compute_mm_encoder_budget; {_SHOWN}: "
        "test_token_budget_bounds_the_images_of_a_step",
    ),
    Remedy(
        key="token_budget",
        advice="Raise the token budget: it is the encoder's budget and the size of its cache as well.",
        option="--max-num-batched-tokens",
        check="Waits for tokens and the encoder fall, prefill too; prefill.wait(step) and decode may rise.",
        source=f"{_TUNING}; {_SHOWN}: test_token_budget_is_the_encoders_as_well",
    ),
    Remedy(
        key="unused_modalities",
        advice='Forbid what nobody sends ({"video": 0}): its largest item sets the encoder\'s budget.',
        option="--limit-mm-per-prompt",
        check="prefill.wait(kv) falls; (step) too, where a video was more than the token budget.",
        source="vllm/multimodal/encoder_budget.py: active_modalities; "
        "https://docs.vllm.ai/en/stable/configuration/conserving_memory/",
    ),
    Remedy(
        key="image_limit",
        advice="Bound the images of a request. Requests with more are refused.",
        option="--limit-mm-per-prompt",
        check="p95 of encode, encode.wait and prefill.wait(step) falls; errors rise by those refused.",
        source="vllm/config/multimodal.py: limit_per_prompt",
    ),
    Remedy(
        key="priorities",
        advice="Let short requests go first: clients send a priority, lower is earlier.",
        option="--scheduling-policy priority",
        check="Their prefill.wait falls, behind images to the step under way; that of all others rises.",
        source=f"vllm/config/scheduler.py: SchedulerPolicy; {_SHOWN}: test_priority_goes_past_refused_images",
    ),
    Remedy(
        key="newer_vllm",
        advice="From 0.33 on, a request that the encoder refuses no longer holds up those behind it.",
        option=None,
        check="prefill.wait(encoder_budget) and (encoder_cache) of text disappear.",
        source="tests/live/engine/test_versions.py: test_text_behind_a_refused_image",
    ),
    Remedy(
        key="long_prompts",
        advice="Bound what one long prompt takes of a step while others are there.",
        option="--long-prefill-token-threshold",
        check="Waits for tokens fall; prefill of long prompts may rise.",
        source=f"vllm/config/scheduler.py: long_prefill_token_threshold; {_SHOWN}: test_long_prompts",
    ),
    Remedy(
        key="chunked_prefill",
        advice="If chunked prefill is off, switch it on: without it a prompt must fit into a step whole.",
        option="--enable-chunked-prefill",
        check="prefill.wait(tokens) falls; prefill of long prompts is spread over more steps.",
        source=f"vllm/config/scheduler.py: enable_chunked_prefill; {_TUNING}",
    ),
    Remedy(
        key="prefix_caching",
        advice="Keep prefix caching on, and put first what repeats: system text, tools, shared images.",
        option="--enable-prefix-caching",
        check="Cached tokens rise; prefill and encode fall, and the waits behind them.",
        source=f"{_REASONS}: test_prefix_hit_over_the_image; {_SHOWN}: test_prefix_caching",
    ),
    Remedy(
        key="seats",
        advice="Raise the seats, if KV cache and device memory have room.",
        option="--max-num-seqs",
        check="Waits for seats fall; decode and waits for kv may rise.",
        source=f"vllm/config/scheduler.py: max_num_seqs; {_SHOWN}: test_seats",
    ),
    Remedy(
        key="active_seats",
        advice="See whether this is set: it gives fewer seats than --max-num-seqs.",
        option="--max-num-active-seqs",
        check="Waits for seats fall once it is gone; decode may rise.",
        source=f"vllm/config/scheduler.py: max_num_active_seqs; {_SHOWN}: test_seats",
    ),
    Remedy(
        key="shorter_answers",
        advice="Bound the answers (max_tokens): a request holds its seat and its KV until its last token.",
        option=None,
        check="Output tokens and decode fall, and waits for seats and kv; finish reason length rises.",
        source="tests/live/injection/test_engine.py: test_taken_seats",
    ),
    Remedy(
        key="refuse_early",
        advice="Refuse what would wait too long (503), so that clients can go to another server.",
        option="--max-num-queued-reqs",
        check="Waits of those let in fall; errors rise, and they count as failed.",
        source="vllm/config/scheduler.py: max_num_queued_reqs",
    ),
    # --- KV cache ----------------------------------------------------------------------------------
    Remedy(
        key="kv_memory",
        advice="Give the KV cache more memory (CPU backend: VLLM_CPU_KVCACHE_SPACE).",
        option="--gpu-memory-utilization",
        check="Waits for kv, preempting and recomputed prefill fall; too much runs out of memory.",
        source=f"{_TUNING}; {_SHOWN}: test_kv_memory",
    ),
    Remedy(
        key="kv_dtype",
        advice="Store KV state in 8 bits, where model and device allow it.",
        option="--kv-cache-dtype fp8",
        check="Waits for kv and bytes of kv_transfer fall; look at the quality of answers.",
        source="vllm/config/cache.py: cache_dtype",
    ),
    Remedy(
        key="watermark",
        advice="Keep a few per cent of the KV cache free when requests are let in (0.02 to 0.05).",
        option="--watermark",
        check="decode.wait and recomputed prefill fall; prefill.wait(kv) and TTFT rise.",
        source=f"https://github.com/vllm-project/vllm/pull/44594; {_SHOWN}: test_watermark",
    ),
    Remedy(
        key="fewer_seats",
        advice="Let fewer requests run at once: each has more of the KV cache and of every step.",
        option="--max-num-active-seqs",
        check="decode, decode.wait and recomputed prefill fall; prefill.wait(seats) rises.",
        source=f"{_TUNING}; vllm/config/scheduler.py: max_num_active_seqs",
    ),
    # --- encoder -----------------------------------------------------------------------------------
    Remedy(
        key="same_media",
        advice="Send a repeated image with the same bytes, or with a uuid of its own: it is encoded once.",
        option=None,
        check="Encoder cache hits rise; encode and encode.wait fall.",
        source=f"https://docs.vllm.ai/en/stable/features/multimodal_inputs/; {_SHOWN}: test_same_media",
    ),
    Remedy(
        key="encoder_graphs",
        advice="Capture the encoder in CUDA graphs, where the model supports it.",
        option="--compilation-config.cudagraph_mm_encoder true",
        check="encode falls, most with small images; device memory for KV falls a little.",
        source="https://github.com/vllm-project/vllm/pull/35963; "
        "vllm/config/compilation.py: cudagraph_mm_encoder",
    ),
    Remedy(
        key="encoder_tp_data",
        advice="With tensor parallelism, let each rank encode whole images instead of a part of each.",
        option="--mm-encoder-tp-mode data",
        check="encode falls; each rank holds the whole encoder in memory.",
        source=f"{_TUNING}; vllm/config/multimodal.py: mm_encoder_tp_mode",
    ),
    # --- guided decoding, adapters, pauses ---------------------------------------------------------
    Remedy(
        key="same_schemas",
        advice="Send the same schema in the same words: compiled grammars are cached by their text.",
        option=None,
        check="prefill.wait(grammar) is left at the first request of each schema only.",
        source="tests/live/injection/test_engine.py: test_slow_grammar",
    ),
    Remedy(
        key="grammar_backend",
        advice="Try another grammar backend: guidance hardly compiles, xgrammar does it once a schema.",
        option="--structured-outputs-config.backend guidance",
        check="prefill.wait(grammar) falls; decode may rise: a mask is computed for every token.",
        source="https://github.com/guidance-ai/jsonschemabench/tree/main/maskbench; "
        "vllm/config/structured_outputs.py: StructuredOutputsBackend",
    ),
    Remedy(
        key="grammar_cache",
        advice="With very many schemas, enlarge the cache of compiled grammars (512 MB).",
        option="VLLM_XGRAMMAR_CACHE_MB",
        check="prefill.wait(grammar) falls for schemas seen before. Costs host memory.",
        source="vllm/v1/structured_output/backend_xgrammar.py: cache_limit_bytes",
    ),
    Remedy(
        key="lora_slots",
        advice="Allow more adapters in a step.",
        option="--max-loras",
        check="prefill.wait(lora) falls; device memory for KV falls: watch waits for kv.",
        source=f"vllm/config/lora.py: max_loras; {_SHOWN}: test_lora_slots",
    ),
    Remedy(
        key="lora_routing",
        advice="Send an adapter's requests to the same few servers, so that each serves few adapters.",
        option=None,
        check="prefill.wait(lora) falls in every instance; look whether their loads stay even.",
        source="https://github.com/vllm-project/vllm/pull/15422",
    ),
    Remedy(
        key="who_pauses",
        advice="Find who pauses the engine: /pause, /sleep, updates of weights.",
        option=None,
        check="Waits of reason paused end when it is resumed.",
        source=f"vllm/entrypoints/rl/online/api_router.py: pause_generation; {_REASONS}: test_paused",
    ),
    Remedy(
        key="prefill_interval",
        advice="Let data-parallel engines take prefills more often (1: in every step).",
        option="--prefill-schedule-interval",
        check="Waits of reason deferred fall; decode may rise, as engines wait for each other.",
        source=f"vllm/config/scheduler.py: prefill_schedule_interval; {_REASONS}: test_deferred",
    ),
    # --- between servers ---------------------------------------------------------------------------
    Remedy(
        key="other_server",
        advice="Look at the other server's report first: its own queue and work are inside this wait.",
        option=None,
        check="Its encode.wait or prefill.wait falls, and this wait with it.",
        source=f"{_TRANSFERS}: test_server_that_only_encodes",
    ),
    Remedy(
        key="embedding_transport",
        advice="Move embeddings from memory to memory (ECMooncakeConnector), not through a folder.",
        option="--ec-transfer-config",
        check="embedding_transfer and its wait fall.",
        source="https://docs.vllm.ai/en/latest/features/mooncake_ec_connector_usage/; "
        "vllm/config/ec_transfer.py: ECMooncakeConnector",
    ),
    Remedy(
        key="kv_blocks",
        advice="Use larger KV blocks (64 for 16 tokens): fewer pieces to move.",
        option="--block-size",
        check="kv_transfer and its wait fall; cached tokens may fall: prefixes match by whole blocks.",
        source="https://github.com/vllm-project/vllm/issues/50913",
    ),
    Remedy(
        key="kv_transport",
        advice="Check what KV travels over: UCX_TLS and UCX_NET_DEVICES for NIXL; NCCL_* do nothing there.",
        option=None,
        check="kv_transfer and its wait fall, most for long prompts.",
        source="https://docs.vllm.ai/en/stable/features/nixl_connector_usage/",
    ),
    # --- output ------------------------------------------------------------------------------------
    Remedy(
        key="stream",
        advice="Stream: without it the first useful byte comes after all of the decoding.",
        option=None,
        check="decode leaves TTFT; completion stays as it is.",
        source="tests/live/test_stages.py: test_streaming_is_told_apart",
    ),
    Remedy(
        key="speculation",
        advice="Speculate: several tokens a step, at the price of more work in it.",
        option="--speculative-config",
        check="decode falls at low load; at high load it may rise, and prefill.wait(step) too.",
        source=f"vllm/config/speculative.py: num_speculative_tokens; {_REASONS}: test_draft_tokens",
    ),
    Remedy(
        key="stream_interval",
        advice="Send several tokens in a chunk; the first one still goes alone.",
        option="--stream-interval",
        check="respond falls with many streams; pauses between chunks get longer.",
        source="https://github.com/vllm-project/vllm/pull/27869; "
        "vllm/v1/engine/output_processor.py: stream_interval",
    ),
    Remedy(
        key="slow_readers",
        advice="Look at the clients: one that does not read holds up its own last byte.",
        option=None,
        check="respond falls on the way to completion; it was never in TTFT.",
        source=f"{_FRONT_END}: test_slow_reader",
    ),
    # --- no record ---------------------------------------------------------------------------------
    Remedy(
        key="no_reason",
        advice="Nothing cheap is known: the scheduler showed no reason. Is a hook off (stagetrace doctor)?",
        option=None,
        check="The share of reason unknown falls in the next run.",
        source="tests/live/engine/test_reasons.py: test_idle_engine_with_a_request_is_a_wait",
    ),
    Remedy(
        key="missing_records",
        advice="Ask stagetrace doctor what is not recorded; the report says what was lost and set aside.",
        option=None,
        check="unattributed falls below 2 % of both horizons.",
        source="tests/live/test_stages.py: test_little_is_unattributed_under_twice_the_capacity",
    ),
    Remedy(
        key="larger_spool",
        advice="If segments were removed, enlarge STAGETRACE_SPOOL_MAX_BYTES, or set STAGETRACE_SAMPLE.",
        option=None,
        check="The report counts no removed segments; unattributed falls.",
        source="tests/core/test_limits.py: test_oldest_segments_go_first",
    ),
)
"""All remedies, each key once."""

_STAGES: Final[Mapping[Stage, Sequence[str]]] = MappingProxyType(
    {
        Stage.RECEIVE: ("smaller_uploads", "api_servers"),
        Stage.RETRIEVAL: ("media_near", "media_cache", "fetch_retries", "fetch_timeout", "api_servers"),
        Stage.MEDIA_DECODE_WAIT: ("media_threads", "smaller_files", "api_servers"),
        Stage.MEDIA_DECODE: ("smaller_files", "other_formats", "fewer_frames"),
        Stage.PREPROCESS_WAIT: (
            "api_servers",
            "processor_cache",
            "max_pixels",
            "smaller_files",
            "renderer_threads",
        ),
        Stage.PREPROCESS: ("processor_cache", "max_pixels", "smaller_files", "processor_device"),
        Stage.HANDOFF: ("processor_cache", "shared_media_cache", "tensor_ipc", "max_pixels", "api_servers"),
        Stage.PREFILL_WAIT: ("prefix_caching", "max_pixels", "priorities", "refuse_early"),
        Stage.ENCODE_WAIT: ("token_budget", "same_media", "max_pixels", "prefix_caching", "image_limit"),
        Stage.ENCODE: ("prefix_caching", "same_media", "max_pixels", "encoder_graphs", "encoder_tp_data"),
        Stage.EMBEDDING_TRANSFER_WAIT: ("other_server", "same_media", "embedding_transport", "max_pixels"),
        Stage.EMBEDDING_TRANSFER: ("same_media", "embedding_transport", "max_pixels"),
        Stage.PREFILL: ("prefix_caching", "max_pixels", "token_budget", "kv_memory"),
        Stage.KV_TRANSFER_WAIT: ("other_server", "prefix_caching", "kv_blocks", "kv_transport", "kv_dtype"),
        Stage.KV_TRANSFER: ("prefix_caching", "kv_blocks", "kv_transport", "kv_dtype"),
        Stage.DECODE_WAIT: ("kv_memory", "watermark", "fewer_seats", "shorter_answers"),
        Stage.DECODE: ("stream", "shorter_answers", "fewer_seats", "speculation", "shorter_steps"),
        Stage.RESPOND: ("api_servers", "stream_interval", "slow_readers"),
        Stage.UNATTRIBUTED: ("missing_records", "larger_spool"),
    }
)

_REFUSED_BY_ENCODER: Final = ("token_budget", "max_pixels", "same_media", "priorities", "newer_vllm")

_WAITING: Final[Mapping[Reason, Sequence[str]]] = MappingProxyType(
    {
        Reason.STEP: ("max_pixels", "shorter_steps", "unused_modalities", "same_media", "priorities"),
        Reason.SEATS: ("seats", "active_seats", "shorter_answers", "priorities", "refuse_early"),
        Reason.TOKENS: ("long_prompts", "prefix_caching", "token_budget", "chunked_prefill", "priorities"),
        Reason.KV: ("kv_memory", "prefix_caching", "unused_modalities", "kv_dtype", "shorter_answers"),
        Reason.ENCODER_BUDGET: _REFUSED_BY_ENCODER,
        Reason.ENCODER_CACHE: _REFUSED_BY_ENCODER,
        Reason.REMOTE_EMBEDDING: _STAGES[Stage.EMBEDDING_TRANSFER_WAIT],
        Reason.REMOTE_KV: _STAGES[Stage.KV_TRANSFER_WAIT],
        Reason.GRAMMAR: ("same_schemas", "grammar_backend", "grammar_cache"),
        Reason.LORA: ("lora_slots", "lora_routing"),
        Reason.PREEMPTING: ("kv_memory", "watermark", "fewer_seats", "kv_dtype"),
        Reason.PAUSED: ("who_pauses",),
        Reason.DEFERRED: ("prefill_interval",),
        Reason.UNKNOWN: ("no_reason",),
    }
)

_PREEMPTED: Final = ("kv_memory", "watermark", "fewer_seats", "shorter_answers", "kv_dtype")

_ELSEWHERE: Final[Mapping[tuple[Stage, Reason], Sequence[str]]] = MappingProxyType(
    {
        # The image itself is refused; nobody holds it up whom a priority would help to pass.
        (Stage.ENCODE_WAIT, Reason.ENCODER_BUDGET): _STAGES[Stage.ENCODE_WAIT],
        (Stage.ENCODE_WAIT, Reason.ENCODER_CACHE): _STAGES[Stage.ENCODE_WAIT],
        # Whoever waits after the first token has lost blocks; more seats would cost it more of them.
        (Stage.DECODE_WAIT, Reason.KV): _PREEMPTED,
        (Stage.DECODE_WAIT, Reason.SEATS): _PREEMPTED,
        (Stage.DECODE_WAIT, Reason.PREEMPTING): _PREEMPTED,
        (Stage.DECODE_WAIT, Reason.TOKENS): ("long_prompts", "token_budget", "fewer_seats"),
    }
)
"""Where a reason asks for something else than in other waits."""

_OPPOSITES: Final[Mapping[str, frozenset[str]]] = MappingProxyType(
    {
        "token_budget": frozenset({"shorter_steps"}),
        "shorter_steps": frozenset({"token_budget"}),
        "seats": frozenset({"fewer_seats"}),
        "active_seats": frozenset({"fewer_seats"}),
        "fewer_seats": frozenset({"seats", "active_seats"}),
    }
)
"""What would undo each other: whichever is named first stands, and its check says what may rise."""

_ABOUT_MEDIA: Final = frozenset(
    {
        "media_near",
        "media_cache",
        "fetch_retries",
        "fetch_timeout",
        "media_threads",
        "smaller_files",
        "other_formats",
        "fewer_frames",
        "processor_cache",
        "max_pixels",
        "processor_device",
        "shared_media_cache",
        "unused_modalities",
        "image_limit",
        "same_media",
        "encoder_graphs",
        "encoder_tp_data",
    }
)
"""What does nothing for a server that is sent no media."""

_BY_KEY: Final = MappingProxyType({remedy.key: remedy for remedy in REMEDIES})


def remedies_for(
    waits: Sequence[tuple[str, Mapping[str, float] | None]], *, media: bool = True
) -> tuple[Remedy, ...]:
    """Return what to try first against dominant stages, the most promising first and each once.

    Args:
        waits: Stages, the most dominant first, each with the shares (0 to 1) of
            the scheduler's reasons within it; None if no reason was recorded.
            Stages that are no waits are welcome too.
        media: Whether anybody sent media; if not, what is about media is left out.

    Returns:
        Up to `MOST` for each stage: those for the reasons with a share of at
        least `MATERIAL`; then, if these leave a material part of the wait
        unexplained, those for the stage, whatever the reason.  None that would
        undo an earlier one.  Unknown stages and reasons have none.
    """
    keys: dict[str, None] = {}
    useless = frozenset() if media else _ABOUT_MEDIA
    for stage, reasons in waits:
        mine: dict[str, None] = {}
        for key in _keys(Stage(stage), reasons or {}) if stage in _STAGES else ():
            undone = _OPPOSITES.get(key, frozenset())
            if key in useless:
                continue
            if len(mine) < MOST and undone.isdisjoint(keys) and undone.isdisjoint(mine):
                mine[key] = None
        keys |= mine
    return tuple(_BY_KEY[key] for key in keys)


def _keys(stage: Stage, reasons: Mapping[str, float]) -> Iterator[str]:
    """Return keys for a stage: the best of each material reason, the next best of each, the stage's."""
    material = {Reason(r): share for r, share in reasons.items() if r in _WAITING and share >= MATERIAL}
    ordered = sorted(material, key=lambda reason: -material[reason])
    for rank in zip_longest(*(_for_reason(stage, reason) for reason in ordered)):
        yield from (key for key in rank if key is not None)
    explained = sum(share for reason, share in material.items() if reason is not Reason.UNKNOWN)
    if 1 - explained >= MATERIAL:
        yield from _STAGES[stage]


def _for_reason(stage: Stage, reason: Reason) -> Sequence[str]:
    return _ELSEWHERE.get((stage, reason), _WAITING[reason])
