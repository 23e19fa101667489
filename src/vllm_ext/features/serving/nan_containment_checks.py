"""What a patched vLLM does with a request that has NaN, where the probes look elsewhere.

Each runs functions of vLLM that its part patches, and needs no other part to be in force.
"""

from __future__ import annotations

import os
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

from vllm_ext.core.feature import Judgement, Verdict
from vllm_ext.features.serving import nan_containment_probes as probes
from vllm_ext.features.serving.nan_worker import BLOCKS_TO_WIPE

HANDED_ON = [1, 4]
_BLOCKS = 6
_ENDED = "Request check-0-abcd was ended because its logits are NaN."


def blocks_with_nan(runner_class: Any, method: str) -> list[int]:
    """Which of 6 blocks still hold NaN once a step begins that hands blocks 1 and 4 on.

    ``method``: what this runner's class brings its requests up to date with.
    """
    import torch
    from vllm.v1.core.sched.output import SchedulerOutput

    class Runner(runner_class):  # type: ignore[misc]  # Any
        def __init__(self) -> None:
            self.cache = torch.full((_BLOCKS, 2, 4), torch.nan)
            self.device = self.cache.device
            self.kv_cache_config = SimpleNamespace(num_blocks=_BLOCKS)
            layers = {"layer": SimpleNamespace(kv_cache=self.cache)}
            self.compilation_config = SimpleNamespace(static_forward_context=layers)
            self.requests: dict[str, Any] = {}
            self.num_prompt_logprobs: dict[str, int] = {}

    runner, planned = Runner(), SchedulerOutput.make_empty()
    setattr(planned.scheduled_cached_reqs, BLOCKS_TO_WIPE, HANDED_ON)
    # What comes after the blocks needs a whole runner.
    with suppress(AttributeError):
        getattr(runner, method)(planned)
    held: list[int] = runner.cache.isnan().flatten(1).any(-1).nonzero().flatten().tolist()
    return held


def _judge_wiping(held: list[int]) -> Judgement:
    if set(held) & set(HANDED_ON):
        return Judgement(
            Verdict.ACTIVE, f"of the blocks {HANDED_ON}, handed on with NaN, {held} still hold it"
        )
    return Judgement(Verdict.NATIVE, "blocks with NaN are zeroed in the step that hands them on")


def wipe() -> Judgement:
    """Check of the part."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    return _judge_wiping(blocks_with_nan(GPUModelRunner, "_update_states"))


def wipe_v2() -> Judgement:
    """Check of the part."""
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    return _judge_wiping(blocks_with_nan(GPUModelRunner, "update_requests"))


def told_by_second_runner() -> dict[str, int] | None:
    """What a pooling step tells: request ``bad`` has NaN in 2 of its 3 tokens, ``good`` has none.

    The output is made without the streams that only a GPU has.
    """
    from unittest import mock

    import torch
    from vllm.v1.worker.gpu import model_runner

    class Output(model_runner.AsyncPoolingOutput):  # type: ignore[misc]  # Any
        def __init__(self, model_runner_output: Any, pooler_output: Any, **how: Any) -> None:
            self.model_runner_output = model_runner_output
            self.pooler_output_cpu = pooler_output
            self.copy_event = SimpleNamespace(synchronize=lambda: None)

    class Runner(model_runner.GPUModelRunner):  # type: ignore[misc]  # Any
        def __init__(self, state: Any) -> None:
            self.execute_model_state = state
            self.kv_connector = SimpleNamespace(post_forward=lambda *args: None)
            self.is_last_pp_rank = True
            self.pcp_manager = self.req_states = self.main_stream = self.output_copy_stream = None
            self.eplb = SimpleNamespace(step=lambda *args, **how: None)
            pooled = torch.ones(2, 4), [True, True]
            self.pooling_runner = SimpleNamespace(pool=lambda *args: pooled)

        def postprocess_num_computed_tokens(self, *args: Any) -> None: ...

    hidden = torch.ones(8, 4)
    # The last rows are padding.
    hidden[[1, 6], 2] = torch.nan
    starts = torch.tensor([0, 3, 5, 5], dtype=torch.int32)
    batch = SimpleNamespace(
        req_ids=["bad", "good"], num_reqs=2, num_tokens=5, query_start_loc=starts
    )
    fields = dict.fromkeys(model_runner.ExecuteModelState._fields)
    fields |= {"input_batch": batch, "hidden_states": hidden, "finished_req_ids": set()}
    with mock.patch.object(model_runner, "AsyncPoolingOutput", Output):
        output = Runner(model_runner.ExecuteModelState(**fields)).pool()
    told: dict[str, int] | None = output.get_output().num_nans_in_logits
    return told


def notice_v2() -> Judgement:
    """Check of the part."""
    told = told_by_second_runner()
    if told == {"bad": 2}:
        return Judgement(Verdict.NATIVE, "a step with NaN tells the scheduler which request has it")
    return Judgement(Verdict.ACTIVE, f"a step with NaN in a request tells the scheduler {told}")


def error_policy() -> Judgement:
    """Check of the part: its option is on meanwhile."""
    from unittest import mock

    from vllm_ext.features.serving.nan_containment import FEATURE

    with mock.patch.dict(os.environ, {FEATURE.variable("POLICY"): "error"}):
        return probes.error_policy()


def read_by_client(ended: Any) -> str:
    """What the client reads of a request that ends with this EngineCoreOutput.

    Through output processor and engine client to what the server raises; "" if it raises nothing.
    """
    import asyncio

    from vllm import SamplingParams
    from vllm.entrypoints.generate.base.serving import GenerateBaseServing
    from vllm.exceptions import GenerationError
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector

    name, kind = ended.request_id, RequestOutputKind.FINAL_ONLY
    processor, queue = OutputProcessor(None, log_stats=False), RequestOutputCollector(kind, name)
    how = SamplingParams(output_kind=kind)
    asked = EngineCoreRequest(name, [1, 2], None, how, None, 0.0, None, None, None)
    asked.external_req_id = name

    class Client(AsyncLLM):  # type: ignore[misc]  # Any
        """Without an engine: the request is in the queue."""

        log_requests = False

        def __init__(self) -> None: ...

        def shutdown(self, *args: Any, **kwargs: Any) -> None: ...

        async def add_request(self, *args: Any, **kwargs: Any) -> Any:
            return queue

        async def abort(self, *args: Any, **kwargs: Any) -> None: ...

    async def read() -> None:
        serving = object.__new__(GenerateBaseServing)
        async for output in Client().generate(asked, how, name):
            serving._raise_if_error(output.outputs[0].finish_reason, name)

    processor.add_request(asked, None, queue=queue)
    processor.process_outputs([ended])
    try:
        asyncio.run(read())
    except GenerationError as error:
        return str(error)
    return ""


def error_message() -> Judgement:
    """Check of the part."""
    from vllm.v1.engine import EngineCoreOutput, FinishReason

    lacking = probes.error_message()
    if lacking.verdict is not Verdict.ACTIVE:
        return lacking
    read = read_by_client(
        EngineCoreOutput("check-0-abcd", [], finish_reason=FinishReason.ERROR, stop_reason=_ENDED)
    )
    if read == _ENDED:
        return Judgement(Verdict.NATIVE, "the client of a failed request reads why it failed")
    return Judgement(Verdict.ACTIVE, f"the client of a failed request reads {read!r}")
