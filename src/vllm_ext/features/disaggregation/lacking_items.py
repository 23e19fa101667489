"""Multimodal items without a tensor that nobody can supply: found where an encoder would run."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from typing import Any

from vllm_ext.core.feature import effect

# What a sentence to the client begins with, by which the frontend knows it again.
PREFIX = "No embeddings for "
_LACKING: weakref.WeakKeyDictionary[Any, dict[str, str]] = weakref.WeakKeyDictionary()
_METADATA: weakref.WeakKeyDictionary[Any, dict[str, set[str]]] = weakref.WeakKeyDictionary()


def metadata_fields(scheduler: Any, modality: str) -> set[str]:
    """Fields of an item that say how long it is, but don't hold it; empty where none is declared.

    A model's data parser declares them, and lets a consumer's request leave out all others.
    """
    known = _METADATA.setdefault(scheduler, {})
    if modality not in known:
        from vllm.multimodal import MULTIMODAL_REGISTRY

        known[modality] = set()
        if scheduler.vllm_config.model_config.multimodal_config is None:
            return known[modality]
        try:
            # The scheduler has made one for its encoder budget; what that read is cached.
            processor = MULTIMODAL_REGISTRY.create_processor(scheduler.vllm_config.model_config)
            known[modality] |= processor.info.data_parser.placeholder_metadata_fields(modality)
        except Exception:
            # Models of third parties run in here; what they can't tell must not end the engine.
            logging.getLogger(type(scheduler).__module__).exception(
                "It can't be told which %s items of a request lack their tensor", modality
            )
    return known[modality]


def lacks_tensor(scheduler: Any, feature: Any) -> bool:
    """Whether an item (MultiModalFeatureSpec) holds nothing that an encoder could work on."""
    if feature.data is None:
        return True
    held = {name for name, element in feature.data.items() if element.data is not None}
    metadata = metadata_fields(scheduler, feature.modality)
    return bool(metadata) and held <= metadata


def plan_encoder_inputs(
    original: Callable[..., Any], self: Any, request: Any, *args: Any, **kwargs: Any
) -> Any:
    """Plan nothing for a request if an item that is to be encoded now lacks its tensor.

    vLLM has looked into the encoder cache and asked the connector by then, and the tokens that a
    KV connector brought are behind. The request is ended when the step's output is processed.
    """
    planned = original(self, request, *args, **kwargs)
    for item in planned[0]:
        feature = request.mm_features[item]
        if not lacks_tensor(self, feature):
            continue
        _LACKING.setdefault(self, {})[request.request_id] = (
            f"{PREFIX}item {item} of the request ({feature.modality}, identifier "
            f"{feature.identifier[:80]!r}): it has no tensor, and neither the encoder cache nor a "
            "connector holds it. Send the tensor, or have the item encoded first."
        )
        # As vLLM does where the encoder cache is full: no tokens, no items.
        return ([], 0, planned[2], *([] for _ in planned[3:]))
    return planned


def end_lacking(
    original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any
) -> dict[int, Any]:
    """End the requests that were found lacking, and tell their clients why."""
    lacking = _LACKING.pop(self, None)
    if not lacking:
        outputs: dict[int, Any] = original(self, *args, **kwargs)
        return outputs
    from vllm.v1.request import RequestStatus

    ended = self.finish_requests(lacking.keys(), RequestStatus.FINISHED_ERROR)
    outputs = original(self, *args, **kwargs)
    for request in ended:
        sentence = lacking[request.request_id]
        logging.getLogger(type(self).__module__).warning(
            "Request %s is ended. %s", request.request_id, sentence
        )
        _answer(outputs, request, sentence)
    effect("CONSUMER_EMBEDS.lacking_items", len(ended))
    return outputs


def _answer(outputs: dict[int, Any], request: Any, sentence: str) -> None:
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs

    told: dict[str, Any] = {"stop_reason": sentence}
    if "error" in EngineCoreOutput.__struct_fields__:
        from vllm.outputs import RequestError

        told = {"error": RequestError(code="validation_error", message=sentence)}
    if request.pooling_params is not None:
        import torch

        # Without one, the frontend takes it for a request that generates.
        told["pooling_output"] = torch.empty(0)
    answer = EngineCoreOutput(
        request_id=request.request_id,
        new_token_ids=[],
        finish_reason=request.get_finished_reason(),
        events=request.take_events(),
        trace_headers=request.trace_headers,
        **told,
    )
    outputs.setdefault(request.client_index, EngineCoreOutputs()).outputs.append(answer)


def put_refusal(original: Callable[..., Any], self: Any, output: Any) -> Any:
    """An output that ends a lacking request is an error of its client (HTTP 400)."""
    sentence = refusal(output)
    if sentence:
        from vllm.exceptions import VLLMValidationError
        from vllm.v1.engine.async_llm import InputStreamError

        effect("CONSUMER_EMBEDS.client_error")
        # AsyncLLM.generate() aborts the other choices and raises the cause of this one.
        output = InputStreamError(VLLMValidationError(sentence))
    return original(self, output)


def refusal(output: Any) -> str:
    """The sentence in an output, or in the exception that somebody has made of it; "" if none."""
    choices = getattr(output, "outputs", ())
    if isinstance(choices, list):
        told = [choice.stop_reason for choice in choices if choice.finish_reason == "error"]
    else:
        told = [str(getattr(output, "cause", ""))]
    return next((t for t in told if isinstance(t, str) and t.startswith(PREFIX)), "")
