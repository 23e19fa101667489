"""Messages made of vLLM's own classes, packed by its own encoder; needs an imported vLLM."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, MultiModalKwargsItem, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import (
    EngineCoreEvent,
    EngineCoreEventType,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineCoreRequestType,
    FinishReason,
    UtilityOutput,
)
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.outputs import LogprobsLists, LogprobsTensors
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder, UtilityResult

NAN = float("nan")


def frames(message: Any, threshold: int = 256) -> list[bytes]:
    """What vLLM's encoder makes of a message; arrays of ``threshold`` bytes go to own frames."""
    return [bytes(frame) for frame in MsgpackEncoder(size_threshold=threshold).encode(message)]


def outputs() -> EngineCoreOutputs:
    """Outputs of two requests; the first one's logprobs are NaN, with rank 0."""
    broken = EngineCoreOutput(
        request_id="nan",
        new_token_ids=[0],
        new_logprobs=LogprobsLists(
            np.array([[0, 0, 1]], np.int64),
            np.array([[NAN, NAN, -np.inf]], np.float32),
            np.array([0], np.int64),
        ),
        new_prompt_logprobs_tensors=LogprobsTensors(
            torch.arange(60, dtype=torch.int32).reshape(20, 3),
            torch.full((20, 3), NAN),
            torch.zeros(20, dtype=torch.int32),
        ),
        finish_reason=FinishReason.ERROR,
        num_nans_in_logits=3,
        kv_transfer_params={"do_remote_decode": True, "blocks": [1, 2, [3]]},
    )
    whole = EngineCoreOutput(
        request_id="whole",
        new_token_ids=[5, 6],
        pooling_output=torch.tensor([0.5, -1.5], dtype=torch.bfloat16),
        stop_reason="</s>",
        events=[EngineCoreEvent(EngineCoreEventType.QUEUED, 1.5)],
        trace_headers={"traceparent": "00-1"},
        routed_experts=np.arange(6, dtype=np.uint8).reshape(1, 2, 3),
    )
    return EngineCoreOutputs(
        engine_index=2,
        outputs=[broken, whole],
        scheduler_stats=SchedulerStats(num_running_reqs=2, waiting_lora_adapters={"a": 1}),
        timestamp=12.5,
        utility_output=UtilityOutput(7, result=UtilityResult({"slept": [True, None]})),
        finished_requests={"nan"},
    )


def request() -> EngineCoreRequest:
    """A request with an image, an adapter and prompt embeddings."""
    image = MultiModalKwargsItem.dummy(400)
    image["dummy"].data.copy_(torch.arange(400) % 251)
    feature = MultiModalFeatureSpec(
        data=image,
        modality="image",
        identifier="hash",
        mm_position=PlaceholderRange(1, 3, torch.tensor([True, False, True])),
    )
    return EngineCoreRequest(
        request_id="r",
        prompt_token_ids=[1, 2, 3],
        mm_features=[feature],
        sampling_params=SamplingParams(temperature=0.5, stop=["x"], logit_bias={5: 1.5}),
        pooling_params=None,
        arrival_time=3.25,
        lora_request=LoRARequest("adapter", 1, "/adapters/a"),
        cache_salt=None,
        data_parallel_rank=None,
        prompt_embeds=torch.ones(40, 8, dtype=torch.float16),
        priority=-1,
    )


def request_frames(identity: bytes | None = None) -> list[bytes]:
    """The multipart message of the request, as the frontend sends it."""
    sent = [EngineCoreRequestType.ADD.value, *frames(request())]
    return [identity, *sent] if identity is not None else sent


def as_vllm_reads(packed: list[bytes], kind: type) -> Any:
    """What vLLM's own decoder makes of the frames."""
    return MsgpackDecoder(kind).decode(packed)
