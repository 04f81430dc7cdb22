"""Other servers, scripted: KV and embeddings that come from them, through real connectors of vLLM's scheduler."""

from __future__ import annotations

from stagetrace.testing import MS


class Transfers:
    """What comes from other servers, and when it is there."""

    def __init__(self, clock):
        self._clock = clock
        self._lookups, self._kv, self._failing = {}, {}, set()
        self._loading, self._embeddings = {}, {}

    def remote_kv(self, name, tokens, *, takes, lookup=0, fails=False):
        """Let another server have the KV of a request's first tokens.

        Finding that out takes ``lookup`` milliseconds from now, and loading it ``takes`` milliseconds.
        """
        self._kv[name] = (tokens, takes)
        self._lookups[name] = self._clock.now + round(lookup * MS)
        if fails:
            self._failing.add(name)

    def remote_embedding(self, identifier, *, takes):
        """Let the embedding of a media item be here so many milliseconds from now."""
        self._embeddings[identifier] = self._clock.now + round(takes * MS)

    def matched(self, name):
        """How many tokens there are to load; None while that is being found out."""
        if self._lookups.get(name, 0) > self._clock.now:
            return None
        return self._kv.get(name, (0, 0))[0]

    def load(self, name):
        """Begin to load; what was asked for once is not there a second time."""
        _, takes = self._kv.pop(name)
        self._loading[name] = self._clock.now + round(takes * MS)

    def loaded(self, now):
        """What has ended since last asked: the requests, and those of them whose load failed."""
        ended = {name for name, ready in self._loading.items() if ready <= now}
        for name in ended:
            del self._loading[name]
        return ended, ended & self._failing

    def is_remote(self, identifier):
        """Whether an embedding comes from another server."""
        return identifier in self._embeddings

    def is_here(self, identifier):
        """Whether an embedding need not be waited for."""
        return self._embeddings.get(identifier, 0) <= self._clock.now


def make_kv_connector_class(transfers):
    """The scheduler's side of a connector that loads KV while steps go on."""
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (
        KVConnectorBase_V1,
        KVConnectorMetadata,
        SupportsHMA,
    )

    class ScriptedKVConnector(KVConnectorBase_V1, SupportsHMA):
        def get_num_new_matched_tokens(self, request, num_computed_tokens):
            tokens = transfers.matched(request.request_id)
            if tokens is None:
                return None, False
            return max(tokens - num_computed_tokens, 0), tokens > num_computed_tokens

        def update_state_after_alloc(self, request, blocks, num_external_tokens):
            if num_external_tokens:
                transfers.load(request.request_id)

        def build_connector_meta(self, scheduler_output):
            return KVConnectorMetadata()

        def request_finished_all_groups(self, request, block_ids):
            return False, None

        def start_load_kv(self, forward_context, **kwargs): ...

        def wait_for_layer_load(self, layer_name): ...

        def save_kv_layer(self, layer_name, kv_layer, attn_metadata, **kwargs): ...

        def wait_for_save(self): ...

    return ScriptedKVConnector


def make_ec_connector_class(transfers):
    """The scheduler's side of a connector that fetches embeddings while steps go on."""
    from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorBase, ECConnectorMetadata

    class ScriptedECConnector(ECConnectorBase):
        def ensure_cache_available(self, request, num_computed_tokens):
            return all(
                transfers.is_here(feature.identifier)
                for feature in request.mm_features
                if feature.mm_position.offset + feature.mm_position.length > num_computed_tokens
            )

        def has_cache_item(self, identifier):
            return transfers.is_remote(identifier) and transfers.is_here(identifier)

        def update_state_after_alloc(self, request, index): ...

        def build_connector_meta(self, scheduler_output):
            return ECConnectorMetadata()

        def start_load_caches(self, encoder_cache, **kwargs): ...

        def save_caches(self, encoder_cache, mm_hash, **kwargs): ...

    return ScriptedECConnector


def connector_classes(transfers):
    """The registries of vLLM's connectors, and what is to stand in them."""
    from vllm.distributed.ec_transfer.ec_connector.factory import ECConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    return (
        (KVConnectorFactory._registry, make_kv_connector_class(transfers)),
        (ECConnectorFactory._registry, make_ec_connector_class(transfers)),
    )
