"""NAN_CONTAINMENT: a request with NaN costs no other request its answer (PR 50283, not merged)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from vllm_ext.core.feature import Feature, Option, Part, effect
from vllm_ext.core.seams import Wrap
from vllm_ext.features.serving import nan_containment_checks as checks
from vllm_ext.features.serving import nan_containment_probes as probes
from vllm_ext.features.serving import nan_quarantine as quarantine
from vllm_ext.features.serving import nan_worker as worker

_SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"
_POOL = "vllm.v1.core.block_pool:BlockPool"
_RUNNER = "vllm.v1.worker.gpu_model_runner"
_SECOND = "vllm.v1.worker.gpu.model_runner:GPUModelRunner"
_SECOND_OUTPUT = "vllm.v1.worker.gpu.async_utils"
_QUEUE = "vllm.v1.engine.output_processor:RequestOutputCollector"
_ASYNC = "vllm.v1.engine.async_llm"


def end_with_error(
    original: Callable[..., Any],
    self: Any,
    scheduler_output: Any,
    model_runner_output: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Policy ``error``: end the requests whose NaN this step reports, and no others.

    Pooling requests go on: vLLM has no way to tell their clients of an error.
    """
    if not model_runner_output.num_nans_in_logits or FEATURE.setting("POLICY") != "error":
        return original(self, scheduler_output, model_runner_output, *args, **kwargs)
    names = quarantine.take_in(self, scheduler_output, model_runner_output)
    generating = {
        name
        for name in names
        if (request := self.requests.get(name)) is not None and request.sampling_params is not None
    }
    from vllm.v1.request import RequestStatus

    ended = self.finish_requests(generating, RequestStatus.FINISHED_ERROR)
    outputs = original(self, scheduler_output, model_runner_output, *args, **kwargs)
    for request in ended:
        _answer(outputs, request)
    effect("NAN_CONTAINMENT.error_policy", len(ended))
    return outputs


def _answer(outputs: dict[int, Any], request: Any) -> None:
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs

    sentence = (
        f"Request {request.request_id} was ended because its logits are NaN "
        f"({FEATURE.variable('POLICY')}=error)."
    )
    told: dict[str, Any] = {"stop_reason": sentence}
    if "error" in EngineCoreOutput.__struct_fields__:
        from vllm.outputs import RequestError

        told["error"] = RequestError(code="internal_error", message=sentence)
    answer = EngineCoreOutput(
        request_id=request.request_id,
        new_token_ids=[],
        finish_reason=request.get_finished_reason(),
        events=request.take_events(),
        trace_headers=request.trace_headers,
        **told,
    )
    outputs.setdefault(request.client_index, EngineCoreOutputs()).outputs.append(answer)


def put_sentence(original: Callable[..., Any], self: Any, output: Any) -> Any:
    """A request that ended with an error and words is that error, as on 0.33.0 natively.

    What is only marked as ended is dropped from a stream that has sent no token yet.
    """
    choices = getattr(output, "outputs", None)
    # Exceptions and outputs of pooling have no list of choices.
    for choice in choices if isinstance(choices, list) else ():
        if choice.finish_reason == "error" and isinstance(choice.stop_reason, str):
            from vllm.exceptions import GenerationError
            from vllm.v1.engine.async_llm import InputStreamError

            effect("NAN_CONTAINMENT.error_message")
            # AsyncLLM.generate() aborts the other choices and raises the cause of this one.
            output = InputStreamError(GenerationError(choice.stop_reason))
            break
    return original(self, output)


