"""What an unpatched vLLM does with embedding inputs of consumers: real roles, real scheduler."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from vllm_ext.core.feature import Judgement, Verdict
from vllm_ext.features.played_scheduler import make_request, make_scheduler, output_of


def settled(role: str, connector: str = "NixlConnector", *, text_only: bool = False) -> Any:
    """The model config of a KV consumer once vLLM has settled what it takes.

    Its attention is bidirectional over images while it takes any multimodal input, as a Gemma 3's.
    ``text_only``: with a limit of 0 for every modality that the model has.
    """
    from vllm.config import KVTransferConfig, VllmConfig
    from vllm.config.multimodal import MultiModalConfig

    taken = MultiModalConfig(limit_per_prompt={"image": 0} if text_only else {})
    # 0.31.0 and later ask the model's own config, 0.29.0 and 0.30.0 the registry.
    model = SimpleNamespace(
        multimodal_config=taken,
        is_multimodal_model=not text_only,
        supports_multimodal_inputs=not text_only,
        model_arch_config=SimpleNamespace(is_mm_prefix_lm=False),
        get_model_arch_config=lambda: SimpleNamespace(is_mm_prefix_lm=taken.enable_mm_embeds),
    )
    transfer = KVTransferConfig(kv_connector=connector, kv_role=role)
    config = SimpleNamespace(
        model_config=model, kv_transfer_config=transfer, ec_transfer_config=None
    )
    VllmConfig._resolve_mm_encoder_only(config)
    (_resolving() or VllmConfig._resolve_allow_missing_mm_embeddings)(config)
    return model


def _resolving() -> Any:
    """The function that opens consumers, None where the release has none."""
    from vllm.config import VllmConfig

    return getattr(VllmConfig, "_resolve_mm_embedding_inputs", None)


_NOTHING = Judgement(
    Verdict.IDLE, "this release opens no consumer by itself; accept follows the same rule"
)


def accept() -> Judgement:
    """A KV consumer that is started without a word of embedding inputs."""
    taken = settled("kv_consumer").multimodal_config
    if taken.enable_mm_embeds:
        return Judgement(Verdict.NATIVE, "a consumer takes embedding inputs")
    return Judgement(
        Verdict.ACTIVE,
        "a consumer's frontend refuses embedding inputs without --enable-mm-embeds",
    )


def kv_both() -> Judgement:
    """A server that is kv_both for the sake of an offload store."""
    if _resolving() is None:
        return _NOTHING
    taken = settled("kv_both", "OffloadingConnector").multimodal_config
    if taken.enable_mm_embeds or taken.allow_missing_mm_embeddings:
        return Judgement(
            Verdict.ACTIVE, "kv_both of an offload store takes embedding inputs without a tensor"
        )
    return Judgement(Verdict.NATIVE, "kv_both of an offload store stays closed")


def text_only() -> Judgement:
    """A KV consumer whose modalities all have a limit of 0."""
    if _resolving() is None:
        return _NOTHING
    if settled("kv_consumer", text_only=True).multimodal_config.enable_mm_embeds:
        return Judgement(
            Verdict.ACTIVE, "a KV consumer with all limits 0 takes embedding inputs nevertheless"
        )
    return Judgement(Verdict.NATIVE, "a KV consumer with all limits 0 stays text-only")


def mm_prefix() -> Judgement:
    """Is the attention that of a model that takes images, once embedding inputs are opened?"""
    if _resolving() is None:
        return _NOTHING
    if settled("kv_consumer").model_arch_config.is_mm_prefix_lm:
        return Judgement(Verdict.NATIVE, "attention is decided with embedding inputs opened")
    return Judgement(
        Verdict.ACTIVE,
        "attention over images is decided before embedding inputs are opened, and stays causal",
    )


def lacking_items() -> Judgement:
    """A request with an item that holds nothing is scheduled; what does the worker get?"""
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
    from vllm.v1.core.encoder_cache_manager import EncoderCacheManager

    scheduler = make_scheduler()
    scheduler.encoder_cache_manager = EncoderCacheManager(cache_size=64)
    scheduler.max_num_encoder_input_tokens = 64
    request = make_request("lacking", range(40))
    place = PlaceholderRange(offset=4, length=8)
    request.mm_features = [MultiModalFeatureSpec(None, "image", "nowhere", place)]
    scheduler.add_request(request)
    planned = scheduler.schedule()
    if planned.scheduled_encoder_inputs:
        return Judgement(
            Verdict.ACTIVE,
            "an item without a tensor goes to the worker, which fails on it with all requests",
        )
    scheduler.update_from_output(planned, output_of(scheduler, planned))
    if "lacking" in scheduler.requests:
        return Judgement(Verdict.ACTIVE, "a request whose item has no tensor waits for ever")
    return Judgement(Verdict.NATIVE, "a request whose item has no tensor is ended")


def client_error() -> Judgement:
    """Whether an output that ends with an error can carry what its client is told."""
    from vllm.v1.engine import EngineCoreOutput

    if "error" in EngineCoreOutput.__struct_fields__:
        return Judgement(Verdict.NATIVE, "an output that ends with an error carries its message")
    return Judgement(
        Verdict.ACTIVE, "an output that ends with an error is HTTP 500 without a reason"
    )


def processed(**data: Any) -> str:
    """What a model's processor says of the embedding input ``data`` of one or more images.

    ``image_grid_thw`` [num_images, 3] is their metadata, of which the product is the number of rows
    in ``image_embeds`` [num_rows, 8]. "" if it is processed.
    """
    from vllm.exceptions import VLLMValidationError
    from vllm.multimodal.inputs import MultiModalFieldConfig
    from vllm.multimodal.parse import DictEmbeddingItems, MultiModalDataItems
    from vllm.multimodal.processing import BaseMultiModalProcessor

    def fields(data: Any) -> Any:
        rows = data["image_grid_thw"].prod(-1)
        return {
            "image_embeds": MultiModalFieldConfig.flat_from_sizes("image", rows),
            "pixel_values": MultiModalFieldConfig.flat_from_sizes("image", rows),
            "image_grid_thw": MultiModalFieldConfig.batched("image"),
        }

    class Begun(Exception):
        """The processor looks for the first thing that it needs."""

    class Processor(BaseMultiModalProcessor):  # type: ignore[misc]  # Any
        def __init__(self) -> None:
            roles = {"image": {"image_embeds": "values", "image_grid_thw": "metadata"}}
            parser = SimpleNamespace(embedding_fields=roles, expected_hidden_size=8)
            self.info = SimpleNamespace(data_parser=parser, get_hf_config=lambda: None)

        def __getattr__(self, name: str) -> Any:
            raise Begun

        _call_hf_processor = _get_mm_fields_config = _get_prompt_updates = None

    items = DictEmbeddingItems(data, "image", {"image_grid_thw"}, fields, {"image_embeds"})
    images = MultiModalDataItems({"image": items})
    inputs = SimpleNamespace(prompt=[0], mm_data_items=images, mm_uuid_items=None)
    try:
        Processor().apply(inputs, None)
    except VLLMValidationError as error:
        return str(error)
    except Exception:
        return ""
    return ""


def tensor_sizes() -> Judgement:
    """A processor is given an embedding tensor of 3 rows for an item that has 4."""
    import torch

    if processed(image_embeds=torch.zeros(3, 8), image_grid_thw=torch.tensor([[1, 2, 2]])):
        return Judgement(Verdict.NATIVE, "a tensor with too few rows is refused in the frontend")
    return Judgement(
        Verdict.ACTIVE,
        "a tensor with too few rows for its item goes to the worker, which fails on it",
    )


def unreadable() -> Judgement:
    """What a renderer raises whose parser can't read an embedding."""
    import asyncio

    from vllm.exceptions import VLLMValidationError
    from vllm.renderers.base import BaseRenderer

    class Renderer(BaseRenderer):  # type: ignore[misc]  # Any
        def __init__(self) -> None:
            self.default_chat_tok_params = None

        async def render_messages_async(self, *args: Any, **kwargs: Any) -> Any:
            raise KeyError("what a parser looks for")

        from_config = render_messages = None

    chat = [{"role": "user", "content": [{"type": "image_embeds", "image_embeds": "AAAA"}]}]
    try:
        asyncio.run(Renderer().render_chat_async([chat], None))
    except VLLMValidationError:
        return Judgement(Verdict.NATIVE, "an embedding that can't be read is its client's error")
    except KeyError:
        return Judgement(Verdict.ACTIVE, "an embedding that can't be read is HTTP 500")
    return Judgement(Verdict.IDLE, "a renderer keeps what its parser raises to itself")
