"""How engines differ: options for them, and changes of their configuration after it was made."""

from __future__ import annotations


def asynchronous(config):
    """Switch on what the CPU platform switches off: the next step is composed before the one before is done."""
    config.scheduler_config.async_scheduling = True


def one_image_a_step(config):
    """An encoder budget of 250 embeddings: one image of 200, not two."""
    config.scheduler_config.max_num_encoder_input_tokens = 250
    config.scheduler_config.encoder_cache_size = 600


def one_image_in_the_cache(config):
    """Room for one image of 200 embeddings in the encoder cache, and budget for more."""
    config.scheduler_config.max_num_encoder_input_tokens = 600
    config.scheduler_config.encoder_cache_size = 250


def whole_images(config):
    """No chunk of a prompt may end within an image."""
    config.scheduler_config.disable_chunked_mm_input = True


def both(*changes):
    """Several changes of a configuration as one."""

    def change(config):
        for one in changes:
            one(config)

    return change


def kv_consumer(policy="fail"):
    """Options of an engine whose KV may come from another server."""
    from vllm.config import KVTransferConfig

    connector = KVTransferConfig(
        kv_connector="Scripted", kv_role="kv_consumer", kv_load_failure_policy=policy
    )
    return {"kv_transfer_config": connector}


def embedding_consumer():
    """Options of an engine whose embeddings may come from another server."""
    from vllm.config import ECTransferConfig

    return {"ec_transfer_config": ECTransferConfig(ec_connector="Scripted", ec_role="ec_consumer")}


def encoder_only():
    """Options of an engine that only encodes, for other servers."""
    from vllm.config import ECTransferConfig

    return {"ec_transfer_config": ECTransferConfig(ec_connector="Scripted", ec_role="ec_producer")}