FEATURE = Feature(
    name="NAN_CONTAINMENT",
    area="serving",
    summary="A request with NaN in its logits costs no other request its answer.",
    why=(
        "NaN in one request (a damaged weight, an overflow) stays behind in its KV blocks. vLLM "
        "hands them to the next request, and where a kernel reads behind a request's last token, "
        "as on CPUs, that request answers with wrong text or HTTP 400; with prefix caching the "
        "blocks are also found by requests with the same beginning. Here the worker looks at the "
        "last hidden state of every token, whether logprobs are asked for or not; blocks with NaN "
        "leave the prefix cache and are wiped before they change hands. "
        "VLLM_EXT_NAN_CONTAINMENT_POLICY=error ends the request itself with HTTP 500. One line in "
        "the log per affected request."
    ),
    upstream_pr=(50283,),
    parts=(
        Part(
            name="notice",
            summary="The worker tells which requests have NaN, and from which token on.",
            seams=(
                Wrap(f"{_RUNNER}:GPUModelRunner.sample_tokens", worker.watch_sampling),
                Wrap(f"{_RUNNER}:GPUModelRunner._pool", worker.watch_pooling),
                Wrap(f"{_RUNNER}:AsyncGPUModelRunnerOutput.get_output", worker.tell_when_read),
                Wrap(
                    f"{_RUNNER}:AsyncGPUPoolingModelRunnerOutput.get_output", worker.tell_when_read
                ),
            ),
            relies_on=(
                f"{_RUNNER}:GPUModelRunner.execute_model",
                f"{_RUNNER}:GPUModelRunner._bookkeeping_sync",
            ),
            probe=probes.notice,
        ),
        Part(
            name="contain",
            summary="Blocks with NaN leave the prefix cache and are named when they change hands.",
            seams=(
                Wrap(f"{_SCHEDULER}.schedule", quarantine.number_step),
                Wrap(f"{_SCHEDULER}.update_from_output", quarantine.read_report),
                Wrap(f"{_SCHEDULER}._free_request_blocks", quarantine.leave_blocks),
                Wrap(f"{_SCHEDULER}._drain_deferred_frees", quarantine.drain_reported),
                Wrap(f"{_POOL}.get_new_blocks", quarantine.watch_hand_over),
                Wrap(f"{_POOL}.free_blocks", quarantine.watch_free),
                Wrap(f"{_POOL}.cache_full_blocks", quarantine.cache_clean_only),
                Wrap(f"{_POOL}.cache_partial_block", quarantine.cache_clean_only),
            ),
            relies_on=(
                f"{_SCHEDULER}._preempt_request",
                f"{_SCHEDULER}.finish_requests",
                f"{_POOL}.evict_blocks",
                f"{_POOL}._maybe_evict_cached_block",
                "vllm.v1.core.kv_cache_manager:KVCacheManager.get_block_ids",
            ),
            probe=probes.contain,
        ),
        Part(
            name="wipe",
            summary="The worker zeroes those blocks before the step that hands them on runs.",
            seams=(Wrap(f"{_RUNNER}:GPUModelRunner._update_states", worker.wipe_handed_on),),
            relies_on=(f"{_RUNNER}:GPUModelRunner.execute_model",),
            probe=probes.wipe,
            check=checks.wipe,
        ),
        Part(
            name="notice_v2",
            summary="The same as notice in the model runner of vllm.v1.worker.gpu.",
            seams=(
                Wrap(f"{_SECOND}.sample_tokens", worker.watch_second_runner),
                Wrap(f"{_SECOND}.pool", worker.watch_second_runner),
                Wrap(f"{_SECOND_OUTPUT}:AsyncOutput.get_output", worker.tell_when_read),
                Wrap(f"{_SECOND_OUTPUT}:AsyncPoolingOutput.get_output", worker.tell_when_read),
            ),
            relies_on=(f"{_SECOND}.execute_model",),
            probe=probes.notice_v2,
            check=checks.notice_v2,
        ),
        Part(
            name="wipe_v2",
            summary="The same as wipe in the model runner of vllm.v1.worker.gpu.",
            seams=(Wrap(f"{_SECOND}.update_requests", worker.wipe_handed_on),),
            relies_on=(f"{_SECOND}.execute_model",),
            probe=probes.wipe_v2,
            check=checks.wipe_v2,
        ),
        Part(
            name="error_policy",
            summary="POLICY=error ends a request with NaN, and no other, with an error.",
            seams=(Wrap(f"{_SCHEDULER}.update_from_output", end_with_error),),
            relies_on=(f"{_SCHEDULER}.finish_requests", f"{_SCHEDULER}._free_request"),
            probe=probes.error_policy,
            check=checks.error_policy,
        ),
        Part(
            name="error_message",
            summary="The client reads that its logits are NaN, and its request id.",
            seams=(Wrap(f"{_QUEUE}.put", put_sentence),),
            relies_on=(
                f"{_QUEUE}.get",
                f"{_QUEUE}.get_nowait",
                f"{_ASYNC}:AsyncLLM.generate",
                f"{_ASYNC}:InputStreamError",
                "vllm.v1.engine.output_processor:RequestState._new_completion_output",
            ),
            probe=probes.error_message,
            check=checks.error_message,
        ),
    ),
    options=(
        Option(
            name="POLICY",
            type=Literal["clamp", "error"],
            default="clamp",
            summary="clamp: a request with NaN goes on; error: it ends with HTTP 500.",
        ),
    ),
)
