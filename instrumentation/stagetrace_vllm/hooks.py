"""What is hooked: one table, readable without vLLM.

Known from vLLM 0.32; ``docs/versions.md`` has what other versions have of it.
All hooks are set on classes (or on the one pool object of the media connector),
never on instances' call chains that vLLM binds once, and never on compiled code.
"""

from __future__ import annotations

from typing import Final

from stagetrace_vllm import engine, frontend, http, reasons, worker
from stagetrace_vllm.wrapping import Hook

HOOKS: Final = (
    Hook("uvicorn.config", "Config.load", ("self",), http.wrap_config_load, "every request"),
    Hook(
        "vllm.renderers.base",
        "BaseRenderer.__init__",
        ("self", "config", "tokenizer"),
        frontend.wrap_renderer_init,
        "preprocess",
    ),
    Hook(
        "vllm.multimodal.media.connector",
        "global_thread_pool.submit",
        ("fn",),
        frontend.wrap_submit,
        "media_decode",
    ),
    Hook(
        "vllm.multimodal.media.connector",
        "MediaConnector.load_from_url_async",
        ("self", "url", "media_io"),
        frontend.wrap_load_from_url_async,
        "media items",
    ),
    Hook(
        "vllm.multimodal.media.connector",
        "MediaConnector.load_from_url",
        ("self", "url", "media_io"),
        frontend.wrap_load_from_url,
        "media items of pooling requests",
    ),
    Hook(
        "vllm.multimodal.media.connector",
        "MediaConnector._get_cached_bytes",
        ("self", "url"),
        frontend.wrap_get_cached_bytes,
        "hits of the media cache in pooling requests",
    ),
    Hook(
        "vllm.connections",
        "HTTPConnection.async_get_bytes",
        ("self", "url"),
        frontend.wrap_async_get_bytes,
        "retrieval",
    ),
    Hook(
        "vllm.connections",
        "HTTPConnection.get_bytes",
        ("self", "url"),
        frontend.wrap_get_bytes,
        "retrieval in pooling requests",
    ),
    Hook(
        "vllm.connections",
        "HTTPConnection.get_async_response",
        ("self", "url"),
        frontend.wrap_get_response,
        "attempts of a fetch",
    ),
    Hook(
        "vllm.connections",
        "HTTPConnection.get_response",
        ("self", "url"),
        frontend.wrap_get_response,
        "attempts of a fetch in pooling requests",
    ),
    Hook(
        "vllm.multimodal.processing.processor",
        "BaseMultiModalProcessor._get_cache_missing_items",
        ("self", "cache", "mm_data_items", "mm_hashes"),
        frontend.wrap_get_cache_missing_items,
        "hits of the processor cache",
    ),
    Hook(
        "vllm.v1.engine.output_processor",
        "OutputProcessor.add_request",
        ("self", "request", "prompt", "parent_req", "request_index", "queue"),
        frontend.wrap_output_processor_add_request,
        "the join with the engine",
    ),
    Hook(
        "vllm.v1.engine.output_processor",
        "OutputProcessor.process_outputs",
        ("self", "engine_core_outputs"),
        frontend.wrap_process_outputs,
        "finish reason, stop strings",
    ),
    Hook(
        "vllm.v1.engine.output_processor",
        "OutputProcessor.abort_requests",
        ("self", "request_ids"),
        frontend.wrap_abort_requests,
        "aborts",
    ),
    Hook(
        "vllm.v1.engine.output_processor",
        "OutputProcessor.propagate_error",
        ("self",),
        frontend.wrap_propagate_error,
        "a dead engine",
    ),
    Hook(
        "vllm.entrypoints.generate.base.serving",
        "GenerateBaseServing.create_streaming_error_response",
        ("self", "message"),
        frontend.wrap_streaming_error,
        "errors after HTTP 200",
    ),
    Hook(
        "vllm.v1.core.sched.scheduler",
        "Scheduler.__init__",
        ("self", "vllm_config"),
        engine.wrap_scheduler_init,
        "model, the reasons of encoder and transfers",
    ),
    Hook(
        "vllm.v1.engine.core",
        "EngineCore.preprocess_add_request",
        ("self", "request"),
        engine.wrap_preprocess_add_request,
        "the engine's part of every request",
    ),
    Hook(
        "vllm.v1.core.sched.scheduler",
        "Scheduler.add_request",
        ("self", "request"),
        engine.wrap_scheduler_add_request,
        "first tokens, the reason step",
    ),
    Hook(
        "vllm.v1.core.sched.scheduler",
        "Scheduler.schedule",
        ("self",),
        engine.wrap_schedule,
        "steps, waits",
        reasons.READS,
        "the reasons of waits",
    ),
    Hook(
        "vllm.v1.core.sched.scheduler",
        "Scheduler.update_from_output",
        ("self", "scheduler_output"),
        engine.wrap_update_from_output,
        "ends of steps",
    ),
    Hook(
        "vllm.v1.core.sched.scheduler",
        "Scheduler._try_schedule_encoder_inputs",
        ("self", "request", "num_computed_tokens", "num_new_tokens"),
        engine.wrap_try_schedule_encoder_inputs,
        "encode.wait",
    ),
    Hook(
        "vllm.v1.core.sched.scheduler",
        "Scheduler._handle_blocked_waiting_request",
        ("self", "request"),
        engine.wrap_handle_blocked_waiting_request,
        "the reasons grammar and remote_kv",
    ),
    Hook(
        "vllm.v1.core.sched.scheduler",
        "Scheduler.set_pause_state",
        ("self", "pause_state"),
        engine.wrap_set_pause_state,
        "the reason paused while nothing is scheduled",
    ),
    Hook(
        "vllm.v1.core.sched.scheduler",
        "Scheduler._preempt_request",
        ("self", "request"),
        engine.wrap_preempt_request,
        "preemptions",
    ),
    Hook(
        "vllm.v1.core.sched.scheduler",
        "Scheduler._free_request",
        ("self", "request"),
        engine.wrap_free_request,
        "ends in the engine",
    ),
    Hook(
        "vllm.v1.worker.worker_base",
        "WorkerWrapperBase.execute_model",
        ("self", "scheduler_output"),
        worker.wrap_execute_model,
        "begins of steps, encode",
    ),
    Hook(
        "vllm.v1.worker.gpu_model_runner",
        "GPUModelRunner._execute_mm_encoder",
        ("self", "scheduler_output"),
        worker.wrap_execute_mm_encoder,
        "encode",
    ),
    Hook(
        "vllm.v1.worker.gpu.mm.encoder_runner",
        "EncoderRunner.execute_mm_encoder",
        ("self",),
        worker.wrap_execute_mm_encoder,
        "encode",
    ),
)
"""Every hook: where, with which parameters, and what is unknown without it."""
