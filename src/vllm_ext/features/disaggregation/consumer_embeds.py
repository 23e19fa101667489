"""CONSUMER_EMBEDS: consumers take embedding inputs, and survive those that lack them (PR 56379)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm_ext.core.feature import Feature, Option, Part, effect
from vllm_ext.core.seams import Wrap
from vllm_ext.features.disaggregation import consumer_embeds_checks as checks
from vllm_ext.features.disaggregation import consumer_embeds_probes as probes
from vllm_ext.features.disaggregation import consumer_roles as roles
from vllm_ext.features.disaggregation import embedding_tensors, lacking_items

_CONFIG = "vllm.config.vllm:VllmConfig"
_EARLY = f"{_CONFIG}._resolve_mm_encoder_only"
_ALLOW = f"{_CONFIG}._resolve_allow_missing_mm_embeddings"
_RESOLVE = f"{_CONFIG}._resolve_mm_embedding_inputs"
_SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"
_PLAN = f"{_SCHEDULER}._try_schedule_encoder_inputs"
_PROCESS = "vllm.multimodal.processing.processor:BaseMultiModalProcessor.apply"
_RENDER = "vllm.renderers.base:BaseRenderer.render_chat_async"
_QUEUE = "vllm.v1.engine.output_processor:RequestOutputCollector"
_ASYNC = "vllm.v1.engine.async_llm"
_ROLES = (
    "vllm.config.kv_transfer:KVTransferConfig.is_kv_consumer",
    "vllm.config.ec_transfer:ECTransferConfig.is_ec_consumer",
)
_ATTENTION = (
    "vllm.config.model:ModelConfig.get_model_arch_config",
    "vllm.config.model:ModelConfig._supports_multimodal_for_mm_prefix",
)


def accept_early(original: Callable[..., Any], self: Any) -> Any:
    """Open a consumer of 0.29.0 where later releases do it too late for its attention."""
    return _open_early(original, self, "CONSUMER_EMBEDS.accept")


def accept_tensorless(original: Callable[..., Any], self: Any) -> Any:
    """Roles that 0.29.0 lets omit the tensor, less those that later get no embedding inputs."""
    result = original(self)
    config = roles.multimodal(self)
    # Asked after the roles were opened: what is open now was given, or opened by us.
    if config is not None and config.allow_missing_mm_embeddings:
        stores = roles.stores_only(self, FEATURE.setting("KV_BOTH"))
        if stores or not config.enable_mm_embeds:
            roles.close(self, config.enable_mm_embeds)
        if stores:
            roles.tell_closed(self)
    return result


def keep_store_closed(original: Callable[..., Any], self: Any) -> Any:
    """A ``kv_both`` that nobody transfers prompts to gets embedding inputs only if asked for."""
    config = roles.multimodal(self)
    given = config is not None and config.enable_mm_embeds
    opened = roles.opens(self, roles.EVERY)
    result = original(self)
    if config is None or not config.allow_missing_mm_embeddings:
        return result
    if roles.stores_only(self, FEATURE.setting("KV_BOTH")):
        roles.close(self, given)
        if opened:
            roles.tell_closed(self)
        effect("CONSUMER_EMBEDS.kv_both")
    return result


def keep_text_only(original: Callable[..., Any], self: Any) -> Any:
    """A KV consumer without any modality stays without, unless embedding inputs are asked for."""
    config = roles.multimodal(self)
    given = config is not None and config.enable_mm_embeds
    closed = config is not None and not given and roles.text_only(self)
    result = original(self)
    if closed and config.allow_missing_mm_embeddings:
        roles.close(self, given)
        effect("CONSUMER_EMBEDS.text_only")
    return result


def open_before_platform(original: Callable[..., Any], self: Any) -> Any:
    """Open what the release opens, before it decides on what depends on that."""
    return _open_early(original, self, "CONSUMER_EMBEDS.mm_prefix")


def _open_early(original: Callable[..., Any], config: Any, part_id: str) -> Any:
    """Open a consumer before the platform looks at its attention, and decide that anew.

    Platforms switch off chunked multimodal inputs for bidirectional attention, so it must be known
    before them. Only the flag is taken from the new decision: models have changed others since.
    """
    opened = roles.opens(config, FEATURE.setting("KV_BOTH"))
    if opened:
        roles.tell_opened(config)
        effect(part_id)
    result = original(config)
    if opened:
        roles.open_now(config)
    return result


FEATURE = Feature(
    name="CONSUMER_EMBEDS",
    area="disaggregation",
    summary="EC and KV consumers take embedding inputs; one without its tensor ends alone.",
    why=(
        "0.29.0 lets consumers omit the tensor of an embedding input, but refuses embedding inputs "
        "unless --enable-mm-embeds is given. 0.30.0 and later open them on every consumer, also on "
        "each server that is kv_both only for an offload or prefix store; one request whose "
        "item has no tensor, and which no connector supplies, then ends the engine with everything "
        "on it. Text-only KV consumers get multimodal machinery (0.33.0: if said with limits of "
        "0), and models with bidirectional attention over images lose it where all limits are 0."
    ),
    upstream_pr=(56379,),
    parts=(
        Part(
            name="accept",
            summary="Consumers take embedding inputs without --enable-mm-embeds.",
            seams=(Wrap(_EARLY, accept_early), Wrap(_ALLOW, accept_tensorless)),
            relies_on=(*_ROLES, *_ATTENTION),
            probe=probes.accept,
        ),
        Part(
            name="kv_both",
            summary="kv_both opens them for connectors that transfer prompts only.",
            seams=(Wrap(_RESOLVE, keep_store_closed),),
            relies_on=_ROLES,
            probe=probes.kv_both,
        ),
        Part(
            name="text_only",
            summary="KV consumers without any modality stay text-only, however that is said.",
            seams=(Wrap(_RESOLVE, keep_text_only),),
            relies_on=_ROLES,
            probe=probes.text_only,
        ),
        Part(
            name="mm_prefix",
            summary="Attention over images stays bidirectional where embedding inputs are opened.",
            seams=(Wrap(_EARLY, open_before_platform),),
            relies_on=(*_ROLES, *_ATTENTION, _RESOLVE),
            probe=probes.mm_prefix,
        ),
        Part(
            name="lacking_items",
            summary="An item that nobody can supply ends its request, not the engine.",
            seams=(
                Wrap(_PLAN, lacking_items.plan_encoder_inputs),
                Wrap(f"{_SCHEDULER}.update_from_output", lacking_items.end_lacking),
            ),
            relies_on=(
                f"{_SCHEDULER}.schedule",
                f"{_SCHEDULER}.finish_requests",
                "vllm.multimodal.parse:MultiModalDataParser.placeholder_metadata_fields",
            ),
            probe=probes.lacking_items,
        ),
        Part(
            name="client_error",
            summary="Its client gets HTTP 400 and reads which item it was.",
            seams=(Wrap(f"{_QUEUE}.put", lacking_items.put_refusal),),
            relies_on=(
                f"{_QUEUE}.get",
                f"{_QUEUE}.get_nowait",
                f"{_ASYNC}:AsyncLLM.generate",
                f"{_ASYNC}:InputStreamError",
                "vllm.v1.engine.output_processor:RequestState._new_completion_output",
            ),
            probe=probes.client_error,
            check=checks.client_error,
        ),
        Part(
            name="tensor_sizes",
            summary="A tensor that doesn't fit its item is refused (HTTP 400).",
            seams=(Wrap(_PROCESS, embedding_tensors.check_sizes),),
            relies_on=(
                "vllm.multimodal.parse:DictEmbeddingItems.__init__",
                "vllm.multimodal.inputs:MultiModalFieldConfig.flat_from_sizes",
                "vllm.multimodal.inputs:MultiModalFlatField.build_elems",
                "vllm.multimodal.processing.context:BaseProcessingInfo._get_expected_hidden_size",
            ),
            probe=probes.tensor_sizes,
        ),
        Part(
            name="unreadable",
            summary="What can't be read as an embedding is HTTP 400, not 500.",
            seams=(Wrap(_RENDER, embedding_tensors.render),),
            probe=probes.unreadable,
        ),
    ),
    options=(
        Option(
            name="KV_BOTH",
            type=str,
            default=(
                "NixlConnector,NixlPullConnector,NixlPushConnector,MooncakeConnector,"
                "MoRIIOConnector"
            ),
            summary=(
                "Connectors, separated by commas, with which kv_both takes embedding inputs since "
                "prompts are transferred to it; *: every one, as in vLLM 0.30.0 and later."
            ),
        ),
    ),
)
